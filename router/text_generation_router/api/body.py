"""Reads the body of a request: size, encoding, JSON.

Refusals have the statuses of TGI's extractor, and a JSON error object, on which clients call
`.json()`.
"""

import codecs
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from text_generation_router.edge.body_cost import MOST_TIMES, is_too_costly

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
