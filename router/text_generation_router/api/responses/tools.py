"""The tools of a Responses request: functions and tools of free text, alone or in namespaces."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from text_generation_router.chat.format import ToolSpec
from text_generation_router.errors import ToolError
from text_generation_router.fields import Body, Items, ToolName

_SERVED = "only functions and custom tools can be called here, alone or in a namespace"
_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
# One that can be written in a header.
OtherType = Annotated[str, Field(pattern="^[a-z0-9_-]{1,64}$", description="Any other type.")]


def by_type(
    tags: Mapping[str, str],
    *,
    error: str,
    message: str,
    other: str | None = "other",
    missing: str | None = None,
    word: str | None = None,
) -> Discriminator:
    """The discriminator of a union: the tag of the `type`, of one without a tag `other`, and
    `missing` where there is none; None is the error. `word`: the tag of a text."""

    def tag(given: Any) -> str | None:
        if word is not None and isinstance(given, str):
            return word
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        if kind is None:
            return missing
        return tags.get(kind, other) if isinstance(kind, str) else None

    return Discriminator(tag, custom_error_type=error, custom_error_message=message)


_tool_type = partial(by_type, error="tool_type", message="A tool needs a `type`", word="word")


class FunctionTool(Body):
    """A function that the model may call. `strict`: refuse the request if a part of the schema can
    not be enforced."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Body):
    """How the input of a custom tool is written: the model is told, but not held to it."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool whose input is a text. The model sees a function with the argument `input`."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class OtherTool(Body):
    """A tool that is not served: left out, and named in the `warning` header."""

    model_config = ConfigDict(extra="allow")

    type: OtherType


class NamespaceTool(Body):
    """Tools with a common name. The model sees each as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Items[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[OtherTool, Tag("other")],
            _tool_type({"function": "function", "custom": "custom"}),
        ]
    ]


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    _tool_type({"function": "function", "custom": "custom", "namespace": "namespace"}),
]


class NamedTool(Body):
    """A tool that has to be called, or may be."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Body):
    """The only tools that may be called, and whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        Items[
            Annotated[
                Annotated[NamedTool, Tag("named")] | Annotated[OtherTool, Tag("other")],
                _tool_type({"function": "named", "custom": "named"}),
            ]
        ],
        Field(min_length=1),
    ]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[OtherTool, Tag("other")],
    _tool_type({"function": "named", "custom": "named", "allowed_tools": "allowed"}),
]


@dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool as the model sees it, and what the client calls it."""

    spec: ToolSpec
    name: str
    namespace: str | None
    is_custom: bool


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a tool of a namespace: as Codex writes it where it has one name only."""
    if namespace is None:
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def served_tools(tools: Sequence[Tool]) -> Iterator[ServedTool]:
    """The tools that are served, those of namespaces included."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            above = tool.description
            for inner in tool.tools:
                if not isinstance(inner, OtherTool):
                    yield _served(inner, tool.name, above)
                    above = None
        elif not isinstance(tool, OtherTool):
            yield _served(tool, None, None)


def _served(
    tool: FunctionTool | CustomTool, namespace: str | None, above: str | None
) -> ServedTool:
    """`above` precedes the description."""
    name, parts = flat_name(namespace, tool.name), [above, tool.description]
    if isinstance(tool, FunctionTool):
        parameters, strict = tool.parameters, bool(tool.strict)
    else:
        parameters, strict = _FREE_TEXT, False
        parts.append("The text for this tool is the argument `input`.")
        if tool.format is not None and tool.format.definition is not None:
            syntax = tool.format.syntax
            parts.append(f"It has to match this grammar ({syntax}):\n{tool.format.definition}")
    description = "\n\n".join(filter(None, parts)) or tool.description
    spec = ToolSpec(name, description, parameters, strict)
    return ServedTool(spec, tool.name, namespace, isinstance(tool, CustomTool))


def tools_left_out(tools: Sequence[object], path: str = "tools") -> Iterator[str]:
    """What of the tools has no effect, for the `warning` header."""
    for place, tool in enumerate(tools):
        if isinstance(tool, OtherTool):
            yield f"tools of type {tool.type}"
        elif isinstance(tool, NamespaceTool):
            yield from tools_left_out(tool.tools, f"{path}.{place}.tools")
        elif isinstance(tool, CustomTool) and tool.format and tool.format.definition is not None:
            yield f"{path}.{place}.format"


def choice_of(
    choice: ToolChoice | None, tools: Sequence[Tool] | None, has_tools: bool
) -> tuple[str, tuple[str, ...] | None]:
    """Which tool has to be called, and which may be; see `Conversation`. Raises ToolError."""
    names: tuple[str, ...] | None = None
    match choice or "auto":
        case NamedTool() as named:
            return flat_name(named.namespace, named.name), None
        case OtherTool() as other:
            raise ToolError(f"`tool_choice` asks for a tool of type {other.type}; {_SERVED}")
        case AllowedTools() as allowed:
            found = [tool for tool in allowed.tools if isinstance(tool, NamedTool)]
            names = tuple(flat_name(tool.namespace, tool.name) for tool in found)
            has_tools = bool(names)
            word = allowed.mode if has_tools or allowed.mode == "required" else "none"
        case str() as word:
            pass
    if word == "required" and tools and not has_tools:
        raise ToolError(f"`tool_choice` is 'required', but all tools are of other types; {_SERVED}")
    return word, names
