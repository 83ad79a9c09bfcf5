"""How a request says what form the generated text must have: TGI's `grammar` and OpenAI's
`response_format`."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from text_generation_router.fields import Body, optional
from text_generation_router.request import Grammar

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
