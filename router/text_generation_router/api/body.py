"""What routes ask of a body before they run: content type, size, JSON; each refused in its words.

The statuses are those of TGI's extractor. The body of every refusal is the JSON error object, since
clients call `.json()` on it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope

from text_generation_router.api.inflate import (
    ENCODINGS,
    InflateError,
    InflatesTooFarError,
    inflated,
)
from text_generation_router.api.json_cost import MOST_TIMES, is_too_costly
from text_generation_router.api.keys import Handler, KeyRoute
from text_generation_router.config import RouterConfig
from text_generation_router.errors import OverloadedError

# A client that has not sent its body after so long is told so.
BODY_TIMEOUT_S = 60
# Larger bodies are parsed and checked by a thread, so that streams go on meanwhile.
_LARGE_BODY = 64 * 1024
_SHOWN_CHARACTERS = 60
# The name of a field, and what is wrong with it, can hold the client's own words.
_SHOWN_NAME, SHOWN_COMPLAINT = 64, 400
# orjson reads deeper than it writes (254), and answers show parts of requests some levels down.
_SAFE_DEPTH = 240


class BodyError(HTTPException):
    """A body that is not a request; `detail` is the sentence for the user."""


class CarriedError(HTTPException):
    """Carries an error out of `json`, from where FastAPI lets no other kind through."""

    def __init__(self, carried: RequestValidationError | OverloadedError) -> None:
        super().__init__(400)
        self.carried = carried


class ShapeError(CarriedError):
    """JSON that is not what the route takes."""


Parser = Callable[[bytes | bytearray], Any]


class Field(Protocol):
    """What FastAPI knows of a route's body."""

    def validate(
        self, value: Any, values: dict[str, Any], *, loc: tuple[str, ...]
    ) -> tuple[Any, Any]:
        """The request that the value is, and what is wrong with it."""


class JsonRequest(Request):
    """A request whose body is JSON of at most `payload_limit` bytes."""

    def __init__(self, scope: Scope, receive: Receive, field: Field) -> None:
        super().__init__(scope, receive)
        self._field = field
        # A large or compressed body, until it is parsed: a caller of `body` would keep it as long
        # as the answer takes.
        self._large = bytearray()

    async def body(self) -> bytes:
        """The raw body, buffered up to the limit, or if it is large no more than a sign that it is
        there. Raises BodyError."""
        if not hasattr(self, "_body"):
            self.check_content_type()
            encoding = self._encoding()
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    received = await self._read()
            except TimeoutError:
                raise BodyError(
                    408, f"The request body did not arrive within {BODY_TIMEOUT_S} s"
                ) from None
            if not received:
                raise BodyError(400, "Failed to parse the request body as JSON: the body is empty")
            if encoding or len(received) > _LARGE_BODY:
                self._large, self._body = received, b"large"
            else:
                self._body = bytes(received)
        return self._body

    async def json(self) -> Any:
        """The parsed body; of a large one the request that it is, which FastAPI takes as it is.
        Raises BodyError, ShapeError and CarriedError, which is for a lack of room."""
        body = await self.body()
        parse = self.parser()
        if not self._large:
            return parse(body)
        # Bodies are inflated one after the other, and each is parsed at once, so that what a small
        # one becomes is never held while it waits.
        if encoding := self._encoding():
            inflate = partial(_inflated, encoding=encoding, limit=_config(self).payload_limit)
        else:
            inflate = None
        large, self._large = self._large, bytearray()
        run = self.app.state.services.large_bodies.run
        try:
            outcome = await run(_outcome, large, self._field, parse, inflate)
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
        """What makes a value of the body; raises BodyError."""
        return parsed

    def check_content_type(self) -> None:
        """Raises BodyError for what does not say that it is JSON."""
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
        # Not a list of what has come, joined at the end: that is twice the memory.
        received = bytearray()
        async for chunk in self.stream():
            if len(received) + len(chunk) > limit:
                raise too_large
            received += chunk
        return received


class JsonRoute(KeyRoute):
    """A POST route behind the API keys whose body is read by `request_class`.

    The key is looked at before the body.
    """

    request_class: type[JsonRequest] = JsonRequest

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        field = self.body_field
        assert field is not None

        async def reading(request: Request) -> Response:
            try:
                return await handler(self.request_class(request.scope, request.receive, field))
            except CarriedError as error:
                raise error.carried from None

        return reading


def shape_error(errors: Sequence[Any]) -> str:
    """The sentence for JSON of the wrong shape, from the first of pydantic's errors."""
    first = errors[0]
    path = ".".join(short(str(part)) for part in first["loc"] if part != "body") or "body"
    complaint = short(first["msg"].removeprefix("Value error, "), SHOWN_COMPLAINT)
    sentence = f"Failed to deserialize the JSON body into the target type: `{path}`: {complaint}"
    if first["type"] == "missing":
        return sentence
    return f"{sentence}. Given: {shown(first['input'])}"


def shown(given: Any) -> str:
    """The beginning of a value as JSON; no more of it is looked at."""
    written = ""
    for piece in _json_pieces(given):
        written += piece
        if len(written) > _SHOWN_CHARACTERS:
            return written[:_SHOWN_CHARACTERS] + "…"
    return written


def short(words: str, most: int = _SHOWN_NAME) -> str:
    """The words, or their beginning."""
    return words if len(words) <= most else words[:most] + "…"


def _json_pieces(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        # One that is cut is longer than what is shown.
        yield orjson.dumps(given[: _SHOWN_CHARACTERS + 1]).decode()
    elif isinstance(given, dict):
        yield "{"
        for place, (key, value) in enumerate(given.items()):
            yield "," * (place > 0)
            yield from _json_pieces(key)
            yield ":"
            yield from _json_pieces(value)
        yield "}"
    elif isinstance(given, list):
        yield "["
        for place, value in enumerate(given):
            yield "," * (place > 0)
            yield from _json_pieces(value)
        yield "]"
    else:
        yield orjson.dumps(given, default=repr).decode()


def _outcome(
    body: bytearray, field: Field, parse: Parser, inflate: Callable[[bytearray], bytearray] | None
) -> Any:
    """The request that a body is, or the BodyError or ShapeError that says why it is none.

    Raised out of a thread an error would be part of a circle with what waits for it, and what it
    holds, megabytes, would stay until the next collection.
    """
    try:
        return _checked(body if inflate is None else inflate(body), field, parse)
    except HTTPException as error:
        error.__context__ = error.__traceback__ = None
        return error


def _checked(body: bytearray, field: Field, parse: Parser) -> Any:
    """The request that a body is. Raises BodyError and ShapeError."""
    value = parse(body)
    made, errors = field.validate(value, {}, loc=("body",))
    if errors:
        raise ShapeError(RequestValidationError(errors, body=value))
    return made


def _inflated(body: bytearray, encoding: str, limit: int) -> bytearray:
    """The body as it was before it was compressed. Raises BodyError."""
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
    """The value of a JSON text. Raises BodyError."""
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
        # The error holds the whole text.
        raise BodyError(400, f"Failed to parse the request body as JSON: {error}") from None
    if body.count(b"[") + body.count(b"{") > _SAFE_DEPTH:
        _check_depth(value)
    return value


def _check_depth(parsed: Any) -> None:
    """Raises BodyError for what could not be written again inside of an answer."""
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
