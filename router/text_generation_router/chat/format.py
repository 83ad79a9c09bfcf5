"""How models write reasoning and tool calls: one table, used by the grammar and the parser."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

AUTO = "auto"
BARE_NAME = re.compile(r"[^\s\[\]{}()<>=\"]{1,256}")
"""A function's name where the format writes it without quotes."""
ARGUMENT_NAME = re.compile(r"[\w.$@/-]{1,256}")
"""The same of an argument."""
_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
"""A part of a marker that may be one token of the tokenizer."""
# Models that have learnt from Python write it so.
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}
# The JSON types of values that hold no others.
_KINDS: Mapping[type, Sequence[str]] = {
    type(None): ["null"],
    bool: ["boolean"],
    int: ["integer", "number"],
    float: ["number"],
    str: ["string"],
}
_REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
)
_RESPONSE_MARKERS = ("<response>", "</response>")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str | None = None
    # None: no arguments.
    parameters: Mapping[str, Any] | None = None
    # Whether a schema that can not be enforced in full is an error.
    strict: bool = False

    def may_be(self, argument: str, *kinds: str) -> bool:
        """Whether an argument's schema names one of the JSON types."""
        schema = (self.parameters or {}).get("properties", {}).get(argument)
        return any(may_be(schema, kind) for kind in kinds)

    def bare_json(self, argument: str, text: str) -> str:
        """The JSON of a null, boolean or number without quotes: a text unless the schema names its
        type."""
        plain = _OF_PYTHON.get(text, text)
        kinds = _KINDS[type(json.loads(plain))]
        return plain if self.may_be(argument, *kinds) else json.dumps(text)

    def as_openai(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates spell it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


def may_be(schema: Any, kind: str) -> bool:
    """Whether a schema names a JSON type among what it allows; one that is not valid does not."""
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return schema["type"] == kind or kind in listed(schema, "type")
    if any(kind in _KINDS.get(type(choice), ()) for choice in listed(schema, "enum")):
        return True
    options = [*listed(schema, "anyOf"), *listed(schema, "oneOf")]
    return any(may_be(option, kind) for option in options)


def listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """The list that is the keyword's value; empty: there is none."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class Parameters:
    """What stands around the names and values of arguments that are written one by one.

    A text stands between two `quote`. With an `after_value` instead, it is written as it is, and
    the schema says that it is one. Every other value is JSON.
    """

    after_name: str
    # Follows the last argument.
    close: str
    before_name: str = ""
    separator: str = ""
    after_value: str = ""
    quote: str = ""

    def write(self, arguments: str) -> str:
        """The text of arguments, which are the JSON text of an object, or any other text."""
        try:
            found = json.loads(arguments)
        except json.JSONDecodeError:
            found = None
        values = found if isinstance(found, dict) else {"arguments": arguments}
        pairs = (
            f"{self.before_name}{name}{self.after_name}{self._value(value)}{self.after_value}"
            for name, value in values.items()
        )
        return self.separator.join(pairs) + self.close

    def _value(self, value: Any) -> str:
        if isinstance(value, str) and (self.quote or self.after_value):
            return f"{self.quote}{value}{self.quote}"
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The markers of reasoning and tool calls in a model's text.

    A marker may consist of several tokens; the parser accepts any whitespace where it has some.

    A call is a JSON object with the keys `name` and `arguments_key`. With an `arguments_marker` it
    is the name, the marker and the JSON object of the arguments, or `parameters`, instead.
    """

    name: str
    # Precedes a call; empty: an answer whose first character is `{` is a call.
    begin: str = ""
    # Follows a call; empty: no end marker.
    end: str = ""
    # Whether every call has its own `begin` and `end`, or one pair encloses all calls.
    wraps_each: bool = False
    # Whether the calls are the items of a JSON list.
    is_list: bool = False
    # Whether an answer that starts with `{` is a call even if there is a `begin`.
    may_be_bare: bool = False
    # Written between two calls; the parser accepts other whitespace, and no separator if it is one
    # character.
    separator: str = "\n"
    # Written after `begin` and before `end`.
    padding: str = ""
    arguments_key: str = "arguments"
    arguments_marker: str = ""
    parameters: Parameters | None = None
    # Begin and end markers of the reasoning before the answer; None: the model does not reason.
    reasoning: tuple[str, str] | None = None
    # Markers around the answer behind the reasoning, which the model may leave out.
    response: tuple[str, str] | None = None
    # Whether an answer consists of messages, each with a header that names its channel; `separator`
    # begins all but the first.
    has_channels: bool = False
    # Whether the chat template describes the tools; if not, `tools_prompt` does.
    describes_tools: bool = False

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens of markers that may be special ones; the parser needs their text."""
        calls = [self.begin, self.end, self.arguments_marker, self.separator]
        if (one := self.parameters) is not None:
            calls += [one.before_name, one.after_name, one.after_value, one.close, one.quote]
        return self.special_tokens_of_text.union(_TOKEN.findall(" ".join(calls)))

    @property
    def special_tokens_of_text(self) -> frozenset[str]:
        """The same of an answer without calls."""
        markers = [*(self.reasoning or ()), *(self.response or ())]
        if self.has_channels:
            markers += [self.begin, self.arguments_marker, self.separator]
        return frozenset(_TOKEN.findall(" ".join(markers)))

    @property
    def is_bare(self) -> bool:
        """Whether an answer that starts with `{` is a call."""
        return self.may_be_bare or not self.begin

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends with the begin marker, so that the answer does not repeat it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0].rstrip())

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, each a name and the JSON text of its arguments."""
        written = [self._write_call(name, arguments) for name, arguments in calls]
        before = "" if self.may_be_bare else self.begin + self.padding
        behind = self.padding + self.end
        if self.wraps_each:
            return self.separator.join(before + call + behind for call in written)
        joined = self.separator.join(written)
        return before + (f"[{joined}]" if self.is_list else joined) + behind

    def _write_call(self, name: str, arguments: str) -> str:
        if self.parameters is not None:
            arguments = self.parameters.write(arguments)
        if self.arguments_marker:
            return name + self.arguments_marker + arguments
        quoted = json.dumps(name, ensure_ascii=False)
        return f'{{"name": {quoted}, "{self.arguments_key}": {arguments}}}'

    def tools_prompt(self, tools: Sequence[ToolSpec]) -> str:
        """The text that describes the tools if the template does not."""
        described = "\n".join(json.dumps(t.as_openai(), ensure_ascii=False) for t in tools)
        arguments = "{<its arguments>}" if self.parameters is None else '{"argument": "value"}'
        example = self.write_calls([("<function name>", arguments)])
        return (
            "You can call these functions, each given with the JSON schema of its parameters:\n"
            f"{described}\n\n"
            "To call one, answer with nothing but a call of this form, with a JSON object of "
            f"arguments:\n{example}\n"
            "If no function is of use, answer as usual."
        )


_FORMATS = (
    ChatFormat("hermes", begin="<tool_call>", end="</tool_call>", padding="\n", wraps_each=True),
    ChatFormat(
        "llama3",
        begin="<|python_tag|>",
        may_be_bare=True,
        separator="; ",
        arguments_key="parameters",
    ),
    ChatFormat("mistral", begin="[TOOL_CALLS]", is_list=True, separator=", "),
    ChatFormat(
        "mistral-args",
        begin="[TOOL_CALLS]",
        arguments_marker="[ARGS]",
        wraps_each=True,
        separator="",
    ),
    ChatFormat(
        "deepseek",
        begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        separator="<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        arguments_marker="<｜tool▁sep｜>",
    ),
    ChatFormat(
        "deepseek-json",
        begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        separator="\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        arguments_marker="\n```json\n",
    ),
    ChatFormat("granite", begin="<|tool_call|>", is_list=True, separator=", "),
    ChatFormat("nemotron", begin="<TOOLCALL>", end="</TOOLCALL>", is_list=True, separator=", "),
    ChatFormat(
        "glm",
        begin="<tool_call>",
        arguments_marker="\n",
        wraps_each=True,
        parameters=Parameters(
            before_name="<arg_key>",
            after_name="</arg_key>\n<arg_value>",
            after_value="</arg_value>\n",
            close="</tool_call>",
        ),
    ),
    ChatFormat(
        "qwen-xml",
        begin="<tool_call>\n<function=",
        end="\n</tool_call>",
        arguments_marker=">\n",
        wraps_each=True,
        parameters=Parameters(
            before_name="<parameter=",
            after_name=">\n",
            after_value="\n</parameter>\n",
            close="</function>",
        ),
    ),
    ChatFormat(
        "lfm2",
        begin="<|tool_call_start|>[",
        end="]<|tool_call_end|>",
        separator=", ",
        arguments_marker="(",
        parameters=Parameters(after_name="=", separator=", ", close=")"),
    ),
    ChatFormat(
        "gemma",
        begin="<|tool_call>call:",
        end="<tool_call|>",
        arguments_marker="{",
        wraps_each=True,
        separator="",
        parameters=Parameters(after_name=":", separator=",", close="}", quote='<|"|>'),
    ),
    ChatFormat(
        "functiongemma",
        begin="<start_function_call>call:",
        end="<end_function_call>",
        arguments_marker="{",
        wraps_each=True,
        separator="",
        parameters=Parameters(after_name=":", separator=",", close="}", quote="<escape>"),
    ),
    ChatFormat(
        "harmony",
        # Only the end of the answer follows a call.
        begin="<|channel|>commentary to=functions.",
        arguments_marker=" <|constrain|>json<|message|>",
        wraps_each=True,
        separator="<|start|>assistant",
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        has_channels=True,
    ),
    ChatFormat("generic"),
)
FORMATS: Mapping[str, ChatFormat] = {row.name: row for row in _FORMATS}
"""Every format by its name, a value of `--chat-format`; the template says how a model reasons."""

# What the templates of a format have; the first row that fits counts.
_SIGNS = (
    ("harmony", ("<|start|>", "<|channel|>", "<|message|>")),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek-json", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("nemotron", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gemma", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>call:",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen-xml", ("<tool_call>", "<function=", "<parameter=")),
)


def detect_format(template_source: str | None, name: str = AUTO) -> ChatFormat:
    """The named format, or the one that the chat template uses.

    The template also decides `reasoning` and `describes_tools`.
    """
    source = template_source or ""
    found = FORMATS[_name_of(source) if name == AUTO else name]
    markers = next((pair for pair in _REASONING_MARKERS if pair[1] in source), found.reasoning)
    response = _RESPONSE_MARKERS if markers and _RESPONSE_MARKERS[1] in source else None
    # A template that describes tools in an unknown form would contradict the generic format.
    describes_tools = "tools" in source and found.name != "generic"
    return replace(found, reasoning=markers, response=response, describes_tools=describes_tools)


def _name_of(source: str) -> str:
    for name, signs in _SIGNS:
        if all(sign in source for sign in signs):
            return name
    # Some models write XML between these markers.
    if "<tool_call>" in source and "<function=" not in source:
        return "hermes"
    if "tools" in source and ("<|python_tag|>" in source or "<|start_header_id|>" in source):
        return "llama3"
    return "generic"
