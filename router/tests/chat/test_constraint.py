"""The grammars, matched by llguidance on a real tokenizer, token by token."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest
import tokenizers
from text_generation_router.chat.constraint import answer_grammar
from text_generation_router.chat.format import FORMATS, ChatFormat, ToolSpec
from text_generation_router.errors import GrammarError, ToolError
from text_generation_router.request import Grammar

MODEL = Path(__file__).parents[3] / "launcher/text_generation_launcher/embedded_model"
THINK = ("<think>", "</think>")
ROWS = [row for row in FORMATS.values() if not row.has_channels]
ALL = [replace(row, reasoning=pair) for row in ROWS for pair in (None, THINK)]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SUM = {
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a", "b"],
    "$defs": {"number": {"type": "number", "minimum": 0}},
}
OTHER_TOKENS = {"<response>", "</response>", "<|channel>", "<channel|>"}
TOOLS = [ToolSpec("get_weather", "Says it.", CITY), ToolSpec("add", None, SUM), ToolSpec("now")]
WEATHER, ADD = ("get_weather", '{"city": "Zürich {"}'), ("add", '{"a": 1, "b": 2.5}')
NOW = ("now", "{}")


@cache
def tokenizer(is_special: bool) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    """The embedded model's, with every marker as a special token or as plain text."""
    made = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    if is_special:
        tokens = {marker for row in FORMATS.values() for marker in row.special_tokens}
        made.add_special_tokens(sorted(tokens | OTHER_TOKENS))
    return made, llguidance.LLTokenizer(made.to_str())


def special_ids(form: ChatFormat, is_special: bool) -> Mapping[str, int]:
    known = {m: tokenizer(is_special)[0].token_to_id(m) for m in form.special_tokens}
    return {marker: token_id for marker, token_id in known.items() if token_id is not None}


@cache
def compiled(form: ChatFormat, choice: str, **options: Any) -> "Matched":
    """The grammar of answers that may call `TOOLS`."""
    return Matched(form, choice, **options)


class Matched:
    """A grammar over one tokenizer."""

    def __init__(
        self,
        form: ChatFormat,
        choice: str,
        tools: list[ToolSpec] = TOOLS,
        *,
        parallel: bool = True,
        is_special: bool = False,
        in_reasoning: bool = False,
        wanted: Grammar | None = None,
    ) -> None:
        """`wanted`: the grammar of an answer that is no call."""
        self._tokenizer, tokens = tokenizer(is_special)
        ids = special_ids(form, is_special)
        grammar = answer_grammar(
            form,
            wanted,
            tools,
            choice,
            parallel=parallel,
            special_ids=ids,
            starts_in_reasoning=in_reasoning,
        )
        assert grammar is not None and grammar.kind == "lark"
        source = llguidance.LLMatcher.grammar_from_lark(grammar.source)
        self._matcher = llguidance.LLMatcher(tokens, source, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()
        assert self._matcher.get_grammar_warnings() == []

    def takes(self, text: str) -> bool:
        """Whether the answer may be this text: every token is allowed, and then the end."""
        self._matcher.reset()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        is_taken = self._matcher.validate_tokens(ids) == len(ids)
        return is_taken and self._matcher.consume_tokens(ids) and self._matcher.is_accepting()


def marked(form: ChatFormat) -> ChatFormat:
    """The format, writing its marker even where it may be left out."""
    return replace(form, may_be_bare=False)


def names(form: ChatFormat) -> str:
    return form.name + ("-think" if form.reasoning else "")


both_tokenizers = pytest.mark.parametrize("is_special", [False, True], ids=["text", "special"])
every_format = pytest.mark.parametrize("form", ALL, ids=names)


@both_tokenizers
@every_format
def test_auto_takes_text_and_calls(form: ChatFormat, is_special: bool) -> None:
    matched = compiled(form, "auto", is_special=is_special)
    for text in ("", "Hi <b> Zürich.\n\n[1] { }", " \n", "\nSo"):
        assert matched.takes(text), text
    for calls in ([WEATHER], [ADD], [NOW], [WEATHER, ADD, NOW]):
        for write in (form.write_calls, marked(form).write_calls):
            assert matched.takes(write(calls)), calls
    assert matched.takes("\n" + form.write_calls([WEATHER]))
    if form.begin:
        assert matched.takes("I look.\n" + marked(form).write_calls([WEATHER, ADD]))


@both_tokenizers
@every_format
def test_behind_the_marker_only_calls_of_the_tools_are_taken(
    form: ChatFormat, is_special: bool
) -> None:
    wrong = [
        ("nope", "{}"),
        ("add", '{"a": "x", "b": 2}'),
        ("add", '{"a": 1, "b": -2}'),
        ("add", '{"a": 1}'),
        ("add", '{"a": 1, "b": 2, "c": 3}'),
        ("get_weather", "{}"),
        ("get_weather", "[]"),
        ("now", '{"a": 1}'),
    ]
    for choice in ("auto", "required"):
        matched = compiled(form, choice, is_special=is_special)
        for call in wrong:
            assert not matched.takes(form.write_calls([call])), call
            assert not matched.takes(form.write_calls([NOW, call])), call
        whole = form.write_calls([WEATHER])
        for end in range(1, len(whole)):
            # Short of a marker it is text.
            is_call = form.begin in whole[:end] if not form.is_bare else True
            if is_call or choice == "required":
                assert not matched.takes(whole[:end]), whole[:end]
        assert not matched.takes(whole + "and so")


@both_tokenizers
@every_format
def test_required_takes_calls_only(form: ChatFormat, is_special: bool) -> None:
    matched = compiled(form, "required", is_special=is_special)
    for text in ("", "Hi", " ", "I look.\n" + form.write_calls([NOW])):
        assert not matched.takes(text), text
    for text in (form.write_calls([NOW]), "\n" + form.write_calls([WEATHER, ADD])):
        assert matched.takes(text), text
    assert matched.takes(marked(form).write_calls([WEATHER]))


@both_tokenizers
@every_format
def test_one_call_where_there_may_be_no_more(form: ChatFormat, is_special: bool) -> None:
    for choice in ("auto", "required"):
        matched = compiled(form, choice, parallel=False, is_special=is_special)
        assert matched.takes(form.write_calls([ADD]))
        assert not matched.takes(form.write_calls([ADD, NOW]))
    named = compiled(form, "add", is_special=is_special)
    assert named.takes(form.write_calls([ADD]))
    assert not named.takes(form.write_calls([ADD, ADD]))
    assert not named.takes(form.write_calls([NOW]))
    assert not named.takes("Hi")


@both_tokenizers
@pytest.mark.parametrize("form", [f for f in ALL if f.reasoning], ids=names)
def test_reasoning_may_stand_before_it(form: ChatFormat, is_special: bool) -> None:
    call = form.write_calls([WEATHER])
    # A thought may speak of calls; as text, but not as a token.
    for thought in ("\nhm { <", "", "" if is_special else f"\n{form.begin} no"):
        inside = f"{thought}</think>\n\n"
        for choice in ("auto", "required"):
            free = compiled(form, choice, is_special=is_special)
            inner = compiled(form, choice, is_special=is_special, in_reasoning=True)
            for matched, text in ((free, f"<think>{inside}"), (inner, inside)):
                assert matched.takes(text + call)
                assert matched.takes(text + "Hi") == (choice == "auto")
                assert not matched.takes(text + form.write_calls([("nope", "{}")]))
                assert not matched.takes(text + call + "and so")
            assert free.takes("\n<think>" + inside + call)
            assert free.takes(call)
            # A thought is no call.
            assert free.takes("<think>" + thought) == (choice == "auto")
            assert inner.takes(thought) == (choice == "auto")


@both_tokenizers
def test_a_response_has_markers_or_none(is_special: bool) -> None:
    response = ("<response>", "</response>")
    form = replace(FORMATS["hermes"], reasoning=THINK, response=response)
    matched = compiled(form, "auto", is_special=is_special)
    for text in ("Hi", "\n<response>\nHi {", "<response>Hi</response>\n"):
        assert matched.takes(f"<think>hm</think>{text}")
    assert not compiled(form, "required", is_special=is_special).takes("<response>Hi</response>")


@both_tokenizers
def test_channels_lead_to_an_answer_or_a_call(is_special: bool) -> None:
    form, schema = FORMATS["harmony"], Grammar("json_schema", json.dumps(PERSON))
    said, thought, final = (
        f"<|channel|>{name}<|message|>{text}" for name, text in
        (("commentary", "I look."), ("analysis", "hm {"), ("final", ""))
    )  # fmt: skip
    more = "<|end|><|start|>assistant"
    auto = compiled(form, "auto", is_special=is_special)
    required = compiled(form, "required", is_special=is_special)
    formatted = Matched(form, "auto", [], is_special=is_special, wanted=schema)
    for before in ("", thought + more, thought + more + said + more + thought + more):
        call = before + form.write_calls([WEATHER])
        assert auto.takes(call) and required.takes(call) and not formatted.takes(call)
        answer = f'{before}{final}{{"name": "Zoe"}}'
        assert auto.takes(answer) and formatted.takes(answer) and not required.takes(answer)
        assert not formatted.takes(f"{before}{final}Hi")
        assert auto.takes(before + thought) and not required.takes(before + thought)
        for text in (f"{before}Hi", before + form.write_calls([("nope", "{}")])):
            assert not auto.takes(text) and not required.takes(text)
    with_both = Matched(
        form, "auto", is_special=is_special, wanted=Grammar("json_schema", json.dumps(PERSON))
    )
    assert with_both.takes(form.write_calls([NOW])) and with_both.takes(answer)


def test_whitespace_is_bounded() -> None:
    matched = compiled(FORMATS["hermes"], "required")
    call = '<tool_call>{}{{"name":{}"now",{}"arguments":{}{{{}}}{}}}{}</tool_call>'
    assert matched.takes(call.format("\n", " ", "\n  ", " ", "\n", "\n", "\n"))
    for place in range(7):
        spaces = [""] * 7
        assert matched.takes(call.format(*spaces))
        spaces[place] = " " * 9
        assert not matched.takes(call.format(*spaces)), place


def test_names_of_all_kinds() -> None:
    for name in ('quote " back \\', "ünï", "a/b", "line\nbreak"):
        form, tools = FORMATS["generic"], [ToolSpec(name), ToolSpec(name + "x")]
        assert Matched(form, "required", tools).takes(form.write_calls([(name, "{}")]))
        assert Matched(form, name, tools).takes(form.write_calls([(name, "{}")]))
    with pytest.raises(ToolError, match="a b"):
        answer_grammar(FORMATS["mistral-args"], None, [ToolSpec("a b")], "auto")


one_by_one = pytest.mark.parametrize(
    "form", [f for f in FORMATS.values() if f.parameters], ids=names
)


@one_by_one
def test_arguments_one_by_one_follow_their_schemas(form: ChatFormat) -> None:
    schema: dict[str, Any] = {
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "note": {"type": ["string", "null"]},
            "at": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/place"}]},
        },
        "$defs": {"place": {"properties": {"x": {"type": "number"}}, "required": ["x"]}},
    }
    matched = Matched(form, "required", [ToolSpec("f", None, schema)])
    for right in ('{"unit": "F"}', '{"unit": "C", "at": 3}', '{"note": "a\\n(b)", "at": {"x": 1}}'):
        assert matched.takes(form.write_calls([("f", right)])), right
    for wrong in ('{"unit": "K"}', '{"at": 3, "unit": "C"}', '{"at": {"y": 1}}', '{"more": 1}'):
        assert not matched.takes(form.write_calls([("f", wrong)])), wrong
    is_open = Matched(form, "required", [ToolSpec("f", None, schema | {"allOf": []})])
    assert is_open.takes(form.write_calls([("f", '{"unit": "C", "more": [1], "x": 2}')]))


@one_by_one
def test_what_arguments_one_by_one_can_not_be_is_refused(form: ChatFormat) -> None:
    def grammar(schema: dict[str, Any], *, is_strict: bool = False) -> Grammar | None:
        tool = ToolSpec("f", None, {"properties": schema}, is_strict)
        return answer_grammar(form, None, [tool], "auto")

    with pytest.raises(ToolError, match="does not allow the argument name 'a b'; use letters"):
        grammar({"a b": {}})
    # What is no schema is llguidance's to refuse.
    for broken in ([], {"a": {"type": 5}}, {"a": {"anyOf": 5}}, {"a": {"enum": 5}}, {"a": 5}):
        assert grammar(broken) is not None  # type: ignore[arg-type]
    limited = {"a": {"type": "string", "pattern": "x+"}}
    assert grammar(limited) is not None
    if form.parameters and (form.parameters.quote or form.parameters.after_value):
        with pytest.raises(ToolError, match="texts as they are, which 'pattern' can not limit"):
            grammar(limited, is_strict=True)


def test_arguments_are_always_an_object() -> None:
    form = FORMATS["hermes"]
    for schema in ({}, {"type": ["object", "null"]}, {"anyOf": [CITY, {"type": "string"}]}):
        matched = Matched(form, "required", [ToolSpec("f", None, schema)])
        assert matched.takes(form.write_calls([("f", "{}" if not schema else '{"city": "a"}')]))
        for wrong in ("null", '"a"', "[]", "1"):
            assert not matched.takes(form.write_calls([("f", wrong)])), schema
    call = form.write_calls([("f", '{"city": "a", "more": 1}')])
    for more in ({"additionalProperties": True}, {"allOf": [{"properties": {"more": {}}}]}, {}):
        matched = Matched(form, "required", [ToolSpec("f", None, CITY | more)])
        assert matched.takes(call) == bool(more), more
    with pytest.raises(ToolError, match="tool f must be a JSON schema of an object, not of 'arr"):
        answer_grammar(form, None, [ToolSpec("f", None, {"type": "array"})], "auto")


def test_only_strict_schemas_are_refused_for_what_can_not_be_enforced() -> None:
    schema = CITY | {"not": {"required": ["x"]}}
    for is_strict, complaint in ((False, "Unimplemented keys"), (True, "not")):
        with pytest.raises(AssertionError, match=complaint):
            Matched(FORMATS["hermes"], "auto", [ToolSpec("f", None, schema, is_strict)])


def test_without_tools_any_answer_is_valid() -> None:
    assert answer_grammar(FORMATS["hermes"], None, [], "auto") is None
    with pytest.raises(ToolError, match="Tool with name nope not found"):
        answer_grammar(FORMATS["hermes"], None, TOOLS, "nope")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "friend": {"$ref": "#/$defs/person"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"age": {"type": "integer"}}}},
}


@both_tokenizers
@every_format
def test_auto_takes_json_of_a_schema_and_calls(form: ChatFormat, is_special: bool) -> None:
    matched = Matched(
        form, "auto", is_special=is_special, wanted=Grammar("json_schema", json.dumps(PERSON))
    )
    for text in ('{"name": "Zoe"}', '{"name": "a", "friend": {"age": 3}}'):
        assert matched.takes(text), text
    for text in ("", "Hi", '{"age": 1}', '{"name": 1}', '{"name": "a", "friend": {"age": "x"}}'):
        assert not matched.takes(text), text
    for calls in ([WEATHER], [ADD], [NOW]):
        assert matched.takes(form.write_calls(calls)), calls
        assert matched.takes(marked(form).write_calls(calls)), calls
    if form.begin:
        assert matched.takes(marked(form).write_calls([WEATHER, ADD]))
    if form.reasoning:
        assert matched.takes('<think>hm</think>{"name": "Zoe"}')
        assert not matched.takes("<think>hm")
    # One of two things is asked for: a call.
    assert not Matched(
        form, "required", is_special=is_special, wanted=Grammar("json_schema", json.dumps(PERSON))
    ).takes('{"name": "Zoe"}')


@both_tokenizers
@pytest.mark.parametrize("form", [f for f in ALL if f.reasoning], ids=names)
def test_reasoning_may_stand_before_a_format(form: ChatFormat, is_special: bool) -> None:
    lark = '# A comment {\nstart: item ("," item)* TEXT\nitem: /[0-9]{2}/\nTEXT: "}" | ";"'
    for wanted, right, wrong in (
        (Grammar("json_schema", json.dumps(PERSON)), '{"name":"Zoe"}', '{"age":1}'),
        (Grammar("regex", "[a-f/]+\\n?"), "a/f\n", "a/g"),
        (Grammar("lark", lark), "12,34}", "12,3}"),
        (Grammar("gbnf", 'root ::= "x" root | "y"'), "xxy", "xx"),
    ):
        free = Matched(form, "auto", [], is_special=is_special, wanted=wanted)
        inner = Matched(form, "auto", [], is_special=is_special, wanted=wanted, in_reasoning=True)
        assert free.takes(right)
        assert not free.takes(wrong)
        for matched, thought in ((free, "<think>\nhm {"), (free, "<think>"), (inner, "hm {")):
            for space in ("", "\n\n"):
                assert matched.takes(f"{thought}</think>{space}{right}")
            assert not matched.takes(f"{thought}</think>{wrong}")
            assert not matched.takes(thought)
        assert not inner.takes(right)


def test_descriptions_of_a_tool_are_not_in_its_grammar() -> None:
    told = {"description": "d" * 70_000, "title": "T", "$id": "my tool"}
    properties = {"title": {"type": "string", **told}}
    tool = ToolSpec("f", parameters={"type": "object", "properties": properties, **told})
    grammar = answer_grammar(FORMATS["hermes"], None, [tool], "auto")
    assert grammar is not None and len(grammar.source) < 2000
    assert '"properties": {"title": {"type": "string"}}' in grammar.source


@pytest.mark.parametrize("choice", ["auto", "required", "f"])
def test_a_wanted_form_is_checked_also_where_a_tool_is_forced(choice: str) -> None:
    wanted = Grammar("json_schema", "not json")
    with pytest.raises(GrammarError):
        answer_grammar(FORMATS["hermes"], wanted, [ToolSpec("f")], choice)
