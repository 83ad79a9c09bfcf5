"""Texts, stop strings, special tokens and endings of one generation."""

import math

import pytest
from text_generation_router.request import FinishReason, Timings, TokenOutput
from text_generation_router.scheduler.answer import Answer
from text_generation_router.tokenizer import Tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from router.tests.scheduling import make_request

LENGTH, EOS, STOP = FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE
# 0-5 are text, 6-8 are the bytes of a euro sign, 9 is special, 10 is not marked as special.
TOKENS = ["Ġone", "Ġtwo", "Ġthree", ".", "Ġfo", "ur", "â", "Ĥ", "¬", "<s>", "<end>"]
FAST = FastTokenizer(models.BPE({token: place for place, token in enumerate(TOKENS)}, []))
FAST.decoder = decoders.ByteLevel()
FAST.add_special_tokens(["<s>"])
TOKENIZER = Tokenizer(FAST, {}, num_workers=1)


def write(
    ids: list[int], finish_reason: FinishReason | None = None, *stop: str
) -> list[TokenOutput]:
    """The outputs for `ids` until one ends the generation; `finish_reason` comes with the last."""
    answer = Answer(make_request((0,), 99, *stop), TOKENIZER)
    outputs = []
    for place, token_id in enumerate(ids):
        reason = finish_reason if place == len(ids) - 1 else None
        outputs.append(answer.step(token_id, -1.0, reason))
        if outputs[-1].generated is not None:
            break
    return outputs


@pytest.mark.parametrize(
    ("ids", "reason", "stop", "texts", "text", "ending"),
    [
        ([0, 1], LENGTH, (), [" one", " two"], " one two", LENGTH),
        # Special tokens are streamed and are no text; an end is always special.
        ([0, 9, 1], LENGTH, (), [" one", "<s>", " two"], " one two", LENGTH),
        ([0, 9], EOS, (), [" one", "<s>"], " one", EOS),
        ([0, 10], EOS, (), [" one", "<end>"], " one", EOS),
        ([0, 10], LENGTH, (), [" one", "<end>"], " one<end>", LENGTH),
        # Characters come whole; what never becomes whole is shown at the end.
        ([6, 7, 8], LENGTH, (), ["", "", "€"], "€", LENGTH),
        ([0, 6, 7], LENGTH, (), [" one", "", "�"], " one�", LENGTH),
        ([6, 0], LENGTH, (), ["", "� one"], "� one", LENGTH),
        ([6, 7, 9], EOS, (), ["", "", "�<s>"], "�", EOS),
        ([6, 9, 8], LENGTH, (), ["", "�<s>", "�"], "��", LENGTH),
        # Stop strings: over tokens, inside a token, in a character, in a special token.
        ([0, 1, 2], None, ("two",), [" one", " two"], " one two", STOP),
        ([0, 1, 2], None, ("one tw",), [" one", " tw"], " one tw", STOP),
        ([0, 1, 2], None, ("hre", "thr"), [" one", " two", " thr"], " one two thr", STOP),
        ([4, 5, 3], None, ("four",), [" fo", "ur"], " four", STOP),
        ([6, 7, 8, 0], None, ("€",), ["", "", "€"], "€", STOP),
        ([0, 9, 1], None, ("<s>",), [" one", "<s>"], " one", STOP),
        ([0, 9, 1], None, ("e<",), [" one", "<"], " one", STOP),
        ([0, 6, 9], None, ("�",), [" one", "", "�"], " one�", STOP),
        # What the shard decided wins; the text still ends where the user wanted.
        ([0, 1], LENGTH, ("two",), [" one", " two"], " one two", LENGTH),
        ([0, 1], LENGTH, ("w",), [" one", " tw"], " one tw", LENGTH),
        ([0, 9], EOS, ("<s>",), [" one", "<s>"], " one", EOS),
    ],
)
def test_table(
    ids: list[int],
    reason: FinishReason | None,
    stop: tuple[str, ...],
    texts: list[str],
    text: str,
    ending: FinishReason,
) -> None:
    outputs = write(ids, reason, *stop)
    assert [output.token.text for output in outputs] == texts
    assert [output.generated for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    generated = outputs[-1].generated
    assert (generated.text, generated.finish_reason) == (text, ending)
    assert generated.generated_tokens == len(texts)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_json_does_not_know_is_none(logprob: float) -> None:
    answer = Answer(make_request((0, 1)), TOKENIZER)
    output = answer.step(0, logprob, None, ((1,), (logprob,)))
    assert output.token.logprob is None and output.top_tokens[0].logprob is None
    assert answer.prefill((logprob, -1.0)).tokens[0].logprob is None


def test_top_and_prompt_tokens_have_the_text_of_each_id_alone() -> None:
    answer = Answer(make_request((9, 0, 6)), TOKENIZER)
    tokens = answer.prefill((math.nan, -1.0, -2.0)).tokens
    assert [(t.text, t.special) for t in tokens] == [("<s>", True), (" one", False), ("�", False)]
    output = answer.step(0, -1.0, None, ((0, 9), (-1.0, -2.0)))
    assert [(t.id, t.text, t.logprob) for t in output.top_tokens] == [
        (0, " one", -1.0),
        (9, "<s>", -2.0),
    ]


def test_timings_come_with_the_last_token_only() -> None:
    answer, timings = Answer(make_request(), TOKENIZER), Timings(1.0, 2.0)
    assert answer.step(0, -1.0, None, timings=timings).timings is None
    assert answer.step(0, -1.0, LENGTH, timings=timings).timings is timings
