"""Any text through tokenizing, detokenizing, stop strings, templates and parsers, end to end.

The units have their own properties; these hold for the chain, with the embedded model's tokenizer
and template.
"""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import text_generation_launcher
from hypothesis import assume, given
from hypothesis import strategies as st
from text_generation_process.sampling import Sampling
from text_generation_router.chat.format import FORMATS, ChatFormat
from text_generation_router.chat.parser import (
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.rendering import Renderer
from text_generation_router.chat.template import ChatTemplate
from text_generation_router.request import FinishReason, GenerateParameters, Request, TokenOutput
from text_generation_router.scheduler.entry import Entry
from text_generation_router.text.tokenizer import Tokenizer

MODEL = Path(text_generation_launcher.__file__).parent / "embedded_model"
TOKENIZER = Tokenizer.load(MODEL, num_workers=1)
TEMPLATE = ChatTemplate.load(MODEL, None)
assert TEMPLATE is not None
RENDERER = Renderer(TEMPLATE.sources, TEMPLATE.special_tokens, 2**30)

# Difficult texts: several bytes, several code points, markers and their prefixes, syntax.
FRAGMENTS = (
    *(
        "é",
        "e\u0301",
        "日本語",
        "🦀",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "\u202eabc",
        "\ufeff",
        "\ufffd",
        "\0",
        "\x1b[",
    ),
    *("{{ x }}", "{% if %}", "{# #}", "{%- endfor %}", "\\n", "%s", "${x}", "</s>", "[INST]"),
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<think>", "</think>", "</thi", "{", "}", "[", "]", '"', "\\", ": ", ", ", "\r\n", "\t"),
    *(" ", "\n", "  ", "\n\n", '{"name": "f", "arguments": {', '"a": 1}}', "import os", "text"),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=20).map("".join)
SPECIAL = frozenset(token_id for token_id in range(3) if TOKENIZER.is_special(token_id))


def encode(text: str) -> tuple[int, ...]:
    return tuple(asyncio.run(TOKENIZER.token_ids(text, add_special_tokens=False)))


def written(
    ids: Sequence[int], stops: tuple[str, ...] = (), *, keeps_stops: bool = True
) -> list[TokenOutput]:
    """The outputs of a generation of these tokens, up to the one that ends it."""
    asked = GenerateParameters(inputs="", stop=stops, keeps_stop_sequence=keeps_stops)
    answer = Entry(0, Request(asked, (1,), Sampling(), len(ids)), TOKENIZER)
    outputs: list[TokenOutput] = []
    for place, token_id in enumerate(ids, 1):
        reason = FinishReason.LENGTH if place == len(ids) else None
        outputs.append(answer.step(token_id, -1.0, reason))
        if outputs[-1].generated is not None:
            break
    return outputs


@given(TEXTS)
def test_tokens_give_the_text_back(text: str) -> None:
    ids = encode(text)
    decoder = TOKENIZER.stream_decoder()
    pieces = [decoder.step(token_id) for token_id in ids]
    assert decoder.flush() == ""
    assert "".join(pieces) == text
    assume(ids and not SPECIAL.intersection(ids))
    outputs = written(ids)
    assert "".join(output.delta for output in outputs) == text
    assert outputs[-1].generated is not None
    assert outputs[-1].generated.text == text


@given(TEXTS)
def test_offsets_are_characters_of_the_text(text: str) -> None:
    encoding = asyncio.run(TOKENIZER.encode(text, add_special_tokens=False))
    assert [text[start:end] == "" for start, end in encoding.offsets] == [False] * len(encoding.ids)
    for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        whole = TOKENIZER.token_bytes(token_id)
        assert whole in text[start:end].encode(), (token_id, text[start:end])


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 3), min_size=1, max_size=30))
def test_any_tokens_give_whole_characters(ids: list[int]) -> None:
    texts = [output.token.text for output in written(ids)]
    assert len(texts) == len(ids)
    for text in texts:
        text.encode()
    visible = b"".join(b"" if i in SPECIAL else TOKENIZER.token_bytes(i) for i in ids)
    if not SPECIAL.intersection(ids):
        assert "".join(texts) == visible.decode(errors="replace")


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends; the longest of those that end there."""
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(ends, key=lambda pair: (pair[0], -len(pair[1]))) if ends else None


@given(TEXTS, st.data())
def test_stop_strings_end_the_text_and_are_never_seen(text: str, data: st.DataObject) -> None:
    ids = encode(text)
    assume(ids and not SPECIAL.intersection(ids))
    cuts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
    from_text = cuts.map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    stops = tuple(data.draw(st.lists(from_text | TEXTS.filter(bool), min_size=1, max_size=4)))
    found = first_stop(text, stops)
    kept = "".join(output.delta for output in written(ids, stops))
    shown = "".join(output.delta for output in written(ids, stops, keeps_stops=False))
    if found is None:
        assert kept == shown == text
    else:
        assert kept == text[: found[0]]
        assert shown == text[: found[0] - len(found[1])]
        assert not any(stop in shown for stop in stops)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1))
def test_templates_take_texts_as_they_are(messages: list[tuple[str, str]]) -> None:
    given_messages = [{"role": role, "content": text} for role, text in messages]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    assert RENDERER.render(given_messages, None) == f"{expected}<|im_start|>assistant\n"
    continued = RENDERER.render(given_messages, None, continue_final_message=True)
    assert continued == expected.removesuffix("<|im_end|>\n")
    assert b"".join(map(TOKENIZER.token_bytes, encode(continued))).decode() == continued


def texts_of(form: ChatFormat, pieces: Sequence[str]) -> list[tuple[str, int, str]]:
    """The events, with adjacent ones of one kind joined: kind, index of the call, text."""
    parser = ChatParser(form, parses_tools=True)
    joined: list[tuple[str, int, str]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case ToolCallStart(index, name):
                joined.append(("call", index, name))
                continue
            case ToolCallArguments(index, text):
                kind = "arguments"
            case ContentDelta(text) | ReasoningDelta(text):
                kind, index = type(event).__name__, -1
        if joined and joined[-1][:2] == (kind, index):
            joined[-1] = (kind, index, joined[-1][2] + text)
        else:
            joined.append((kind, index, text))
    return joined


FORMS = [
    dataclasses.replace(form, reasoning=pair)
    for form in FORMATS.values()
    for pair in (None, ("<think>", "</think>"))
]


@pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: form.name + "-think" * bool(form.reasoning)
)
@given(text=TEXTS, parts=st.lists(st.integers(0, 1), max_size=2), argument=TEXTS)
def test_streamed_tokens_are_parsed_as_the_whole_text(
    form: ChatFormat, text: str, parts: list[int], argument: str
) -> None:
    """Partial characters, tokens across markers, text that only looks like a call."""
    calls = [("call", json.dumps({"argument": argument}, ensure_ascii=False)) for _ in parts]
    text += form.write_calls(calls) if calls else ""
    ids = encode(text)
    assume(ids and not SPECIAL.intersection(ids))
    deltas = [output.delta for output in written(ids)]
    assert texts_of(form, deltas) == texts_of(form, [text]) == texts_of(form, list(text))
