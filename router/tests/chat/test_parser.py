"""Reading answers: what is found, what is left as it is, and that cuts change nothing."""

import json
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.chat.format import FORMATS, ChatFormat, ToolSpec
from text_generation_router.chat.parser import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

THINK = ("<think>", "</think>")
ROWS = [row for row in FORMATS.values() if not row.has_channels]
ALL = [replace(row, reasoning=pair) for row in ROWS for pair in (None, THINK)]
TOOLS = [
    ToolSpec("get_weather", parameters={"properties": {"city": {"type": "string"}}}),
    ToolSpec("f", parameters={"properties": {"a": {"type": "string"}}}),
]
CALLS = [("get_weather", '{"city": "Paris \\"é\\" {[", "days": [1, {"a": 2}]}'), ("now", "{}")]


def joined(events: list[ChatEvent]) -> list[ChatEvent]:
    """Adjacent events of one kind, joined."""
    found: list[ChatEvent] = []
    for kind, group in groupby(events, key=lambda e: (type(e), getattr(e, "index", None))):
        pieces = list(group)
        if kind[0] is ToolCallStart:
            found += pieces
        else:
            text = "".join(piece.text for piece in pieces)  # type: ignore[union-attr]
            found.append(replace(pieces[0], text=text))  # type: ignore[arg-type]
    return found


def read(
    form: ChatFormat, pieces: list[str], parses_tools: bool = True, in_reasoning: bool = False
) -> list[ChatEvent]:
    parser = ChatParser(
        form, parses_tools=parses_tools, starts_in_reasoning=in_reasoning, tools=TOOLS
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def calls(first: int = 0, pairs: list[tuple[str, str]] = CALLS) -> list[ChatEvent]:
    events: list[ChatEvent] = []
    for index, (name, arguments) in enumerate(pairs, first):
        events += [ToolCallStart(index, name), ToolCallArguments(index, arguments)]
    return events


def names(form: ChatFormat) -> str:
    return form.name + ("-think" if form.reasoning else "")


@pytest.mark.parametrize("form", ALL, ids=names)
def test_text_stays_as_it_is(form: ChatFormat) -> None:
    for text in (" Hello,\n\n <b>world</b> ", "", " \n", "[1, 2] < 3", "</tool_call> <|x|>"):
        assert read(form, list(text)) == ([ContentDelta(text)] if text else [])


@pytest.mark.parametrize("form", [f for f in ALL if f.name in ("hermes", "mistral")], ids=names)
def test_text_behind_calls_is_text(form: ChatFormat) -> None:
    text = form.write_calls(CALLS) + "\nDone. "
    assert read(form, [text]) == [*calls(), ContentDelta("Done. ")]
    again = f"{text}\n{form.write_calls(CALLS)}"
    assert read(form, [again]) == [*calls(), ContentDelta("Done."), *calls(2)]


@pytest.mark.parametrize("form", ALL, ids=names)
def test_without_tools_calls_are_text(form: ChatFormat) -> None:
    text = form.write_calls(CALLS)
    assert read(form, list(text), parses_tools=False) == [ContentDelta(text)]


@pytest.mark.parametrize("form", ALL, ids=names)
def test_reasoning_comes_first(form: ChatFormat) -> None:
    text = "<think>\nfirst <tool_call> {\n</think>\n\nSo"
    inside, thought = text.removeprefix("<think>"), ReasoningDelta("first <tool_call> {")
    if form.reasoning is None:
        assert read(form, [text], parses_tools=False) == [ContentDelta(text)]
        return
    assert read(form, list(text)) == [thought, ContentDelta("So")]
    assert read(form, list("\n" + text)) == [thought, ContentDelta("So")]
    assert read(form, list(inside), in_reasoning=True) == [thought, ContentDelta("So")]
    assert read(form, list("So " + text), parses_tools=False) == [ContentDelta("So " + text)]
    with_calls = text.removesuffix("So") + form.write_calls(CALLS)
    assert read(form, list(with_calls)) == [thought, *calls()]
    unfinished = "still \n</thin"
    assert read(form, [unfinished], in_reasoning=True) == [ReasoningDelta(unfinished)]
    assert read(form, ["<think>a</think>\n"]) == [ReasoningDelta("a")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_call>\nnothing\n</tool_call> b"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "argum'),
        ("hermes", "so <tool_c"),
        ("llama3", '<|python_tag|>brave_search.call(query="a")'),
        ("llama3", '{"a": {"name": "b", "parameters": {}}}'),
        ("llama3", "{ is a brace }"),
        ("mistral", '[TOOL_CALLS]{"name": "a", "arguments": {}}'),
        ("mistral-args", "[TOOL_CALLS]a b[ARGS]{}"),
        ("mistral-args", "[TOOL_CALLS]a[ARGS][1]"),
        ("mistral-args", "[TOOL_CALLS]a[ARX]{}"),
        ("lfm2", "<|tool_call_start|>[f( {a"),
        ("generic", '{"title": "a book", "pages": [1, 2]}'),
        ("generic", 'Call {"name": "a", "arguments": {}}'),
    ],
)
def test_text_that_is_no_call_is_shown_as_it_is(name: str, text: str) -> None:
    assert read(FORMATS[name], [text]) == [ContentDelta(text)]
    assert read(FORMATS[name], list(text)) == [ContentDelta(text)]


def test_a_call_that_does_not_end_keeps_its_arguments() -> None:
    for end in ('{"a": [1, "}', '{"a": 1', "{"):
        text = '<tool_call>{"name": "f", "arguments": ' + end
        assert read(FORMATS["hermes"], list(text)) == calls(pairs=[("f", end)])
    for end in ("", " ", "}", "} ", "}\n</tool_c", "}</tool_call>\n"):
        text = '<tool_call>{"name": "f", "arguments": {}' + end
        assert read(FORMATS["hermes"], list(text)) == calls(pairs=[("f", "{}")])


def test_text_inside_of_a_broken_call_is_not_lost() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>'
    expected = [*calls(pairs=[("f", "{}")]), ContentDelta(', "id": 1}</tool_call>')]
    assert read(FORMATS["hermes"], list(text)) == expected


TEXTS = (' <b>"é"</b>\n', "", "\n\n", "  if a:\n\treturn [1, 2]\n", "3", "a</", "),}")


@pytest.mark.parametrize("form", [row for row in ALL if row.parameters], ids=names)
def test_texts_among_arguments_one_by_one_stay_as_they_are(form: ChatFormat) -> None:
    for text in TEXTS:
        arguments = json.dumps({"a": text, "b": 1, "c": [text, {"d": None}], "e": -1.5})
        written = form.write_calls([("f", arguments), ("f", arguments)])
        for size in (1, 2, 3, 7, 1000):
            found = read(form, [written[i : i + size] for i in range(0, len(written), size)])
            assert [event for event in found if isinstance(event, ToolCallStart)] == [
                ToolCallStart(0, "f"),
                ToolCallStart(1, "f"),
            ]
            for event in found:
                if isinstance(event, ToolCallArguments):
                    assert json.loads(event.text) == json.loads(arguments)


@pytest.mark.parametrize("name", ["glm", "qwen-xml", "gemma"])
def test_null_is_no_text_where_the_schema_names_it(name: str) -> None:
    options = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    tools = [ToolSpec("f", parameters={"properties": {"a": options, "b": {"type": "string"}}})]
    form = FORMATS[name]
    for value in (None, "nullify", "nul", "", "null" if name == "gemma" else "x"):
        arguments = json.dumps({"a": value, "b": "null"})
        text = form.write_calls([("f", arguments)])
        for pieces in ([text], list(text)):
            parser = ChatParser(form, parses_tools=True, tools=tools)
            events = [event for piece in pieces for event in parser.feed(piece)]
            shown = joined(events + parser.finish())
            assert shown == calls(pairs=[("f", arguments)])


@pytest.mark.parametrize("name", ["glm", "qwen-xml"])
def test_a_bare_value_is_what_its_schema_names(name: str) -> None:
    schemas = [{"enum": [1, "auto"]}, {"type": ["string", "boolean"]}, {"type": "string"}]
    tools = [ToolSpec("f", parameters={"properties": dict(zip("abc", schemas, strict=True))})]
    values: list[list[Any]] = [[1, True, "1"], ["auto", "1", "true"], ["1x", False, "007"]]
    # Python reads no integer of thousands of digits.
    values += [["", "no", "null"], ["1" * 5000, True, "1"]]
    for row in values:
        arguments = json.dumps(dict(zip("abc", row, strict=True)))
        text = FORMATS[name].write_calls([("f", arguments)])
        for pieces in ([text], list(text)):
            parser = ChatParser(FORMATS[name], parses_tools=True, tools=tools)
            events = [event for piece in pieces for event in parser.feed(piece)]
            assert joined(events + parser.finish()) == calls(pairs=[("f", arguments)])


def test_messages_of_channels_are_told_apart() -> None:
    call = "commentary to=functions.f <|constrain|>json<|message|>"
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
        "<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant"
        f'<|channel|>{call}{{"x": "<|end|>"}}<|call|><|start|>assistant to=functions.g'
        "<|channel|>commentary json<|message|>{}<|call|>"
    )
    said = [ReasoningDelta("a"), ContentDelta("b"), ReasoningDelta("c")]
    expected = [*said, *calls(pairs=[("f", '{"x": "<|end|>"}'), ("g", "{}")])]
    for pieces in (list(text), [text]):
        assert read(FORMATS["harmony"], pieces) == expected
    final = "<|start|>assistant<|channel|>final<|message|>d < e"
    assert read(FORMATS["harmony"], list(final)) == [ContentDelta("d < e")]
    # The answer to a prompt that ends in an answer has no header.
    assert read(FORMATS["harmony"], list("and < so")) == [ContentDelta("and < so")]
    # Arguments that are no object end at the marker.
    odd = f"<|channel|>{call}5<|call|><|start|>assistant<|channel|>final<|message|>x"
    assert read(FORMATS["harmony"], list(odd)) == [*calls(pairs=[("f", "5")]), ContentDelta("x")]
    assert read(FORMATS["harmony"], [f"<|channel|>{call}{{"]) == calls(pairs=[("f", "{")])


def test_a_text_comes_while_it_is_written() -> None:
    parser = ChatParser(FORMATS["qwen-xml"], parses_tools=True, tools=TOOLS)
    pieces = ("<tool_call>\n<function=f>\n<parameter=a>\n", 'if "x":', "\n", "  y", "\n</para")
    shown = ["".join(getattr(event, "text", "") for event in parser.feed(it)) for it in pieces]
    assert shown == ['{"a": "', 'if \\"x\\":', "", "\\n  y", ""]
    assert parser.finish() == [ToolCallArguments(0, "\\n</para")]


def test_arguments_come_while_they_are_written() -> None:
    parser = ChatParser(FORMATS["hermes"], parses_tools=True)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.feed('{"a') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a')]
    assert parser.feed('": 1}') == [ToolCallArguments(0, '": 1}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


def test_text_comes_as_soon_as_it_can_be_no_marker() -> None:
    parser = ChatParser(FORMATS["hermes"], parses_tools=True)
    assert parser.feed("a <") == [ContentDelta("a")]
    assert parser.feed("tool") == []
    assert parser.feed("box>") == [ContentDelta(" <toolbox>")]
    assert parser.finish() == []


SCRAPS = [
    "{", "}", "[", "]", ",", ";", " ", "\n", '"', "\\", ":", "a", "é", "<", "<th", "<tool",
    '{"name": "f", ', '"arguments": {', '"parameters": {', '"x": "}"', "1}", "name",
    '{"name": "f", "arguments": {}}', '{"name": "g", "parameters": {"a": [1]}}',
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "f[ARGS]{",
    "<think>", "</think>", "<tool_call>f\n", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_call>\n<function=f>", "\n<parameter=a>\n", "\n</parameter>", "</function>", "-1.5e3",
    "<|tool_call_start|>[f(", "a=", ")", "g(b=", "]<|tool_call_end|>", '<|"|>',
    "<|tool_call>call:f{", "a:", "}<tool_call|>", "<escape>", "<|start|>assistant", "<|end|>",
    "<|channel|>analysis", "<|message|>", "<|channel|>commentary to=functions.f ", "<|call|>",
]  # fmt: skip


@given(
    form=st.sampled_from([*ALL, FORMATS["harmony"]]),
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=14),
    parses_tools=st.booleans(),
    in_reasoning=st.booleans(),
    cuts=st.lists(st.integers(0, 200)),
)
def test_cuts_change_nothing(
    form: ChatFormat, scraps: list[str], parses_tools: bool, in_reasoning: bool, cuts: list[int]
) -> None:
    text = "".join(scraps)
    in_reasoning = in_reasoning and form.reasoning is not None and not form.has_channels
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = read(form, [text], parses_tools, in_reasoning)
    assert read(form, pieces, parses_tools, in_reasoning) == whole
    assert read(form, list(text), parses_tools, in_reasoning) == whole
    if not form.has_channels and not any(
        isinstance(event, ToolCallStart | ReasoningDelta) for event in whole
    ):
        shown = "".join(event.text for event in whole if isinstance(event, ContentDelta))
        # Only a thought of nothing but spaces leaves its markers out.
        assert shown == text or (form.reasoning and shown.strip() in text)


@given(
    form=st.sampled_from(ALL),
    before=st.sampled_from(["", "I look.", "a < b"]),
    thought=st.sampled_from(["", "hm"]),
    count=st.integers(1, 3),
    size=st.integers(1, 9),
)
def test_whole_answers_are_read_whatever_the_tokens(
    form: ChatFormat, before: str, thought: str, count: int, size: int
) -> None:
    pairs = (CALLS * 2)[:count]
    text, expected = form.write_calls(pairs), calls(pairs=pairs)
    if before and form.begin:
        text = f"{before}\n{replace(form, may_be_bare=False).write_calls(pairs)}"
        expected = [ContentDelta(before), *expected]
    if thought and form.reasoning:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
        expected = [ReasoningDelta(thought), *expected]
    assert read(form, [text[i : i + size] for i in range(0, len(text), size)]) == expected
