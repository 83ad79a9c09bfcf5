"""The grammar of an answer that may reason and call tools, made from the format's markers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from text_generation_router.chat.format import (
    ARGUMENT_NAME,
    BARE_NAME,
    ChatFormat,
    Parameters,
    ToolSpec,
    listed,
    may_be,
)
from text_generation_router.errors import ToolError
from text_generation_router.grammar import as_item, plain_schema
from text_generation_router.request import Grammar

# Whitespace where JSON allows it. It is bounded, so that it can not go on forever.
_SPACE = r"[ \t\r\n]"
_JSON_SPACE = r"[ \n]{1,2}"
# Keywords besides `properties` that also define arguments.
_OPEN = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
}


def tool_grammar(
    chat_format: ChatFormat,
    tools: Sequence[ToolSpec],
    choice: str,
    *,
    parallel: bool,
    special_ids: Mapping[str, int] = MappingProxyType({}),
    starts_in_reasoning: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> Grammar | None:
    """The grammar that the answer must follow; None: any answer is valid.

    `choice` is `auto` (text, calls, or text and then calls), `none`, `required` (one call, or
    several if `parallel`) or a tool's name (exactly one call of it). Reasoning may come first; only
    where any text is an answer it may end there. `special_ids` maps the format's markers that are
    special tokens of the tokenizer to their ids: they are matched as tokens, not as text. `answer`
    is the schema, in llguidance's form, of an answer that is not a call; None: any text. Raises
    ToolError.
    """
    if choice == "none" or not tools:
        return None
    if choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == choice]
        parallel = False
        if not tools:
            raise ToolError(f"Tool with name {choice} not found")
    grammar = _ChatGrammar(chat_format, special_ids, parallel, answer)
    return Grammar("lark", grammar.write(tools, choice == "auto", starts_in_reasoning))


def thinking_grammar(
    chat_format: ChatFormat,
    grammar: Grammar,
    special_ids: Mapping[str, int] = MappingProxyType({}),
    *,
    starts_in_reasoning: bool = False,
) -> Grammar:
    """The grammar of an answer before which the model may reason. Raises GrammarError."""
    chat = _ChatGrammar(chat_format, special_ids)
    return Grammar("lark", chat.write_after_thought(as_item(grammar), starts_in_reasoning))


@dataclass(frozen=True, slots=True)
class _ChatGrammar:
    """Writes llguidance's Lark. A name in capitals is a terminal and matches the longest text:
    where free text is also allowed, whitespace belongs to the terminal after it."""

    chat_format: ChatFormat
    special_ids: Mapping[str, int]
    parallel: bool = False
    answer: Mapping[str, Any] | None = None

    def write(self, tools: Sequence[ToolSpec], is_auto: bool, starts_in_reasoning: bool) -> str:
        """The whole grammar."""
        rules = [
            f"BEGIN: /{_SPACE}{{0,4}}/ {json.dumps(self.chat_format.begin)}",
            *self._calls(tools),
        ]
        answer = self._forced_answer
        if is_auto and self.answer is not None:
            answer = partial(self._formatted_answer, self._marked_calls())
            rules.append(f"formatted: %json {json.dumps(self._formatted(self.answer, tools))}")
        elif is_auto:
            answer = self._auto_answer
        # Where any text is an answer, it may end inside a thought.
        is_free = is_auto and self.answer is None
        return "\n".join([*self._start(answer, starts_in_reasoning, is_free), *rules])

    def write_after_thought(self, answer: str, starts_in_reasoning: bool) -> str:
        """The whole grammar of an answer without calls."""
        rules = self._start(partial(self._formatted_answer, []), starts_in_reasoning, False)
        return "\n".join([*rules, f"formatted: {answer}", ""])

    def _start(
        self,
        answer: Callable[[str, str], list[str]],
        starts_in_reasoning: bool,
        is_free: bool,
    ) -> list[str]:
        """The first rules: reasoning, and then an answer."""
        rules = ["TEXT: /(?s:.*)/", f"WS: /{_SPACE}{{1,4}}/"]
        if self.chat_format.reasoning is None:
            return [*answer("start", ""), *rules]
        begin, end = self.chat_format.reasoning
        if self.chat_format.has_channels:
            end += self.chat_format.separator
        rules += [*self._until("thought", "TEXT", end), *answer("answer", "")]
        if self.chat_format.has_channels:
            # Commentary to the user may precede a call.
            more = self._marker("<|channel|>commentary<|message|>")
            free = "(think thought)* think TEXT | " if is_free else ""
            think = f"think: {self._marker(begin)} | {more}"
            return [f"start: {free}(think thought)* answer", think, *rules]
        if starts_in_reasoning:
            return [f"start: {'TEXT | ' if is_free else ''}thought answer", *rules]
        if self._is_token(begin):
            rules += [f"think: WS? {self._marker(begin)}", *answer("at_once", "")]
        else:
            literal = json.dumps(begin)
            rules += [
                "think: THINK",
                f"THINK: /{_SPACE}*/ {literal}",
                *answer("at_once", f" & ~(/{_SPACE}*/ {literal} TEXT)"),
            ]
        free = "think TEXT | " if is_free else ""
        return [f"start: at_once | {free}think thought answer", *rules]

    def _auto_answer(self, name: str, but: str) -> list[str]:
        """Text or calls; `but` excludes some texts."""
        if self.chat_format.has_channels:
            return [f"{name}: {self._final} TEXT | {' | '.join(self._marked_calls())}"]
        plain = f"{name.upper()}_TEXT"
        text = f"/{_SPACE}*([^ \\t\\r\\n{{](?s:.*))?/" if self.chat_format.is_bare else "TEXT"
        options, rules = [plain], [f"{plain}: {text}{but}"]
        begin, end = self.chat_format.response or ("", "")
        if begin in self.special_ids:
            options.append(f"{plain} {self._marker(begin)} TEXT ({self._marker(end)} TEXT)?")
        if self.chat_format.begin:
            options.append(f"{name}_begin calls")
            rules += self._until(f"{name}_begin", plain, self.chat_format.begin)
        if self.chat_format.is_bare:
            options.append("calls")
        return [f"{name}: {' | '.join(options)}", *rules]

    def _formatted_answer(self, calls: Sequence[str], name: str, but: str) -> list[str]:
        """What `formatted` allows, or calls. Models write line ends behind a thought."""
        formatted = "WS? formatted" if name == "answer" else "formatted"
        if self.chat_format.has_channels:
            formatted = f"{self._final} formatted"
        return [f"{name}: {' | '.join([formatted, *calls])}"]

    def _formatted(self, answer: Mapping[str, Any], tools: Sequence[ToolSpec]) -> Mapping[str, Any]:
        """The schema of an answer that is not a call. If calls are JSON without a marker it
        includes them, because the first characters of both are the same."""
        if not self.chat_format.is_bare:
            return answer
        key = self.chat_format.arguments_key
        options = [_moved({k: v for k, v in answer.items() if k != "x-guidance"}, "#/anyOf/0")]
        for place, tool in enumerate(tools, start=1):
            arguments = {k: v for k, v in _arguments_schema(tool).items() if k != "x-guidance"}
            where = f"#/anyOf/{place}/properties/{key}"
            properties = {"name": {"const": tool.name}, key: _moved(arguments, where)}
            options.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": ["name", key],
                    "additionalProperties": False,
                }
            )
        # Models write a space after `:` and `,`. Lenient, because a tool's schema may be.
        options_of_both = {"whitespace_pattern": _JSON_SPACE, "lenient": True}
        return {"anyOf": options, "x-guidance": options_of_both}

    @property
    def _final(self) -> str:
        """What precedes the answer among the channels."""
        return self._marker("<|channel|>final<|message|>")

    def _forced_answer(self, name: str, but: str) -> list[str]:
        """Calls, with nothing before them."""
        options = ["calls"] if self.chat_format.is_bare else []
        return [f"{name}: {' | '.join([*options, *self._marked_calls()])}"]

    def _marked_calls(self) -> list[str]:
        """Calls with their begin marker; empty if the format has none."""
        begin = self.chat_format.begin
        if self._is_token(begin):
            return [f"WS? {self._marker(begin)} calls"]
        return ["BEGIN calls"] if begin else []

    def _calls(self, tools: Sequence[ToolSpec]) -> list[str]:
        """The rules of calls, after the first begin marker."""
        form = self.chat_format
        end = f"WS? {self._marker(form.end)}" if form.end else ""
        if form.is_list:
            more = "(COMMA call)*" if self.parallel else ""
            calls = f"OPEN_LIST call {more} CLOSE_LIST {end}"
        elif form.wraps_each:
            begin = self._marker(form.separator.strip() + form.begin)
            more = f"(WS? {begin} call {end})*" if self.parallel else ""
            calls = f"call {end} {more}"
        else:
            is_marker = len(form.separator.strip()) > 1
            between = self._marker(form.separator) if is_marker else "SEPARATOR"
            more = f"({between} call)*" if self.parallel else ""
            calls = f"call {more} {end}"
        rules = [
            f"calls: {calls}",
            f"OPEN_LIST: /{_SPACE}{{0,2}}\\[/",
            f"CLOSE_LIST: /{_SPACE}{{0,2}}\\]/",
            f"COMMA: /{_SPACE}{{0,2}},/",
            f"SEPARATOR: /{_SPACE}{{0,2}}/ {json.dumps(form.separator)}",
            f'HEAD: /{_SPACE}{{0,4}}\\{{{_SPACE}{{0,4}}"name" ?: ?/',
            f'ARGUMENTS: /{_SPACE}{{0,2}},{_SPACE}{{0,4}}"{form.arguments_key}" ?: ?/',
            f"TAIL: /{_SPACE}{{0,4}}\\}}/",
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
        ]
        for i, tool in enumerate(tools):
            rules += self._call(i, tool)
        return rules

    def _call(self, number: int, tool: ToolSpec) -> list[str]:
        form, schema = self.chat_format, json.dumps(_arguments_schema(tool))
        if form.arguments_marker:
            _check_name(BARE_NAME, "tool", tool.name)
            name = f"NAME_{number}: /{_SPACE}?/ {json.dumps(tool.name)}"
            head = f"call_{number}: NAME_{number} {self._marker(form.arguments_marker)}"
            if form.parameters is not None:
                return [name, *self._parameters(form.parameters, tool, head, f"call_{number}")]
            return [name, f"{head} %json {schema}"]
        quoted = json.dumps(json.dumps(tool.name, ensure_ascii=False), ensure_ascii=False)
        return [
            f"HEAD_{number}: HEAD {quoted} ARGUMENTS",
            f"call_{number}: HEAD_{number} %json {schema} TAIL",
        ]

    def _parameters(self, form: Parameters, tool: ToolSpec, head: str, name: str) -> list[str]:
        """The rules of a call whose arguments stand one by one, in the order of the schema.

        A separator may be missing or be too many: what the model writes is read all the same.
        """
        schema = _arguments_schema(tool)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        fields: list[str] = []
        rules: list[str] = []
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            return [f"{head} %json {json.dumps(schema)}"]  # which is refused for it
        if schema.get("additionalProperties") is not False:
            properties = {**properties, "": {}}
        for place, (key, value) in enumerate(properties.items()):
            if key:
                _check_name(ARGUMENT_NAME, "argument", key)
            one = f"{name}_{place}"
            known = value if isinstance(value, Mapping) else {}
            whole = {**known, "x-guidance": schema["x-guidance"]}
            whole |= shared if '"$ref"' in json.dumps(known) else {}
            parts = [
                self._marker(form.before_name),
                json.dumps(key) if key else "/[\\w.$@-]+/",
                self._marker(form.after_name.rstrip()),
                r'"\n"' if form.after_name.endswith("\n") else "",
                self._value(form, tool, known, f"%json {json.dumps(whole)}", one),
                f"(/ ?/ {json.dumps(form.separator.strip())} WS?)?" if form.separator else "",
            ]
            rules.append(f"{one}: {' '.join(parts)}")
            if end := form.quote or form.after_value.rstrip():
                rules += self._until(f"{one}_text", "TEXT", end)
            fields.append(one + ("" if key in listed(schema, "required") else "?" if key else "*"))
        return [f"{head} {' '.join(fields)} {self._marker(form.close)}", *rules]

    def _value(
        self, form: Parameters, tool: ToolSpec, schema: Mapping[str, Any], as_json: str, name: str
    ) -> str:
        """A value and what follows it."""
        end = self._marker(form.after_value)
        if not may_be(schema, "string") or not (form.quote or form.after_value):
            return f"{as_json} {end}"
        if tool.strict and (more := sorted(schema.keys() - {"type", "enum", "const"})):
            raise ToolError(
                f"The parameters of the tool {tool.name} can not be enforced: this model writes "
                f"texts as they are, which {more[0]!r} can not limit; leave it or `strict` out"
            )
        text = f"{name}_text"
        if choices := _choices(schema):
            texts = (it if isinstance(it, str) else json.dumps(it) for it in choices)
            text = f"({' | '.join(map(json.dumps, texts))}) {self._marker(form.quote) or end}"
        if not form.quote:
            return f"{text} WS?"
        quoted = f"{self._marker(form.quote)} {text}"
        return quoted if schema.get("type") == "string" else f"({quoted} | {as_json})"

    def _until(self, name: str, text: str, marker: str) -> list[str]:
        """A rule for text up to and including the first such marker."""
        if self._is_token(marker):
            return [f"{name}: {text} {self._marker(marker.lstrip())}"]
        return [f"{name}[lazy]: {text} {json.dumps(marker)}"]

    def _is_token(self, marker: str) -> bool:
        """Whether a marker begins with a special token."""
        return marker.lstrip().startswith(tuple(self.special_ids))

    def _marker(self, marker: str) -> str:
        """Its special tokens, and its text between them; whitespace in it may differ."""
        pieces = "|".join([*map(re.escape, self.special_ids), r"\s+"])
        found = []
        for part in filter(None, re.split(f"({pieces})", marker)):
            token_id = self.special_ids.get(part)
            text = "WS?" if part.isspace() else json.dumps(part)
            found.append(text if token_id is None else f"<[{token_id}]>")
        return " ".join(found)


def _check_name(pattern: re.Pattern[str], kind: str, name: str) -> None:
    """Raises ToolError for a name that could not be read without quotes."""
    if not pattern.fullmatch(name):
        raise ToolError(
            f"This model's chat format does not allow the {kind} name {name!r}; use letters, "
            "digits, _ and -"
        )


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The only values that a schema allows; empty: it does not name them."""
    return [schema["const"]] if "const" in schema else listed(schema, "enum")


def _arguments_schema(tool: ToolSpec) -> dict[str, Any]:
    """The schema of the arguments for llguidance, always of an object. Raises ToolError."""
    schema: dict[str, Any] = plain_schema(tool.parameters or {"type": "object", "properties": {}})
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ToolError(
            f"The parameters of the tool {tool.name} must be a JSON schema of an object, not of "
            f"{kinds!r}"
        )
    schema["type"] = "object"
    if "properties" in schema and not schema.keys() & _OPEN:
        schema["additionalProperties"] = False
    # Only `strict` makes a schema that can not be enforced an error.
    options = {"whitespace_pattern": _JSON_SPACE, "lenient": not tool.strict}
    return schema | {"x-guidance": options}


def _moved(schema: Any, where: str) -> Any:
    """The schema with its references adjusted to its place `where` inside another schema."""
    if isinstance(schema, list):
        return [_moved(item, where) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _moved(value, where) for key, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = where + reference[1:]
    return found
