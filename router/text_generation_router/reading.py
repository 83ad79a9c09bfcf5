"""What a prompt gives that is read and not continued: a vector, made of its hidden states; or a
score, how well a document answers a query, of a model that was trained to say yes or no.

The prompt of a score is Qwen3-Reranker's: an instruction, the query and the document. The score is
the probability of `yes` as the next token, relative to `yes` and `no`.
"""

import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_generation_process.json_file import read_object

from text_generation_router.errors import BadRequestError, ValidationError
from text_generation_router.request import Pooling
from text_generation_router.text.tokenizer import Tokenizer

# Where sentence-transformers writes it, below the model's directory.
_SETTINGS = Path("1_Pooling", "config.json")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The default instruction."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
# A part of the name of such models: their config.json is the same as another Qwen3's.
_NAME = "qwen3-reranker"


def pooling_of(directory: Path, name: str | None) -> Pooling:
    """How the model's prompts are pooled: as named, else as in the settings of
    sentence-transformers in the model's directory, else the last token, which has seen the others.

    Raises ValueError, one sentence, if these settings are not supported.
    """
    if name is not None:
        return Pooling(name)
    path = directory / _SETTINGS
    if not path.is_file():
        return Pooling.LAST
    try:
        modes = _modes(read_object(path))
    except ValueError as error:
        raise ValueError(f"{error}; or choose --pooling last or --pooling mean") from error
    known = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN, "mean": Pooling.MEAN}
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(
            f"{path} asks for the pooling {' and '.join(modes) or 'none'}; last token and mean are "
            "supported: choose one with --pooling last or --pooling mean"
        )
    return known[modes[0]]


def _modes(settings: dict[str, Any]) -> list[str]:
    """The modes that are on, without their prefix; newer files have one `pooling_mode`."""
    if isinstance(mode := settings.get("pooling_mode"), str):
        return [mode]
    prefix = "pooling_mode_"
    return [
        name.removeprefix(prefix)
        for name, is_on in settings.items()
        if name.startswith(prefix) and is_on is True
    ]


def vector_of(pooled: bytes, dimensions: int | None, is_normalised: bool) -> "array[float]":
    """The vector in the bytes of `PrefillOutput.pooled`, in float32: its first `dimensions`, or
    all, scaled to length 1 if `is_normalised`."""
    vector = array("f", pooled)
    if dimensions is not None:
        vector = vector[:dimensions]
    if is_normalised and (length := math.hypot(*vector)) > 0:
        vector = array("f", [value / length for value in vector])
    return vector


class NotARerankerError(BadRequestError):
    """The model can not score documents; the message says why."""

    status_code = 404
    error_type = "not_found"


@dataclass(frozen=True, slots=True)
class Reranker:
    """The ids of a reranker's two answers, and its prompts."""

    answer_ids: tuple[int, ...]
    """The tokens yes and no, whose log-probabilities `score` takes."""

    def prompt(self, query: str, document: str, instruction: str | None) -> str:
        """The prompt whose next token is the answer."""
        return _BEFORE + _question(query, document, instruction) + _BEHIND

    async def cut_prompt(
        self,
        tokenizer: Tokenizer,
        query: str,
        document: str,
        instruction: str | None,
        most_tokens: int,
    ) -> list[int]:
        """The ids of the prompt, at most `most_tokens`: the end of the document is cut off. Raises
        ValidationError if the query does not fit."""
        before = await tokenizer.token_ids(_BEFORE + _question(query, "", instruction), False)
        behind = await tokenizer.token_ids(_BEHIND, False)
        whole = await tokenizer.token_ids(_BEFORE + _question(query, document, instruction), False)
        room = most_tokens - len(behind)
        if room <= len(before):
            raise ValidationError(
                f"`query` and `instruction` must leave room for a document in {most_tokens} tokens;"
                f" with the model's own text they have {len(before) + len(behind)}"
            )
        return [*whole[:room], *behind]


def score(logprobs: tuple[float, ...], is_raw: bool) -> float:
    """The probability of yes relative to no, from both log-probabilities; `is_raw`: its logit."""
    yes, no = logprobs
    if is_raw:
        return yes - no
    # Exponents of at most 0 can not overflow.
    largest = max(yes, no)
    share = math.exp(yes - largest)
    return share / (share + math.exp(no - largest))


def find_reranker(
    directory: Path, model_id: str, tokenizer: Tokenizer, is_asked_for: bool
) -> Reranker | str:
    """The model's reranker, or a sentence that says why it has none.

    A model is a reranker if `--reranker` is given, or if its name has Qwen3-Reranker: nothing else
    tells it from another Qwen3. Raises ValueError if `--reranker` is given and the tokenizer has no
    `yes` and `no`.
    """
    is_named = any(_NAME in name.lower() for name in (model_id, directory.name))
    if not (is_asked_for or is_named):
        return (
            f"{model_id} is not known to be a reranker: /score and /rerank need one of "
            "Qwen3-Reranker's form; serve Qwen3-Reranker, or start with --reranker if this model "
            "was trained to answer yes or no in that form"
        )
    ids = [tokenizer.id_of(word) for word in ("yes", "no")]
    if None not in ids:
        return Reranker(tuple(token_id for token_id in ids if token_id is not None))
    sentence = (
        f"the tokenizer of {model_id} has no tokens `yes` and `no`, by which a reranker "
        "answers; serve a model of Qwen3-Reranker's form"
    )
    if is_asked_for:
        raise ValueError(f"--reranker is not possible: {sentence}")
    return sentence


def _question(query: str, document: str, instruction: str | None) -> str:
    asked = INSTRUCTION if instruction is None else instruction
    return f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
