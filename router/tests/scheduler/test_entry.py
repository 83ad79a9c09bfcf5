"""Texts, stop strings, special tokens and endings of one generation."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.request import FinishReason, TokenOutput
from text_generation_router.scheduler.entry import Entry
from text_generation_router.text.tokenizer import _BYTE_OF_CHARACTER, Tokenizer

from router.tests.scheduling import make_request
from router.tests.tiny_tokenizer import make_tokenizer, tiny_tokenizer

LENGTH, EOS, STOP = FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE
# 0-5 are text, 6-8 are the bytes of a euro sign, 9 is special, 10 is not marked as special.
TOKENS = ["Ġone", "Ġtwo", "Ġthree", ".", "Ġfo", "ur", "â", "Ĥ", "¬", "<s>", "<end>"]
TOKENIZER = make_tokenizer(tiny_tokenizer(TOKENS, ["<s>"]))


def write(
    ids: list[int], finish_reason: FinishReason | None = None, *stop: str
) -> list[TokenOutput]:
    """The outputs for `ids` until one ends the generation; `finish_reason` comes with the last."""
    answer = Entry(0, make_request((0,), 99, *stop), TOKENIZER)
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
    assert "".join(output.delta for output in outputs) == text


def show(
    ids: list[int],
    finish_reason: FinishReason | None,
    stop: tuple[str, ...],
    visible: frozenset[str] = frozenset(),
    tokenizer: Tokenizer = TOKENIZER,
) -> list[TokenOutput]:
    """The outputs for `ids` where stop strings are left out."""
    request = make_request((0,), 99, *stop, visible_special_tokens=visible)
    asked = replace(request.asked, keeps_stop_sequence=False)
    answer = Entry(0, replace(request, asked=asked), tokenizer)
    outputs = []
    for place, token_id in enumerate(ids):
        reason = finish_reason if place == len(ids) - 1 else None
        outputs.append(answer.step(token_id, -1.0, reason))
        if outputs[-1].generated is not None:
            break
    return outputs


@pytest.mark.parametrize(
    ("ids", "reason", "stop", "deltas", "found", "ending"),
    [
        ([0, 1], LENGTH, (), [" one", " two"], None, LENGTH),
        # A whole token, over tokens, inside a token.
        ([0, 1, 2], None, (" two",), [" one", ""], " two", STOP),
        ([0, 1, 2], None, ("one tw",), [" ", ""], "one tw", STOP),
        ([0, 1, 2], None, ("w",), [" one", " t"], "w", STOP),
        # What was held back is shown as soon as it is harmless, or at the end.
        ([0, 1, 2], LENGTH, ("e twx",), [" on", "e two", " three"], None, LENGTH),
        ([0, 0, 1], LENGTH, ("one on!",), [" ", "one ", "one two"], None, LENGTH),
        ([0, 1], LENGTH, ("two three",), [" one", " two"], None, LENGTH),
        ([0, 1, 9], EOS, ("two three",), [" one", " ", "two"], None, EOS),
        # The one that ends first; of several that end together the longest.
        ([0, 1, 2], None, ("e two th", "tw"), [" on", "e "], "tw", STOP),
        ([4, 5, 3], None, ("r", "our", "ur"), [" f", ""], "our", STOP),
        ([0, 0, 1], None, ("e one t", "one tw", "x"), [" ", "on", ""], "e one t", STOP),
        # It is the reason even where it comes with the last token.
        ([0, 1], LENGTH, ("two",), [" one", " "], "two", STOP),
        # In characters over several tokens.
        ([6, 7, 8, 0], None, ("€",), ["", "", ""], "€", STOP),
        # Hidden special tokens are no text, so a stop string continues after one …
        ([4, 9, 5], None, ("four",), [" ", "", ""], "four", STOP),
        # … and one can be a stop string as a whole.
        ([0, 9, 1], None, ("<s>",), [" one", ""], "<s>", STOP),
        ([0, 9, 1], None, ("e t", "<s>"), [" on", "e"], "<s>", STOP),
        ([0, 9, 1], LENGTH, ("e<s>",), [" on", "", "e two"], None, LENGTH),
        ([0, 9], EOS, ("<s>",), [" one", ""], None, EOS),
        ([0, 6, 9], None, ("�",), [" one", "", ""], "�", STOP),
    ],
)
def test_stop_strings_left_out(
    ids: list[int],
    reason: FinishReason | None,
    stop: tuple[str, ...],
    deltas: list[str],
    found: str | None,
    ending: FinishReason,
) -> None:
    outputs = show(ids, reason, stop)
    assert [output.delta for output in outputs] == deltas
    generated = outputs[-1].generated
    assert generated.text == "".join(deltas)
    assert (generated.finish_reason, generated.stop_sequence) == (ending, found)


@pytest.mark.parametrize("keeps", [True, False])
def test_special_tokens_are_shown_on_demand_but_never_the_end(keeps: bool) -> None:
    visible = frozenset({"<s>"})
    request = make_request((0,), 99, visible_special_tokens=visible)
    asked = replace(request.asked, keeps_stop_sequence=keeps)
    for last, reason, shown in [(1, LENGTH, " two"), (9, LENGTH, "<s>"), (9, EOS, "")]:
        answer = Entry(0, replace(request, asked=asked), TOKENIZER)
        outputs = [answer.step(0, -1.0, None), answer.step(9, -1.0, None)]
        outputs.append(answer.step(last, -1.0, reason))
        assert [output.delta for output in outputs] == [" one", "<s>", shown]
        assert outputs[-1].generated.text == f" one<s>{shown}"
        assert [output.token.special for output in outputs] == [False, True, last == 9]


@pytest.mark.parametrize(("keeps", "told"), [(True, LENGTH), (False, EOS)])
def test_an_end_that_is_the_last_token_allowed(keeps: bool, told: FinishReason) -> None:
    """TGI's reason is the length, OpenAI's is the end."""
    for limit, ending in ((2, told), (3, EOS)):
        request = make_request((0,), limit)
        asked = replace(request.asked, keeps_stop_sequence=keeps)
        answer = Entry(0, replace(request, asked=asked), TOKENIZER)
        answer.step(0, -1.0, None)
        generated = answer.step(9, -1.0, EOS).generated
        assert generated is not None
        assert (generated.text, generated.finish_reason) == (" one", ending)


def test_a_stop_string_over_a_special_token_that_is_shown() -> None:
    outputs = show([0, 9, 1], None, ("e<s> t",), frozenset({"<s>"}))
    assert [output.delta for output in outputs] == [" on", "", ""]
    assert outputs[-1].generated.stop_sequence == "e<s> t"
    assert [output.token.text for output in outputs] == [" one", "<s>", " t"]


def test_a_kept_stop_string_is_named() -> None:
    assert write([0, 1, 2], None, "x", "two")[-1].generated.stop_sequence == "two"
    assert write([0, 1, 2], LENGTH, "x")[-1].generated.stop_sequence is None


SPELLING = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
PIECES = ["a", "b", "é", "€", "😀", "aé", "<s>", "é€", "ab"]


@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=15),
    st.lists(st.lists(st.sampled_from(PIECES[:6]), min_size=1, max_size=4).map("".join)),
    st.lists(st.integers(1, 6), min_size=60, max_size=60),
    st.booleans(),
)
def test_deltas_are_the_text_without_the_stop_string(
    words: list[str], stops: list[str], cuts: list[int], shows_special: bool
) -> None:
    """Tokens are cut at random bytes; a special token is a token of its own."""
    tokenizer, ids = tokenizer_of(words, cuts)
    visible = frozenset({"<s>"} if shows_special else ())
    outputs = show(ids, LENGTH, tuple(stops), visible, tokenizer)
    text = "".join(word for word in words if shows_special or word != "<s>")
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    generated = outputs[-1].generated
    if stops and ends:
        found = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        text = text[: ends[0] - len(found)]
        assert (generated.finish_reason, generated.stop_sequence) == (STOP, found)
    else:
        assert (generated.finish_reason, generated.stop_sequence) == (LENGTH, None)
    assert "".join(output.delta for output in outputs) == generated.text == text
    # All shown text was certain, and no certain text was held back.
    shown, written = "", ""
    for output in outputs[:-1]:
        shown += output.delta
        if not output.token.special or shows_special:
            written += output.token.text
        held = written[len(shown) :]
        assert written == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)


def tokenizer_of(words: list[str], cuts: list[int]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer, and ids of `words`, cut into tokens of the given number of bytes."""
    pieces: list[str] = []
    sizes = iter(cuts)
    text = b""
    for word in [*words, "<s>"]:
        if word != "<s>":
            text += word.encode()
            continue
        while text:
            size = next(sizes, len(text))
            pieces.append("".join(SPELLING[byte] for byte in text[:size]))
            text = text[size:]
        pieces.append("<s>")
    del pieces[-1]
    fast = tiny_tokenizer([piece for piece in dict.fromkeys(pieces) if piece], ["<s>"])
    return make_tokenizer(fast), [fast.token_to_id(piece) for piece in pieces]


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_json_does_not_know_is_none(logprob: float) -> None:
    answer = Entry(0, make_request((0, 1)), TOKENIZER)
    output = answer.step(0, logprob, None, ((1,), (logprob,)))
    assert output.token.logprob is None and output.top_tokens[0].logprob is None
    assert answer.read_prompt((logprob, -1.0)).tokens[0].logprob is None


def test_top_and_prompt_tokens_have_the_text_of_each_id_alone() -> None:
    answer = Entry(0, make_request((9, 0, 6)), TOKENIZER)
    tokens = answer.read_prompt((math.nan, -1.0, -2.0)).tokens
    assert [(t.text, t.special) for t in tokens] == [("<s>", True), (" one", False), ("�", False)]
    output = answer.step(0, -1.0, None, ((0, 9), (-1.0, -2.0)))
    assert [(t.id, t.text, t.logprob) for t in output.top_tokens] == [
        (0, " one", -1.0),
        (9, "<s>", -2.0),
    ]


@given(
    st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=12),
    st.sampled_from((LENGTH, EOS)),
    st.booleans(),
)
def test_looking_for_stop_strings_changes_nothing_but_their_endings(
    ids: list[int], reason: FinishReason, keeps: bool
) -> None:
    """Texts without stop strings take a shorter way."""
    outputs = []
    for stop in ((), ("\0",)):
        request = make_request((0,), 99, *stop)
        asked = replace(request.asked, keeps_stop_sequence=keeps)
        answer = Entry(0, replace(request, asked=asked), TOKENIZER)
        outputs.append(
            [
                answer.step(token_id, -0.5, reason if place == len(ids) - 1 else None)
                for place, token_id in enumerate(ids)
            ]
        )
    assert outputs[0] == outputs[1]
