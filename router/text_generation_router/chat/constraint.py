"""The grammar of an answer that may reason and call tools, made from the format's markers."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from text_generation_router.grammar import as_item, checked_schema, plain_schema
from text_generation_router.request import Grammar

# Whitespace where JSON allows it. It is bounded, so that it can not go on forever.
_SPACE = r"[ \t\r\n]"
_JSON_SPACE = r"[ \n]{1,2}"
# Keywords besides `properties` that also define arguments.
_OPEN = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
}


def answer_grammar(
    chat_format: ChatFormat,
    wanted: Grammar | None = None,
    tools: Sequence[ToolSpec] = (),
    choice: str = "auto",
    *,
    parallel: bool = True,
    special_ids: Mapping[str, int] = MappingProxyType({}),
    starts_in_reasoning: bool = False,
) -> Grammar | None:
    """The grammar that the answer must follow; None: any answer is valid.

    `choice` is `auto` (an answer as `wanted`, None: any text; calls; or any text and then calls),
    `required` (one call, or several if `parallel`) or a tool's name (exactly one call of it).
    Beside tools, `wanted` must be a JSON schema. Reasoning may come first; only where any text is
    an answer it may end there. `special_ids` maps the format's markers that are special tokens of
    the tokenizer to their ids: they are matched as tokens, not as text. Raises ToolError and
    GrammarError.
    """
    if choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == choice]
        parallel = False
        if not tools:
            raise ToolError(f"Tool with name {choice} not found")
    if not tools and wanted is None:
        return None
    # Also where the choice leaves no room for it, a wanted form must be valid.
    formatted = None if wanted is None else as_item(wanted)
    if choice != "auto":
        formatted = None
    elif wanted is not None and tools and chat_format.is_bare:
        formatted = _text_or_calls(checked_schema(wanted.source), tools, chat_format)
    chat = _ChatGrammar(
        form=chat_format,
        special_ids=special_ids,
        tools=tools,
        parallel=parallel,
        formatted=formatted,
        is_free=choice == "auto" and wanted is None,
        starts_in_reasoning=starts_in_reasoning,
    )
    return Grammar("lark", chat.write())


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatGrammar:
    """Writes llguidance's Lark. A name in capitals is a terminal and matches the longest text:
    where free text is also allowed, whitespace belongs to the terminal after it."""

    form: ChatFormat
    special_ids: Mapping[str, int]
    tools: Sequence[ToolSpec]
    parallel: bool
    formatted: str | None
    """The only answer that is no call."""
    is_free: bool
    """Whether any text is an answer, which then may end inside a thought."""
    starts_in_reasoning: bool

    def write(self) -> str:
        """The whole grammar."""
        rules = self._start()
        if self.tools:
            rules.append(f"BEGIN: /{_SPACE}{{0,4}}/ {json.dumps(self.form.begin)}")
            rules += self._calls()
        if self.formatted is not None:
            rules.append(f"formatted: {self.formatted}")
        return "\n".join([*rules, ""])

    def _start(self) -> list[str]:
        """The first rules: reasoning, and then an answer."""
        rules = ["TEXT: /(?s:.*)/", f"WS: /{_SPACE}{{1,4}}/"]
        if self.form.reasoning is None:
            return [*self._answer("start"), *rules]
        begin, end = self.form.reasoning
        if self.form.has_channels:
            end += self.form.separator
        rules += [*self._until("thought", "TEXT", end), *self._answer("answer")]
        if self.form.has_channels:
            # Commentary to the user may precede a call.
            more = self._marker("<|channel|>commentary<|message|>")
            free = "(think thought)* think TEXT | " if self.is_free else ""
            think = f"think: {self._marker(begin)} | {more}"
            return [f"start: {free}(think thought)* answer", think, *rules]
        if self.starts_in_reasoning:
            return [f"start: {'TEXT | ' if self.is_free else ''}thought answer", *rules]
        if self._is_token(begin):
            rules += [f"think: WS? {self._marker(begin)}", *self._answer("at_once")]
        else:
            literal = json.dumps(begin)
            rules += [
                "think: THINK",
                f"THINK: /{_SPACE}*/ {literal}",
                *self._answer("at_once", f" & ~(/{_SPACE}*/ {literal} TEXT)"),
            ]
        free = "think TEXT | " if self.is_free else ""
        return [f"start: at_once | {free}think thought answer", *rules]

    def _answer(self, name: str, but: str = "") -> list[str]:
        """The rules of an answer; `but` excludes some texts where any text is one."""
        form = self.form
        final = self._marker("<|channel|>final<|message|>") if form.has_channels else ""
        options, rules = [], []
        if self.formatted is not None:
            # Models write line ends behind a thought.
            options.append(f"{final or 'WS?' * (name == 'answer')} formatted")
        if self.is_free and final:
            options.append(f"{final} TEXT")
        elif self.is_free:
            plain = f"{name.upper()}_TEXT"
            text = f"/{_SPACE}*([^ \\t\\r\\n{{](?s:.*))?/" if form.is_bare else "TEXT"
            options.append(plain)
            rules.append(f"{plain}: {text}{but}")
            begin, end = form.response or ("", "")
            if begin in self.special_ids:
                options.append(f"{plain} {self._marker(begin)} TEXT ({self._marker(end)} TEXT)?")
            if form.begin:
                options.append(f"{name}_begin calls")
                rules += self._until(f"{name}_begin", plain, form.begin)
        if self.tools and form.is_bare and self.formatted is None:
            options.append("calls")
        if self.tools and form.begin and (final or not self.is_free):
            is_token = self._is_token(form.begin)
            options.append(f"{f'WS? {self._marker(form.begin)}' if is_token else 'BEGIN'} calls")
        return [f"{name}: {' | '.join(options)}", *rules]

    def _calls(self) -> list[str]:
        """The rules of calls, after the first begin marker."""
        form = self.form
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
            f"call: {' | '.join(f'call_{i}' for i in range(len(self.tools)))}",
        ]
        for i, tool in enumerate(self.tools):
            rules += self._call(i, tool)
        return rules

    def _call(self, number: int, tool: ToolSpec) -> list[str]:
        form, schema = self.form, json.dumps(_arguments_schema(tool))
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


def _text_or_calls(answer: Mapping[str, Any], tools: Sequence[ToolSpec], form: ChatFormat) -> str:
    """An item for an answer with this schema or a call, if calls are JSON without a marker: one
    schema, because the first characters of both are the same."""
    key = form.arguments_key
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
    return f"%json {json.dumps({'anyOf': options, 'x-guidance': options_of_both})}"


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
