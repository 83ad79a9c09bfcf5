"""The valid API keys: those given at the start, and those of a file that is re-read. The check of a
request's key finds its caller."""

import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Depends, HTTPException, Request, Response, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from text_generation_router.config import RouterConfig
from text_generation_router.request_options import ANYBODY, CALLER, Allowance, Caller, KeyLimits

_NO_KEY = (
    "The API key is missing or wrong; send one that the server was started with as "
    "`Authorization: Bearer KEY` or `x-api-key: KEY`"
)
# The documentation and what its page loads.
_DOCS = ("/docs", "/api-doc/", "/static-offline-docs")
# A key that is removed from the file is refused after this time.
REREAD_EVERY_S = 0.5
MAX_FILE_BYTES = 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

logger = logging.getLogger(__name__)


class KeyFileError(ValueError):
    """The key file can not be used; one sentence."""


def _read(path: str) -> tuple[bytes, bool]:
    """The content of a key file, and whether all users can read it. Raises KeyFileError."""
    try:
        # Without waiting, should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            is_plain = stat.S_ISREG(mode)
            content = file.read(MAX_FILE_BYTES + 1) if is_plain else b""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _bad_file(path, f"can not be read: {reason}") from error
    if not is_plain:
        raise _bad_file(path, "is not a plain file")
    if len(content) > MAX_FILE_BYTES:
        raise _bad_file(path, f"is larger than {MAX_FILE_BYTES} bytes")
    if not _keys_in(content):
        raise KeyFileError(
            f"--api-key-file {path} holds no key: write one per line; "
            "empty lines and lines that begin with # do not count"
        )
    return content, bool(mode & stat.S_IROTH)


def _bad_file(path: str, why: str) -> KeyFileError:
    return KeyFileError(f"--api-key-file {path} {why}; give a file with a key per line")


def _keys_in(content: bytes) -> list[bytes]:
    lines = content.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    return [key for line in lines if (key := line.strip()) and not key.startswith(b"#")]


class Keys:
    """Owns a Caller for each valid key, found by the key's digest.

    The digest is keyed with a secret of this process, so that the time of a lookup reveals nothing
    about a key. Keys themselves are not kept. A request re-reads the file if the last reading is
    `REREAD_EVERY_S` old; if it can not be used then, the old keys stay valid. `now` is in seconds,
    of a monotonic clock.
    """

    def __init__(self, given: Sequence[str], path: str | None, limits: KeyLimits) -> None:
        """Raises KeyFileError. Without keys and file, requests need no key."""
        self._secret = secrets.token_bytes(32)
        self._path = path
        self._limits = limits
        # Environment variables may not be UTF-8.
        self._given = [key.encode(errors="surrogateescape") for key in given]
        self._callers: dict[bytes, Caller] = {}
        self._next_reading = 0.0
        self._content = b""
        self._complaint = ""
        content, is_open_to_all = (b"", False) if path is None else _read(path)
        self._take(content, is_open_to_all)

    @classmethod
    def of(cls, config: RouterConfig) -> "Keys":
        """The keys of the configuration. Raises KeyFileError."""
        limits = KeyLimits(
            config.max_concurrent_requests_per_key, config.max_tokens_per_minute_per_key
        )
        return cls(config.api_key, config.api_key_file, limits)

    @property
    def are_asked_for(self) -> bool:
        """Whether a request needs one."""
        return bool(self._callers)

    def caller(self, key: bytes | None, now: float) -> Caller | None:
        """The caller with this key (None: no key was sent); None: refuse the request."""
        if self._path is not None and now >= self._next_reading:
            self._next_reading = now + REREAD_EVERY_S
            self._read_again(self._path)
        if not self.are_asked_for:
            return ANYBODY
        return None if key is None else self._callers.get(self._digest(key))

    def _read_again(self, path: str) -> None:
        try:
            content, is_open_to_all = _read(path)
        except KeyFileError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                logger.error("%s; the keys that were read before stay valid", error)
            return
        self._complaint = ""
        if self._digest(content) != self._content:
            self._take(content, is_open_to_all)
            logger.info("--api-key-file %s was read again: %d keys", path, len(self._callers))

    def _take(self, content: bytes, is_open_to_all: bool) -> None:
        """Keys that were valid before keep their callers, and so their running sequences."""
        if is_open_to_all:
            logger.warning("--api-key-file %s can be read by all users: chmod o-r it", self._path)
        self._content = self._digest(content)
        digests = {self._digest(key) for key in (*self._given, *_keys_in(content))}
        # A file may have several keys later.
        is_shared = self._path is None and len(digests) < 2
        is_limited = self._limits != KeyLimits()
        before, self._callers = self._callers, {}
        for digest in digests:
            allowance = Allowance(self._limits) if is_limited else None
            new = Caller("" if is_shared else digest.hex(), allowance)
            self._callers[digest] = before.get(digest) or (ANYBODY if new == ANYBODY else new)

    def _digest(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, digest_size=32, key=self._secret).digest()


async def _has_key(request: Request) -> None:
    check_key(request.scope)


# The two schemes are for the documentation: they refuse nothing.
NEEDS_KEY: list[Any] = [
    Depends(_has_key),
    Security(
        HTTPBearer(
            description="An API key of this server, as OpenAI's clients send it.", auto_error=False
        )
    ),
    Security(
        APIKeyHeader(
            name="x-api-key",
            description="An API key of this server, as Anthropic's clients send it. "
            "One of the two headers is enough.",
            auto_error=False,
        )
    ),
]
"""The dependencies of a router whose routes are behind the API keys."""


def docs_behind_key(app: ASGIApp, refuse: Callable[[Request, Exception], Response]) -> ASGIApp:
    """The same with the documentation behind the API keys."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        if scope["type"] == "http" and scope["path"].startswith(_DOCS):
            try:
                check_key(scope)
            except HTTPException as error:
                answering = refuse(Request(scope), error)
        await answering(scope, receive, send)

    return answer


def check_key(scope: Scope) -> None:
    """Finds the caller of the request, for its options. Raises HTTPException 401.

    A second check of the same request does nothing.
    """
    if CALLER in scope:
        return
    state = scope["app"].state
    keys = state.keys
    assert isinstance(keys, Keys)
    caller = keys.caller(_sent_key(scope), time.monotonic())
    if caller is None:
        state.services.metrics.request_unauthorized.inc()
        raise HTTPException(401, _NO_KEY, {"www-authenticate": "Bearer"})
    scope[CALLER] = caller


def _sent_key(scope: Scope) -> bytes | None:
    """The key in the header of OpenAI's or of Anthropic's clients; a repeated header has none."""
    authorizations = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(authorizations) == 1:
        scheme, _, key = authorizations[0].partition(b" ")
        if scheme.lower() == b"bearer":
            return bytes(key.strip())
    others = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return others[0].strip() if len(others) == 1 and len(authorizations) < 2 else None
