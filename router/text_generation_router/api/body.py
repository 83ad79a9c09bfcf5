"""What routes ask of a body before they run: content type, size, JSON; each refused in its words.

The statuses are those of TGI's extractor. The body of every refusal is the JSON error object, since
clients call `.json()` on it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import HTTPException, Request, Response

from text_generation_router.api.keys import Handler, KeyRoute
from text_generation_router.config import RouterConfig

# A client that has not sent its body after so long is told so.
BODY_TIMEOUT_S = 60
_SHOWN_CHARACTERS = 60
# orjson reads deeper than it writes (254), and answers show parts of requests some levels down.
_SAFE_DEPTH = 240


class BodyError(HTTPException):
    """A body that is not a request; `detail` is the sentence for the user."""


class JsonRequest(Request):
    """A request whose body is JSON of at most `payload_limit` bytes."""

    async def body(self) -> bytes:
        """The raw body, buffered up to the limit. Raises BodyError."""
        if not hasattr(self, "_body"):
            self._check_content_type()
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    self._body = await self._read()
            except TimeoutError:
                raise BodyError(
                    408, f"The request body did not arrive within {BODY_TIMEOUT_S} s"
                ) from None
            if not self._body:
                raise BodyError(400, "Failed to parse the request body as JSON: the body is empty")
        return self._body

    async def json(self) -> Any:
        """The parsed body. Raises BodyError."""
        body = await self.body()
        try:
            parsed = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            if error.msg.startswith("number is infinity"):
                raise BodyError(
                    422,
                    "Failed to deserialize the JSON body into the target type: "
                    f"number out of range at line {error.lineno} column {error.colno}",
                ) from error
            raise BodyError(400, f"Failed to parse the request body as JSON: {error}") from error
        if body.count(b"[") + body.count(b"{") > _SAFE_DEPTH:
            _check_depth(parsed)
        return parsed

    def _check_content_type(self) -> None:
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        main, _, sub = media_type.partition("/")
        if main != "application" or not (sub == "json" or sub.endswith("+json")):
            raise BodyError(415, "Expected request with `Content-Type: application/json`")

    async def _read(self) -> bytes:
        limit = _config(self).payload_limit
        too_large = BodyError(
            413,
            "Failed to buffer the request body: length limit exceeded. "
            f"At most {limit} bytes are accepted (--payload-limit)",
        )
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        async for chunk in self.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)


class JsonRoute(KeyRoute):
    """A POST route behind the API keys whose body is read by `JsonRequest`.

    The key is looked at before the body.
    """

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def reading(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return reading


def shape_error(errors: Sequence[Any]) -> str:
    """The sentence for JSON of the wrong shape, from the first of pydantic's errors."""
    first = errors[0]
    path = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    complaint = first["msg"].removeprefix("Value error, ")
    sentence = f"Failed to deserialize the JSON body into the target type: `{path}`: {complaint}"
    if first["type"] == "missing":
        return sentence
    given = orjson.dumps(first["input"], default=repr).decode()
    if len(given) > _SHOWN_CHARACTERS:
        given = given[:_SHOWN_CHARACTERS] + "…"
    return f"{sentence}. Given: {given}"


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
