"""Reads the body of a request: content type, size, encoding, JSON.

Refusals have the statuses of TGI's extractor, and a JSON error object, on which clients call
`.json()`.
"""

import codecs
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from text_generation_router.api.keys import KeyScheme
from text_generation_router.config import RouterConfig
from text_generation_router.edge.body_cost import (
    ENCODINGS,
    MOST_TIMES,
    InflateError,
    InflatesTooFarError,
    inflated,
    is_too_costly,
)
from text_generation_router.errors import OverloadedError
from text_generation_router.request_options import read_options

# Larger bodies are parsed and validated in a thread, which does not stop streams.
_LARGE_BODY = 64 * 1024
_SHOWN_CHARACTERS = 60
# Both are cut, because they can hold text of the client.
_SHOWN_NAME, _SHOWN_COMPLAINT = 64, 400
# orjson writes 254 levels at most, and answers show parts of requests some levels down.
_SAFE_DEPTH = 240


class BodyError(HTTPException):
    """A body that is not a request; `detail` is the sentence for the user."""


class CarriedError(HTTPException):
    """Carries an error out of `json`; FastAPI hides all but HTTPException there."""

    def __init__(self, carried: RequestValidationError | OverloadedError) -> None:
        super().__init__(400)
        self.carried = carried


Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Parser = Callable[[bytes | bytearray], Any]
# Of FastAPI: the request that a value is, and what is wrong with it.
Validate = Callable[..., tuple[Any, Any]]


class JsonRequest(Request):
    """A request whose body is JSON of at most `payload_limit` bytes."""

    def __init__(self, scope: Scope, receive: Receive, validate: Validate) -> None:
        super().__init__(scope, receive)
        self._validate = validate
        # A large or compressed body until it is parsed. A caller of `body` would keep it for the
        # time of the answer.
        self._large = bytearray()

    async def body(self) -> bytes:
        """The raw body up to the limit; a placeholder for a large one. Raises BodyError."""
        if not hasattr(self, "_body"):
            self.check_content_type()
            encoding = self._encoding()
            received = await self._read()
            if not received:
                raise BodyError(400, "Failed to parse the request body as JSON: the body is empty")
            if encoding or len(received) > _LARGE_BODY:
                self._large, self._body = received, b"large"
            else:
                self._body = bytes(received)
        return self._body

    async def json(self) -> Any:
        """The parsed body; for a large one the validated request, which FastAPI accepts as it is.
        Raises BodyError and CarriedError."""
        body = await self.body()
        parse = self.parser()
        if not self._large:
            return parse(body)
        # Each body is inflated right before it is parsed: inflated bodies never wait in memory.
        if encoding := self._encoding():
            inflate = partial(_inflated, encoding=encoding, limit=_config(self).payload_limit)
        else:
            inflate = None
        large, self._large = self._large, bytearray()
        run = self.app.state.services.large_bodies.run
        try:
            outcome = await run(_outcome, large, self._validate, parse, inflate)
        except OverloadedError as error:
            raise CarriedError(error) from None
        finally:
            del large
        if not isinstance(outcome, HTTPException):
            return outcome
        try:
            raise outcome
        finally:
            del outcome

    def parser(self) -> Parser:
        """The function that parses the body; raises BodyError."""
        return parsed

    def check_content_type(self) -> None:
        """Raises BodyError unless the content type is JSON."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        main, _, sub = media_type.partition("/")
        if main != "application" or not (sub == "json" or sub.endswith("+json")):
            raise BodyError(415, "Expected request with `Content-Type: application/json`")

    def _encoding(self) -> str | None:
        """How the body is compressed; None if it is not. Raises BodyError."""
        encoding = ", ".join(self.headers.getlist("content-encoding")).strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in ENCODINGS:
            raise BodyError(
                415,
                f"A body with `Content-Encoding: {short(encoding)}` can not be read here; send it "
                "compressed with gzip or deflate, or as it is",
                {"accept-encoding": "gzip, deflate"},
            )
        return encoding

    async def _read(self) -> bytearray:
        limit = _config(self).payload_limit
        too_large = _too_large(limit)
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        # Joining a list of chunks at the end would take twice the memory.
        received = bytearray()
        async for chunk in self.stream():
            if len(received) + len(chunk) > limit:
                raise too_large
            received += chunk
        return received


class JsonRoute(APIRoute):
    """A POST route whose body is read by `request_class`.

    The key is checked first, then the headers that set the options of the request, then the body.
    FastAPI alone would read the body before it calls any dependency.
    """

    request_class: type[JsonRequest] = JsonRequest

    def get_route_handler(self) -> Handler:
        """Raises HTTPException, RouterError and RequestValidationError."""
        handler = super().get_route_handler()
        declared = (each.dependency for each in self.dependencies)
        schemes = [each for each in declared if isinstance(each, KeyScheme)]
        field = self.body_field
        assert field is not None

        async def reading(request: Request) -> Response:
            for scheme in schemes:
                await scheme(request)
            deadline = read_options(request.scope).deadline
            asked = self.request_class(request.scope, request.receive, field.validate)
            try:
                if deadline is None:
                    return await handler(asked)
                async with deadline.bounds():
                    return await handler(asked)
            except CarriedError as error:
                raise error.carried from None

        return reading


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
    """The validated request, or the BodyError or CarriedError.

    An error raised out of a thread is in a reference cycle with its future; the megabytes that it
    holds would stay until the next garbage collection.
    """
    try:
        return _checked(body if inflate is None else inflate(body), validate, parse)
    except HTTPException as error:
        error.__context__ = error.__traceback__ = None
        return error


def _checked(body: bytes | bytearray, validate: Validate, parse: Parser) -> Any:
    """The validated request. Raises BodyError and CarriedError."""
    value = parse(body)
    made, errors = validate(value, {}, loc=("body",))
    if errors:
        raise CarriedError(RequestValidationError(errors, body=value))
    return made


def _inflated(body: bytearray, encoding: str, limit: int) -> bytes:
    """The decompressed body. Raises BodyError."""
    try:
        return inflated(body, encoding, limit)
    except InflatesTooFarError:
        raise _too_large(limit) from None
    except InflateError as error:
        raise BodyError(400, f"Failed to inflate the request body: {error}") from None


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
        _check_depth(value)
    return value


def _check_depth(parsed: Any) -> None:
    """Raises BodyError for a value that orjson could not write inside an answer."""
    try:
        orjson.dumps([[[[[[[[parsed]]]]]]]])
    except orjson.JSONEncodeError as error:
        raise BodyError(
            400, "Failed to parse the request body as JSON: nested deeper than 240 levels"
        ) from error


def _config(request: Request) -> RouterConfig:
    config = request.app.state.config
    assert isinstance(config, RouterConfig)
    return config
