"""Kinds of fields that the bodies of several dialects have, beside `fields.py` of the router; among
them the form that a text must have: TGI's `grammar` and OpenAI's `response_format`."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, Field, model_validator

from text_generation_router.fields import Body, optional
from text_generation_router.request import Grammar

DETERMINISTIC = (
    "The same tokens, bit for bit, regardless of what else is in the batch. Refused "
    "where the server can not promise it."
)
STREAM = "Answer with a stream of events."
# Names in one `warning` header, which stays short.
_MOST_NAMES = 32


class Hint:
    """Marks a field that may have any value and changes nothing."""

    def __init__(self, *harmless: Any) -> None:
        """harmless: values that request what this server does anyway."""
        self.harmless = harmless


IGNORED = Field(description="Accepted, but it changes nothing.")


def warning(body: BaseModel, more: Iterable[str] = ()) -> dict[str, str]:
    """The header that names the fields of a request that have no effect, and `more`; empty without
    any."""
    if names := list(dict.fromkeys((*_ignored(body), *more))):
        if len(names) > _MOST_NAMES:
            names[_MOST_NAMES:] = ["and more"]
        return {"warning": f'299 - "changes nothing here: {", ".join(names)}"'}
    return {}


def _ignored(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """The dotted names of the fields without effect."""
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if isinstance(value, BaseModel):
            yield from _ignored(value, f"{prefix}{name}.")
        for mark in field.metadata:
            if isinstance(mark, Hint) and value is not None and value not in mark.harmless:
                yield prefix + name


# As of `X-Priority`, whose range leaves room above and below.
_PRIORITIES = {"priority": 50, "flex": -50}

ServiceTier = Annotated[
    Any,
    # Other values are served as `default`, and named in the `warning` header.
    Hint("auto", "default", *_PRIORITIES),
    Field(description="`priority` has its turn before others, `flex` behind them."),
]


def tier_of(asked: Any) -> str:
    """The tier that serves this value of the field."""
    return asked if isinstance(asked, str) and asked in _PRIORITIES else "default"


def priority_of(asked: Any) -> int:
    """The priority of that tier."""
    return _PRIORITIES.get(tier_of(asked), 0)


JsonSchema = dict[str, Any]
ANY_OBJECT: JsonSchema = {"type": "object"}


class JsonGrammarBody(Body):
    """A JSON schema, or a string that holds one."""

    type: Literal["json", "json_object"] = Field(description="`json`; `json_object` is the same.")
    value: JsonSchema | str = Field(
        description="The schema.", examples=[{"properties": {"name": {"type": "string"}}}]
    )


class NamedSchemaBody(Body):
    """A JSON schema in OpenAI's form. `name` and `strict` change nothing: it is always followed."""

    schema_: JsonSchema = Field(
        alias="schema", description="The schema.", examples=[{"type": "object"}]
    )
    name: str | None = optional("Changes nothing.")


class SchemaGrammarBody(Body):
    """A JSON schema, where TGI has it (`value`) or where OpenAI has it (`json_schema`)."""

    type: Literal["json_schema"]
    value: NamedSchemaBody | None = optional("The schema. Give this or `json_schema`.")
    json_schema: NamedSchemaBody | None = optional("The schema. Give this or `value`.")

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if (self.value is None) == (self.json_schema is None):
            raise ValueError("one of `json_schema` and `value` must be given")
        return self


class WrittenGrammarBody(Body):
    """A regular expression that the whole text matches, or a grammar in llguidance's Lark."""

    type: Literal["regex", "lark"] = Field(description="Which of the two `value` is.")
    value: str = Field(
        description="The regular expression or the grammar.", examples=["[0-9]{3}-[a-z]+"]
    )


class TextFormatBody(Body):
    """Any text."""

    type: Literal["text"]


class JsonFormatBody(Body):
    """Any JSON object, or one that follows a schema, in TGI's spelling or in LangChain's."""

    type: Literal["json_object", "json"] = Field(description="Both words mean the same.")
    value: JsonSchema | str | None = optional(
        "The schema as TGI's clients send it. Default: any object."
    )
    schema_: JsonSchema | None = optional(
        "The schema as LangChain sends it. Default: any object.", alias="schema"
    )


GrammarBody = Annotated[
    JsonGrammarBody | SchemaGrammarBody | WrittenGrammarBody, Field(discriminator="type")
]
ResponseFormatBody = Annotated[
    TextFormatBody | JsonFormatBody | SchemaGrammarBody | WrittenGrammarBody,
    Field(discriminator="type"),
]


def schema_grammar(schema: JsonSchema | str) -> Grammar:
    """The grammar of a schema, or of a text that holds one."""
    source = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Grammar("json_schema", source)


def grammar_of(given: GrammarBody | ResponseFormatBody | None) -> Grammar | None:
    """The grammar of a request; None: any text."""
    match given:
        case JsonGrammarBody():
            return schema_grammar(given.value)
        case SchemaGrammarBody():
            named = given.value or given.json_schema
            assert named is not None
            return schema_grammar(named.schema_)
        case WrittenGrammarBody():
            return Grammar(given.type, given.value)
        case JsonFormatBody():
            schema = given.schema_ if given.value is None else given.value
            return schema_grammar(ANY_OBJECT if schema is None else schema)
        case _:
            return None
