"""Conversations on a model that is scripted: prompts, constraints, steps."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.format import ToolSpec
from text_generation_router.chat.service import ToolCall
from text_generation_router.errors import TemplateError, ToolError
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters

from router.tests.serving import EOS_ID, Server, script_of, serve

# No tools, no system message: as Gemma's.
TEMPLATE = """
{%- for message in messages %}
{%- if message.role == "system" %}{{ raise_exception("no system") }}{% endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<model>{% endif %}"""
ASKED = Conversation(
    messages=({"role": "user", "content": "Hi"},),
    parameters=GenerateParameters(inputs="", max_new_tokens=100),
    tools=(ToolSpec("f", "Does f.", {"type": "object"}),),
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    async with serve(tmp_path) as server:
        yield server


async def test_tools_are_told_where_the_template_does_not(server: Server) -> None:
    prompt = await server.services.chat.render(ASKED)
    assert prompt.startswith("<user>You can call these functions")
    assert '"name": "f", "description": "Does f."' in prompt
    assert prompt.endswith("\n\nHi<model>")
    assert (
        await server.services.chat.render(replace(ASKED, tool_choice="none")) == "<user>Hi<model>"
    )
    with pytest.raises(TemplateError, match="no system"):
        messages = ({"role": "system", "content": "a"},)
        await server.services.chat.render(replace(ASKED, messages=messages))


async def test_a_strict_form_is_tried_where_it_may_be(server: Server) -> None:
    messages = ({"role": "system", "content": "a"}, ASKED.messages[0])
    asked = replace(ASKED, messages=messages, tools=(), may_be_rewritten=True)
    assert await server.services.chat.render(asked) == "<user>a\nHi<model>"


async def test_a_template_that_does_not_end_is_run_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def render(make_job: object) -> str:
        calls.append(make_job)
        raise TemplateError("the template did not end")

    monkeypatch.setattr(server.services.templates, "render", render)
    with pytest.raises(TemplateError, match="did not end"):
        await server.services.chat.render(replace(ASKED, may_be_rewritten=True))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("opened", "grammar", "text", "thought", "answer"),
    [
        ("", Grammar("json_schema", "{}"), '<think>hm</think>\n{"a": 1}', "hm", '{"a": 1}'),
        ("<think>\n", Grammar("json_schema", "{}"), 'hm</think>\n{"a": 1}', "hm", '{"a": 1}'),
        ("<think></think>", Grammar("json_schema", "{}"), '{"a": 1}', None, '{"a": 1}'),
        ("", Grammar("regex", "<think>a"), "<think>a", None, "<think>a"),
    ],
)
async def test_a_model_may_reason_before_a_format(
    tmp_path: Path, opened: str, grammar: Grammar, text: str, thought: str | None, answer: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(f"Hi {opened}{{# </think> #}}")
    parameters = replace(ASKED.parameters, grammar=grammar)
    async with serve(tmp_path, text) as server:
        server.shards.script = [*script_of(text), EOS_ID]
        asked = replace(ASKED, tools=(), parameters=parameters)
        async with server.services.chat.start(asked) as [generation]:
            message = await generation.collect()
        assert (message.reasoning, message.content) == (thought, answer)
        [compiled] = server.shards.grammars
    assert ("thought" in compiled) == (thought is not None)


async def test_steps_have_all_tokens_once(server: Server) -> None:
    text = '{"name": "f", "arguments": {"x": 1}}'
    server.shards.script = [*script_of(text), EOS_ID]
    async with server.services.chat.start(ASKED) as [generation]:
        assert generation.entry.prompt_tokens == len(await server.services.chat.render(ASKED))
        message = await generation.collect()
    assert message.tool_calls == (ToolCall("f", '{"x": 1}'),)
    assert (message.content, message.reasoning) == (None, None)
    assert generation.has_tool_calls
    assert generation.entry.ending is not None
    assert "".join(output.delta for output in message.outputs) == text
    assert len(message.outputs) == len(text) + 1
    assert all(step.events for step in message.steps[:-1])


TEMPLATES = Path(__file__).parents[1] / "chat_templates"


async def test_arguments_one_by_one_become_json_by_the_schemas_of_the_tools(tmp_path: Path) -> None:
    text = (
        "I look.</think><tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n"
        "<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    (tmp_path / "chat_template.jinja").write_text((TEMPLATES / "qwen3.5.jinja").read_text())
    tool = ToolSpec("f", None, {"properties": {"a": {"type": "string"}, "b": {"type": "number"}}})
    async with serve(tmp_path, text) as server:
        server.shards.script = [*script_of(text), EOS_ID]
        parameters = replace(ASKED.parameters, max_new_tokens=200)
        asked = replace(ASKED, tools=(tool,), tool_choice="required", parameters=parameters)
        async with server.services.chat.start(asked) as [generation]:
            message = await generation.collect()
    assert message.tool_calls == (ToolCall("f", '{"a": "3", "b": 3}'),)
    assert (message.reasoning, message.content) == ("I look.", None)


async def test_an_answer_that_continues_a_message_has_no_header(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text((TEMPLATES / "gpt-oss.jinja").read_text())
    async with serve(tmp_path, " noon.") as server:
        server.shards.script = [*script_of(" noon."), EOS_ID]
        begun = {"role": "assistant", "content": "It is"}
        asked = replace(ASKED, messages=(*ASKED.messages, begun))
        async with server.services.chat.start(asked) as [generation]:
            message = await generation.collect()
        assert (message.content, server.shards.grammars) == (" noon.", [])
        tool = ToolSpec("f", None, {"properties": {}})
        with pytest.raises(ToolError, match="continues a message cannot call a tool"):
            async with server.services.chat.start(
                replace(asked, tools=(tool,), tool_choice="required")
            ):
                pass
