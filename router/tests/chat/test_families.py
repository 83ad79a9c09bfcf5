"""Families of models: their template, and an answer as such a model writes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.chat.conversation import Message, fitted, plain_messages
from text_generation_router.chat.format import ChatFormat, ToolSpec, detect_format
from text_generation_router.chat.parser import ChatParser
from text_generation_router.chat.rendering import Renderer
from text_generation_router.chat.service import ChatMessage, ChatStep, ToolCall, message_of

from router.tests.chat.test_constraint import Matched

USER = {"role": "user", "content": "Is it hot in Zürich?"}
DIRECTORY = Path(__file__).parents[1] / "chat_templates"
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "hot": {"type": "boolean"},
    "more": {"type": "object"},
}
TOOLS = (
    ToolSpec("get_weather", "Says it.", {"type": "object", "properties": PROPERTIES}),
    ToolSpec("now"),
)
ARGUMENTS: dict[str, Any] = {"city": "Zürich", "days": 3, "hot": True, "more": {"a": ["b", None]}}
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Family:
    """What a model writes; `ARGS` in a call are the arguments in JSON."""

    template: str
    call: str
    """A call of `get_weather` with `ARGUMENTS`."""
    now: str
    """Behind it, a call of `now`."""
    end: str = ""
    """Behind the last call."""
    thought: str = ""
    """Before the answer; the model thinks "I look."."""
    said: tuple[str, str] = ("", "")
    """Around an answer of text."""
    history: str = ""
    """The call as the template spells it, if it differs."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the template that let the model reason."""

    @property
    def form(self) -> ChatFormat:
        return detect_format(self.source)

    @property
    def source(self) -> str:
        return (DIRECTORY / f"{self.template}.jinja").read_text()

    def calls(self, *, both: bool) -> str:
        """One call, or two."""
        text = self.call + (self.now if both else "") + self.end
        return text.replace("ARGS", JSON_ARGUMENTS)

    def prompt(self, messages: list[Message], tools: Sequence[ToolSpec] = TOOLS) -> str:
        """As the service renders it."""
        plain = plain_messages(messages, self.source, self.form)
        described = [tool.as_openai() for tool in tools] if self.form.describes_tools else None
        renderer = Renderer({"default": self.source}, {"bos_token": "<s>"}, 2**30)
        return renderer.render(fitted(plain, self.source), described, **self.kwargs)

    def read(self, text: str, size: int, tools: Sequence[ToolSpec] = TOOLS) -> ChatMessage:
        """The message that comes of an answer in pieces."""
        begun = self.form.starts_in_reasoning(self.prompt([USER], tools))
        parser = ChatParser(
            self.form, parses_tools=bool(tools), starts_in_reasoning=begun, tools=tools
        )
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.feed(piece)]
        return message_of([ChatStep((*events, *parser.finish()), ())])


FAMILIES = (
    Family(
        "deepseek-v3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        thought="I look.</think>",
        kwargs={"thinking": True},
    ),
    Family(
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        "```json\nARGS\n```<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    Family(
        "granite3.3",
        '<|tool_call|>[{"name": "get_weather", "arguments": ARGS}',
        ', {"name": "now", "arguments": {}}',
        "]",
        thought="<think>I look.</think>\n",
        said=("<response>", "</response>"),
        kwargs={"thinking": True},
    ),
    Family(
        "nemotron-nano2",
        '<TOOLCALL>[{"name": "get_weather", "arguments": ARGS}',
        ', {"name": "now", "arguments": {}}',
        "]</TOOLCALL>",
        thought="I look.\n</think>\n\n",
    ),
    Family(
        "ernie4.5-thinking",
        '<tool_call>\n{"name": "get_weather", "arguments": ARGS}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        thought="I look.\n</think>\n\n",
        said=("<response>\n", "\n</response>\n"),
    ),
    Family(
        "glm4.6",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>hot</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>more</arg_key>\n<arg_value>{"a": ["b", null]}</arg_value>\n</tool_call>',
        "\n<tool_call>now\n</tool_call>",
        thought="\n<think>I look.</think>\n",
    ),
    Family(
        "qwen3.5",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=hot>\ntrue\n</parameter>\n"
        '<parameter=more>\n{"a": ["b", null]}\n</parameter>\n</function>\n</tool_call>',
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        thought="I look.\n</think>\n\n",
        history="<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n",
    ),
    Family(
        "lfm2.5",
        '<|tool_call_start|>[get_weather(city="Zürich", days=3, hot=true, more={"a": ["b", null]})',
        ", now()",
        "]<|tool_call_end|>",
        thought="<think>I look.</think>",
        history="<|tool_call_start|>[get_weather(city='Zürich', days=3, hot=True, more={\"a\"",
    ),
    Family(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3,hot:true,'
        'more:{"a":["b",null]}}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
        thought="<|channel>thought\nI look.\n<channel|>",
        history='<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3,hot:true,more:{a:[',
        kwargs={"enable_thinking": True},
    ),
    Family(
        "gpt-oss",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>ARGS",
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        thought="<|channel|>analysis<|message|>I look.<|end|><|start|>assistant",
        said=("<|channel|>final<|message|>", ""),
        history="<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>",
    ),
    Family(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3,hot:true,"
        'more:{"a":["b",null]}}<end_function_call>',
        "<start_function_call>call:now{}<end_function_call>",
        history="<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3,",
    ),
)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)


@every_family
@pytest.mark.parametrize("both", [False, True])
def test_history_has_calls_as_the_model_writes_them(family: Family, both: bool) -> None:
    called = [
        {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("get_weather", ARGUMENTS), ("now", {}))
    ]
    messages: list[Message] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": called[: both + 1]},
        {"role": "tool", "content": "It rains.", "name": "get_weather", "tool_call_id": "a"},
    ]
    prompt = family.prompt(messages)
    assert (family.history or family.call.replace("ARGS", JSON_ARGUMENTS)) in prompt
    # gpt-oss's template has one call of each message.
    assert (family.now.strip() in prompt) == (both and family.template != "gpt-oss")
    assert "It rains." in prompt
    assert "Says it." in prompt or not family.form.describes_tools


@every_family
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
def test_an_answer_has_reasoning_text_and_calls(family: Family, size: int) -> None:
    thought = "I look." if family.thought else None
    weather, now = ToolCall("get_weather", JSON_ARGUMENTS), ToolCall("now", "{}")
    for both, calls in ((False, (weather,)), (True, (weather, now))):
        message = family.read(family.thought + family.calls(both=both), size)
        assert [call.name for call in message.tool_calls] == [call.name for call in calls]
        for call, expected in zip(message.tool_calls, calls, strict=True):
            assert json.loads(call.arguments) == json.loads(expected.arguments)
        assert (message.content, message.reasoning) == (None, thought)
    said = "It is 3 < 4,\n\nso <b>warm</b>."
    for tools in (TOOLS, ()):
        text = family.thought + said.join(family.said)
        message = family.read(text, size, tools)
        assert (message.content, message.reasoning, message.tool_calls) == (said, thought, ())


@every_family
@pytest.mark.parametrize("is_special", [False, True])
def test_a_grammar_takes_what_the_model_writes(family: Family, is_special: bool) -> None:
    begun = family.form.starts_in_reasoning(family.prompt([USER]))
    for choice in ("auto", "required", "get_weather"):
        matched = Matched(family.form, choice, [*TOOLS], is_special=is_special, in_reasoning=begun)
        for both in (False, True):
            is_allowed = not both or choice != "get_weather"
            assert matched.takes(family.thought + family.calls(both=both)) == is_allowed
        assert matched.takes(family.thought + "Hi".join(family.said)) == (choice == "auto")
        wrong = family.thought + family.calls(both=False).replace("get_weather", "nope")
        assert not matched.takes(wrong)
