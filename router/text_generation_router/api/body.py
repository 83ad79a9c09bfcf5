"""The bodies of requests: how they are read (size, encoding, JSON), and the kinds of fields that
those of several dialects have, beside `fields.py` of the router; among them the form that a text
must have: TGI's `grammar` and OpenAI's `response_format`.

Refusals have the statuses of TGI's extractor, and a JSON error object, on which clients call
`.json()`.
"""

import codecs
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import orjson
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, model_validator
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from text_generation_router.edge.body_cost import MOST_TIMES, is_too_costly
from text_generation_router.fields import Body, optional
from text_generation_router.request import Grammar

# The known values of `Content-Encoding`.
_ENCODINGS = ("gzip", "x-gzip", "deflate")
# Larger bodies are parsed and validated in a thread, which does not stop streams.
_LARGE_BODY = 64 * 1024
_SHOWN_CHARACTERS = 60
# Both are cut, because they can hold text of the client.
_SHOWN_NAME, _SHOWN_COMPLAINT = 64, 400
# orjson writes 254 levels at most, and answers show parts of requests some levels down.
_SAFE_DEPTH = 240


class BodyError(HTTPException):
    """A body that is not a request; `detail` is the sentence for the user."""


Parser = Callable[[bytes | bytearray], Any]
# Of FastAPI: the request that a value is, and what is wrong with it.
Validate = Callable[..., tuple[Any, Any]]


def media_type(headers: Headers) -> str:
    """The content type without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, validate: Validate, parse: Parser) -> Any:
    """The parsed body; of a large one the validated request, which FastAPI accepts as it is.
    Raises BodyError, OverloadedError and RequestValidationError."""
    services = request.app.state.services
    limit = services.config.payload_limit
    encoding = _encoding(request.headers)
    body = await _received(request, limit)
    if not body:
        raise BodyError(400, "Failed to parse the request body as JSON: the body is empty")
    if not encoding and len(body) <= _LARGE_BODY:
        return parse(body)
    # Each body is inflated right before it is parsed: inflated bodies never wait in memory.
    inflate = partial(inflated, encoding=encoding, limit=limit) if encoding else None
    outcome = await services.large_bodies.run(_outcome, body, validate, parse, inflate)
    if not isinstance(outcome, Exception):
        return outcome
    try:
        raise outcome
    finally:
        del outcome


def _encoding(headers: Headers) -> str | None:
    """How the body is compressed; None if it is not. Raises BodyError."""
    encoding = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _ENCODINGS:
        raise BodyError(
            415,
            f"A body with `Content-Encoding: {short(encoding)}` can not be read here; send it "
            "compressed with gzip or deflate, or as it is",
            {"accept-encoding": "gzip, deflate"},
        )
    return encoding


async def _received(request: Request, limit: int) -> bytearray:
    """The raw body. Raises BodyError, and HTTPException 499 if the client leaves."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    # Joining a list of chunks at the end would take twice the memory.
    received = bytearray()
    try:
        async for chunk in request.stream():
            if len(received) + len(chunk) > limit:
                raise _too_large(limit)
            received += chunk
    except ClientDisconnect:
        raise HTTPException(499, "The client has left") from None
    return received


def shape_error(errors: Sequence[Any]) -> str:
    """The sentence for JSON of the wrong shape, from the first of pydantic's errors."""
    first = errors[0]
    path = ".".join(short(str(part)) for part in first["loc"] if part != "body") or "body"
    complaint = complaint_of(first)
    return f"Failed to deserialize the JSON body into the target type: `{path}`: {complaint}"


def complaint_of(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in words."""
    complaint = short(error["msg"].removeprefix("Value error, ").rstrip("."), _SHOWN_COMPLAINT)
    return (
        complaint if error["type"] == "missing" else f"{complaint}. Given: {shown(error['input'])}"
    )


def shown(given: Any) -> str:
    """The beginning of a value as JSON."""
    if isinstance(given, str):
        given = given[: _SHOWN_CHARACTERS + 1]
    written = orjson.dumps(given, default=repr).decode()
    return short(written, _SHOWN_CHARACTERS)


def short(words: str, most: int = _SHOWN_NAME) -> str:
    """The words, or their beginning."""
    return words if len(words) <= most else words[:most] + "…"


def _outcome(
    body: bytearray, validate: Validate, parse: Parser, inflate: Callable[[bytearray], bytes] | None
) -> Any:
    """The validated request, or the BodyError or RequestValidationError.

    An error raised out of a thread is in a reference cycle with its future; the megabytes that it
    holds would stay until the next garbage collection.
    """
    try:
        value = parse(body if inflate is None else inflate(body))
        made, errors = validate(value, {}, loc=("body",))
        return RequestValidationError(errors, body=value) if errors else made
    except BodyError as error:
        error.__context__ = error.__traceback__ = None
        return error


def inflated(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """The decompressed body; no more than `limit` is decompressed. Raises BodyError."""
    stream = zlib.decompressobj(zlib.MAX_WBITS if encoding == "deflate" else 16 + zlib.MAX_WBITS)
    wrong = f"its {encoding} stream is cut off"
    try:
        made = stream.decompress(body, limit + 1)
        if len(made) > limit:
            raise _too_large(limit)
        if stream.eof and not stream.unused_data:
            return made
        if stream.eof:
            wrong = f"something follows its {encoding} stream"
    except zlib.error as error:
        wrong = f"it is not {encoding}: {error}"
    raise BodyError(400, f"Failed to inflate the request body: {wrong}")


def _too_large(limit: int) -> BodyError:
    return BodyError(
        413,
        "Failed to buffer the request body: length limit exceeded. "
        f"At most {limit} bytes are accepted (--payload-limit)",
    )


def parsed(body: bytes | bytearray) -> Any:
    """The value of a JSON text, which may begin with a byte order mark. Raises BodyError."""
    if body.startswith(codecs.BOM_UTF8):
        body = body[len(codecs.BOM_UTF8) :]
    if len(body) > _LARGE_BODY and is_too_costly(body):
        raise BodyError(
            400,
            "Failed to parse the request body as JSON: its objects, lists, keys and strings are so "
            f"many that they would take more than {MOST_TIMES} times its size; send fewer",
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("number is infinity"):
            raise BodyError(
                422,
                "Failed to deserialize the JSON body into the target type: "
                f"number out of range at line {error.lineno} column {error.colno}",
            ) from None
        is_unicode = not error.msg.startswith("str is not valid UTF-8")
        why = str(error) if is_unicode else "it is not valid UTF-8; send it as UTF-8"
        # Without the cause: it holds the whole text.
        raise BodyError(400, f"Failed to parse the request body as JSON: {why}") from None
    if body.count(b"[") + body.count(b"{") > _SAFE_DEPTH:
        try:
            # As deep as orjson could not write it inside an answer.
            orjson.dumps([[[[[[[[value]]]]]]]])
        except orjson.JSONEncodeError as error:
            raise BodyError(
                400, "Failed to parse the request body as JSON: nested deeper than 240 levels"
            ) from error
    return value


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
