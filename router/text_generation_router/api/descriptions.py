"""Descriptions of fields that several request bodies have, for the documentation."""

TEMPERATURE = (
    "Above 1 the choice of tokens is more random, below 1 less. 0: always the "
    "likeliest token. Default: 1."
)
TOP_P = "Draw only from the likeliest tokens whose probabilities add up to this, 0 to 1."
TYPICAL_P = "Draw only from the most typical tokens whose probabilities add up to this, 0 to 1."
REPETITION_PENALTY = "Above 1, tokens that were used are less likely to come again. 1: no penalty."
DETERMINISTIC = (
    "The same tokens, bit for bit, regardless of what else is in the batch. Refused "
    "where the server can not promise it."
)
STREAM = "Answer with a stream of events."
