"""The grammar of an answer that may call tools, made from the chat format's markers."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from text_generation_router.chat.format import BARE_NAME, ChatFormat, ToolSpec
from text_generation_router.errors import ToolError
from text_generation_router.request import Grammar

# Whitespace where JSON allows some: as models write it, and not more, or it could go on forever.
_SPACE = r"[ \t\r\n]"
_JSON_SPACE = r"[ \n]{1,2}"
# Keywords beside `properties` that also say which arguments there are.
_OPEN = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
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
    """What the answer must look like; None where nothing is asked of it.

    `choice` is `auto` (text as it comes, or calls, or calls behind text), `none`, `required` (one
    call or, if `parallel`, more) or a tool's name (exactly one call of that). Reasoning may stand
    before all of it, and be cut by the end of the tokens. `special_ids` has the ids of those of
    the format's markers that are special tokens of the tokenizer: they are matched as tokens, not
    as text. `answer` is the schema, in llguidance's form, of what is no call; None: any text.
    Raises ToolError.
    """
    if choice == "none" or not tools:
        return None
    if choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == choice]
        parallel = False
        if not tools:
            raise ToolError(f"Tool with name {choice} not found")
    grammar = _ToolGrammar(chat_format, special_ids, parallel, answer)
    return Grammar("lark", grammar.write(tools, choice == "auto", starts_in_reasoning))


class _ToolGrammar:
    """Writes llguidance's Lark. Names in capitals are matched as one piece of text, the longest
    that fits: where text may stand as well, whitespace is part of the piece behind it."""

    def __init__(
        self,
        chat_format: ChatFormat,
        special_ids: Mapping[str, int],
        parallel: bool,
        answer: Mapping[str, Any] | None,
    ) -> None:
        self._format = chat_format
        self._special_ids = special_ids
        self._parallel = parallel
        self._answer = answer

    def write(self, tools: Sequence[ToolSpec], is_auto: bool, starts_in_reasoning: bool) -> str:
        """All of the grammar."""
        rules = [
            "TEXT: /(?s:.*)/",
            f"WS: /{_SPACE}{{1,4}}/",
            f"BEGIN: /{_SPACE}{{0,4}}/ {json.dumps(self._format.begin)}",
            *self._calls(tools),
        ]
        answer = self._forced_answer
        if is_auto and self._answer is not None:
            answer = self._formatted_answer
            rules.append(f"formatted: %json {json.dumps(self._formatted(self._answer, tools))}")
        elif is_auto:
            answer = self._auto_answer
        if self._format.reasoning is None:
            return "\n".join([*answer("start", ""), *rules])
        begin, end = self._format.reasoning
        rules += [*self._until("thought", "TEXT", end), *answer("answer", "")]
        # A thought that takes all the tokens there are is cut, not ended for the model: so it may
        # also be the end of the text.
        if starts_in_reasoning:
            return "\n".join(["start: TEXT | thought answer", *rules])
        if begin in self._special_ids:
            rules += [f"think: WS? {self._marker(begin)}", *answer("at_once", "")]
        else:
            literal = json.dumps(begin)
            rules += [
                "think: THINK",
                f"THINK: /{_SPACE}*/ {literal}",
                *answer("at_once", f" & ~(/{_SPACE}*/ {literal} TEXT)"),
            ]
        return "\n".join(["start: at_once | think TEXT | think thought answer", *rules])

    def _auto_answer(self, name: str, but: str) -> list[str]:
        """Text or calls; `but` says what text there must not be."""
        plain = f"{name.upper()}_TEXT"
        text = f"/{_SPACE}*([^ \\t\\r\\n{{](?s:.*))?/" if self._format.is_bare else "TEXT"
        options, rules = [plain], [f"{plain}: {text}{but}"]
        if self._format.begin:
            options.append(f"{name}_begin calls")
            rules += self._until(f"{name}_begin", plain, self._format.begin)
        if self._format.is_bare:
            options.append("calls")
        return [f"{name}: {' | '.join(options)}", *rules]

    def _formatted_answer(self, name: str, but: str) -> list[str]:
        """JSON or calls, and nothing before them."""
        marked = self._marked_calls()
        return [f"{name}: {' | '.join(['formatted', *marked])}"]

    def _formatted(self, answer: Mapping[str, Any], tools: Sequence[ToolSpec]) -> Mapping[str, Any]:
        """The schema of JSON that is no call; where a call is JSON without a marker, of that, too:
        which of them it is shows later than the first characters."""
        if not self._format.is_bare:
            return answer
        key = self._format.arguments_key
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
        # Models write spaces behind both signs, and a schema of others may be looser.
        options_of_both = {"whitespace_pattern": _JSON_SPACE, "lenient": True}
        return {"anyOf": options, "x-guidance": options_of_both}

    def _forced_answer(self, name: str, but: str) -> list[str]:
        """Calls, and nothing before them."""
        options = ["calls"] if self._format.is_bare else []
        return [f"{name}: {' | '.join([*options, *self._marked_calls()])}"]

    def _marked_calls(self) -> list[str]:
        """Calls with the marker that begins them; empty: there is none."""
        begin = self._format.begin
        if begin in self._special_ids:
            return [f"WS? {self._marker(begin)} calls"]
        return ["BEGIN calls"] if begin else []

    def _calls(self, tools: Sequence[ToolSpec]) -> list[str]:
        """Calls behind the first begin marker."""
        form = self._format
        end = f"WS? {self._marker(form.end)}" if form.end else ""
        if form.is_list:
            more = "(COMMA call)*" if self._parallel else ""
            calls = f"OPEN_LIST call {more} CLOSE_LIST {end}"
        elif form.wraps_each:
            more = f"(WS? {self._marker(form.begin)} call {end})*" if self._parallel else ""
            calls = f"call {end} {more}"
        else:
            more = "(SEPARATOR call)*" if self._parallel else ""
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
        form, schema = self._format, json.dumps(_arguments_schema(tool))
        if form.arguments_marker:
            if not BARE_NAME.fullmatch(tool.name):
                raise ToolError(
                    f"The name of the tool {tool.name!r} can not be written by this model; use "
                    "letters, digits, _ and -"
                )
            name = f"NAME_{number}: /{_SPACE}?/ {json.dumps(tool.name)}"
            marker = self._marker(form.arguments_marker)
            return [name, f"call_{number}: NAME_{number} {marker} %json {schema}"]
        quoted = json.dumps(json.dumps(tool.name, ensure_ascii=False), ensure_ascii=False)
        return [
            f"HEAD_{number}: HEAD {quoted} ARGUMENTS",
            f"call_{number}: HEAD_{number} %json {schema} TAIL",
        ]

    def _until(self, name: str, text: str, marker: str) -> list[str]:
        """A rule for text that ends with the first such marker."""
        if marker in self._special_ids:
            return [f"{name}: {text} {self._marker(marker)}"]
        return [f"{name}[lazy]: {text} {json.dumps(marker)}"]

    def _marker(self, marker: str) -> str:
        token_id = self._special_ids.get(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _arguments_schema(tool: ToolSpec) -> dict[str, Any]:
    """The schema of the arguments, an object in any case, for llguidance."""
    schema: dict[str, Any] = dict(tool.parameters or {"type": "object", "properties": {}})
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ToolError(
            f"The parameters of the tool {tool.name} must be a JSON schema of an object, not of "
            f"{kinds!r}"
        )
    schema["type"] = "object"
    if "properties" in schema and not schema.keys() & _OPEN:
        schema["additionalProperties"] = False
    # What can not be enforced is an error only where it was asked for.
    options = {"whitespace_pattern": _JSON_SPACE, "lenient": not tool.strict}
    return schema | {"x-guidance": options}


def _moved(schema: Any, where: str) -> Any:
    """A schema that stands in another one, at this place: its references name what they did."""
    if isinstance(schema, list):
        return [_moved(item, where) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _moved(value, where) for key, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = where + reference[1:]
    return found
