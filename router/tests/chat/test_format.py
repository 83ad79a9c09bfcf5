"""The table of formats, and which row a template asks for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from text_generation_router.chat.format import FORMATS, ToolSpec, detect_format
from text_generation_router.chat.parser import ChatParser, ToolCallArguments, ToolCallStart

DIRECTORY = Path(__file__).parents[1] / "chat_templates"
THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("template", "name", "reasoning", "describes_tools"),
    [
        ("chatml", "generic", None, False),
        ("deepseek-r1", "generic", THINK, False),
        ("deepseek-v3", "deepseek-json", None, False),
        ("deepseek-v3.1", "deepseek", THINK, False),
        ("functiongemma", "functiongemma", None, True),
        ("gemma4", "gemma", ("<|channel>thought\n", "<channel|>"), True),
        ("gpt-oss", "harmony", ("<|channel|>analysis<|message|>", "<|end|>"), True),
        ("glm4.6", "glm", THINK, True),
        ("lfm2.5", "lfm2", THINK, True),
        ("qwen3.5", "qwen-xml", THINK, True),
        ("ernie4.5-thinking", "hermes", THINK, True),
        ("granite3.3", "granite", THINK, True),
        ("nemotron-nano2", "nemotron", THINK, True),
        ("gemma2", "generic", None, False),
        ("gemma3", "generic", None, False),
        ("llama3.1", "llama3", None, True),
        ("mistral-args", "mistral-args", ("[THINK]", "[/THINK]"), True),
        ("mistral-v0.3", "mistral", None, True),
        ("phi3", "generic", None, False),
        ("phi4-mini", "generic", None, False),
        ("qwen2.5", "hermes", None, True),
        ("qwen3", "hermes", THINK, True),
        ("smollm2", "generic", None, False),
        ("smollm3", "hermes", THINK, True),
    ],
)
def test_formats_are_found_from_templates(
    template: str, name: str, reasoning: tuple[str, str] | None, describes_tools: bool
) -> None:
    source = (DIRECTORY / f"{template}.jinja").read_text()
    found = detect_format(source)
    assert (found.name, found.reasoning, found.describes_tools) == (
        name,
        reasoning,
        describes_tools,
    )
    named = replace(FORMATS[name], reasoning=reasoning)
    assert replace(found, response=None, describes_tools=False) == named
    forced = detect_format(source, "mistral")
    from_template = None if name == "harmony" else reasoning
    assert (forced.name, forced.reasoning) == ("mistral", from_template)


def test_every_template_has_an_expectation() -> None:
    [mark] = test_formats_are_found_from_templates.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == {path.stem for path in DIRECTORY.glob("*.jinja")}


def test_without_a_template_the_format_is_generic() -> None:
    assert detect_format(None) == FORMATS["generic"]
    assert detect_format(None, "hermes") == FORMATS["hermes"]
    assert detect_format("{{ tools }}<tool_call>\n<function=f>") == FORMATS["generic"]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_prompt_shows_tools_and_the_form_of_calls(form) -> None:
    tools = [ToolSpec("get_wéather", "Says it.", {"type": "object"}), ToolSpec("now")]
    prompt = form.tools_prompt(tools)
    for tool in tools:
        assert json.dumps(tool.as_openai(), ensure_ascii=False) in prompt
    # The example in the prompt is what the parser reads.
    arguments = "{<its arguments>}" if form.parameters is None else '{"argument": "value"}'
    example = form.write_calls([("<function name>", arguments)])
    assert example in prompt
    told = [ToolSpec("f", parameters={"properties": {"argument": {"type": "string"}}})]
    parser = ChatParser(form, parses_tools=True, tools=told)
    events = [*parser.feed(example.replace("<function name>", "f")), *parser.finish()]
    assert events[0] == ToolCallStart(0, "f")
    assert {type(event) for event in events[1:]} == {ToolCallArguments}
    assert "".join(event.text for event in events[1:]) == arguments


def test_tools_as_the_api_spells_them() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    described = {"name": "f", "description": "d", "parameters": schema}
    assert ToolSpec("f", "d", schema).as_openai() == {"type": "function", "function": described}
    bare = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert ToolSpec("f").as_openai() == {"type": "function", "function": bare}
