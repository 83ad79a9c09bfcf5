"""Chat templates are rendered in processes of their own, which can be killed."""

import logging
import math
import threading
import time
from asyncio import wrap_future
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import orjson
from text_generation_process.children import Child

from text_generation_router.chat.format import ToolSpec
from text_generation_router.chat.frames import HEADER, pack
from text_generation_router.chat.template import ChatTemplate
from text_generation_router.errors import (
    OverloadedError,
    RouterError,
    ShuttingDownError,
    TemplateError,
    UnhealthyError,
)

# One that does not end does not hold up the others.
NUM_WORKERS = 2
# For a rendering, with the compiling of the template where it is the first.
MAX_SECONDS = 2.0
# So long one waits until a worker is free.
MAX_WAIT_S = 5.0
# A machine that is busy with a model's start takes its time.
START_SECONDS = 30.0
_MODULE = "text_generation_router.chat.rendering"
_PIECE_BYTES = 1 << 20

Job = Mapping[str, Any]
"""Arguments of `rendering.Renderer.render`, which are JSON."""

logger = logging.getLogger(__name__)


class TemplateWorkers:
    """Owns at most `NUM_WORKERS` processes that render the templates of one model.

    Each is started when all others are busy, and killed when it does not end in time; who comes
    first goes first. None is left behind `close`, nor when this process is killed.
    """

    def __init__(self, template: ChatTemplate | None = None) -> None:
        self.template = template
        """None for a model that has none: then nothing can be rendered."""
        # One thread waits for one worker; its queue is the line of those who wait.
        self._threads = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="template")
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._is_closed = False

    def begin(self, template: ChatTemplate | None) -> None:
        """Starts the first worker and has it render a small conversation, beside whatever else is
        done; a template that fails is told in one line of the log."""
        self.template = template
        if template is not None:
            self._threads.submit(self._try_out)

    async def render(self, make_job: Callable[[], tuple[Job, Mapping[str, Any]]]) -> str:
        """The prompt of a job and its template variables, which are made off the event loop.

        Raises TemplateError, OverloadedError if all workers are busy for too long, UnhealthyError
        if none can be started, and what `make_job` raises.
        """
        until = time.monotonic() + MAX_WAIT_S
        return await wrap_future(self._threads.submit(self._render, make_job, until))

    def close(self) -> None:
        """Ends all processes and what waits for them. May be repeated."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        while self._workers:
            self._workers.pop().end()

    # ---- In one of the threads ----

    def _render(self, make_job: Callable[[], tuple[Job, Mapping[str, Any]]], until: float) -> str:
        if time.monotonic() > until:
            raise OverloadedError(math.ceil(MAX_SECONDS))
        return self._ask(*make_job())

    def _ask(self, arguments: Job, template_kwargs: Mapping[str, Any]) -> str:
        try:
            frame = pack({"arguments": arguments, "kwargs": template_kwargs})
        except TypeError as error:
            raise TemplateError(f"what the template is given must be JSON: {error}") from error
        worker = self._take()
        try:
            said = worker.ask(frame, MAX_SECONDS)
        except (OSError, EOFError) as error:
            worker.kill()
            # Its memory takes a while to be given back, for which the client need not wait; nor
            # need the next one wait until another is started.
            with suppress(RuntimeError):  # all are ended by `close`
                self._threads.submit(self._replace, worker)
            if self._is_closed:
                raise ShuttingDownError from error
            if isinstance(error, TimeoutError):
                sentence = f"the template did not end within {MAX_SECONDS:g} s"
            else:
                sentence = "the template brought its process to an end"
            logger.warning("A chat can not be rendered: %s; its process is started anew", sentence)
            raise TemplateError(sentence) from error
        with self._lock:
            self._idle.append(worker)
        if "error" in said:
            raise TemplateError(said["error"])
        return said["prompt"]

    def _take(self) -> "_Worker":
        """A worker that nobody else has."""
        assert self.template is not None
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.is_alive:
            return worker
        if worker is not None:
            self._drop(worker)
        worker = self._new()
        try:
            worker.begin(self.template)
        except (OSError, EOFError) as error:
            self._drop(worker)
            if self._is_closed:
                raise ShuttingDownError from error
            logger.error("A process for chat templates does not start: %s", error)
            raise UnhealthyError from error
        return worker

    def _new(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            try:
                worker = _Worker()
            except OSError as error:
                logger.error("No process for chat templates can be started: %s", error.strerror)
                raise UnhealthyError from error
            self._workers.add(worker)
        return worker

    def _replace(self, worker: "_Worker") -> None:
        self._drop(worker)
        with suppress(RouterError):  # whoever needs one tries again
            new = self._take()
            with self._lock:
                self._idle.append(new)

    def _drop(self, worker: "_Worker") -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()

    def _try_out(self) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        for tools in (None, [ToolSpec("now", "Tells the time.").as_openai()]):
            try:
                self._ask({"messages": messages, "tools": tools}, {})
            except ShuttingDownError:
                return
            except RouterError as error:
                logger.warning(
                    "Chats will be answered with an error: a small one%s fails: %s",
                    " with a tool" if tools else "",
                    error.message,
                )
                return


class _Worker(Child):
    """A process that renders. Used by one thread at a time, but for `kill`."""

    def __init__(self) -> None:
        """Raises OSError."""
        # A traceback could show what a client wrote.
        super().__init__(_MODULE, is_silent=True)

    def begin(self, template: ChatTemplate) -> None:
        """Returns when it is ready for jobs. Raises OSError and EOFError."""
        frame = {"sources": template.sources, "special_tokens": template.special_tokens}
        self.ask(pack(frame), START_SECONDS)

    def ask(self, frame: bytes, timeout_s: float) -> dict[str, str]:
        """The answer. Raises TimeoutError if it is late, other OSErrors and EOFError if the process
        has ended."""
        until = time.monotonic() + timeout_s
        self.connection.settimeout(timeout_s)
        self.connection.sendall(frame)
        (size,) = HEADER.unpack(self._receive(HEADER.size, until))
        said: dict[str, str] = orjson.loads(self._receive(size, until))
        return said

    def _receive(self, num_bytes: int, until: float) -> bytearray:
        received = bytearray()
        while len(received) < num_bytes:
            # 0 would mean not to wait at all, which is another error.
            self.connection.settimeout(max(1e-3, until - time.monotonic()))
            piece = self.connection.recv(min(_PIECE_BYTES, num_bytes - len(received)))
            if not piece:
                raise EOFError("its process has ended")
            received += piece
        return received
