"""Processes that render chat templates, and are killed if a template does not end."""

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
    RefusedByTemplateError,
    RouterError,
    ShuttingDownError,
    TemplateError,
    UnhealthyError,
)

# More than one, so that a template that does not end does not block all others.
NUM_WORKERS = 2
# For one rendering, including the compilation of the template the first time.
MAX_SECONDS = 2.0
# How long a job waits for a free worker.
MAX_WAIT_S = 5.0
# Long, because the machine also loads the model.
START_SECONDS = 30.0
_MODULE = "text_generation_router.chat.rendering"
_PIECE_BYTES = 1 << 20

Job = Mapping[str, Any]
"""JSON arguments of `rendering.Renderer.render`."""

logger = logging.getLogger(__name__)


class TemplateWorkers:
    """Owns at most `NUM_WORKERS` processes that render the templates of one model.

    A worker is started when all others are busy, and killed when a job takes too long. Jobs run in
    order of arrival. No worker outlives `close` or this process.
    """

    def __init__(self, template: ChatTemplate | None = None) -> None:
        self.template = template
        """None: the model has no template, and nothing can be rendered."""
        # Each thread waits for one worker; the pool's queue holds the waiting jobs.
        self._threads = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="template")
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._is_closed = False

    def begin(self, template: ChatTemplate | None) -> None:
        """Starts a worker and renders a short chat in the background; a failure is one log line."""
        self.template = template
        if template is not None:
            self._threads.submit(self._try_out)

    async def render(self, make_job: Callable[[], tuple[Job, Mapping[str, Any]]]) -> str:
        """The prompt. `make_job` returns a job and its template variables, off the event loop.

        Raises TemplateError, OverloadedError if all workers stay busy, UnhealthyError if no worker
        can be started, and what `make_job` raises.
        """
        until = time.monotonic() + MAX_WAIT_S
        return await wrap_future(self._threads.submit(self._render, make_job, until))

    def close(self) -> None:
        """Ends all processes and cancels waiting jobs. Idempotent."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        while self._workers:
            self._workers.pop().end()

    # ---- In the threads of the pool ----

    def _render(self, make_job: Callable[[], tuple[Job, Mapping[str, Any]]], until: float) -> str:
        if time.monotonic() > until:
            raise OverloadedError(math.ceil(MAX_SECONDS))
        return self._run(*make_job())

    def _run(self, arguments: Job, template_kwargs: Mapping[str, Any]) -> str:
        try:
            frame = pack({"arguments": arguments, "kwargs": template_kwargs})
        except TypeError as error:
            raise TemplateError(f"the template's variables must be JSON: {error}") from error
        worker = self._take()
        try:
            reply = worker.call(frame, MAX_SECONDS)
        except (OSError, EOFError) as error:
            worker.kill()
            # Waiting for its end takes time, and so does starting another: no client waits for it.
            with suppress(RuntimeError):  # `close` shut the pool down
                self._threads.submit(self._replace, worker)
            if self._is_closed:
                raise ShuttingDownError from error
            if isinstance(error, TimeoutError):
                sentence = f"the template did not end within {MAX_SECONDS:g} s"
            else:
                sentence = "the process that rendered the template died"
            logger.warning("A chat can not be rendered: %s; restarting its process", sentence)
            raise TemplateError(sentence) from error
        with self._lock:
            self._idle.append(worker)
        if "error" in reply:
            raise RefusedByTemplateError(reply["error"])
        return reply["prompt"]

    def _take(self) -> "_Worker":
        """A worker for this thread alone."""
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
            logger.error("A process for chat templates did not start: %s", error)
            raise UnhealthyError from error
        return worker

    def _new(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            try:
                worker = _Worker()
            except OSError as error:
                logger.error("Can not start a process for chat templates: %s", error.strerror)
                raise UnhealthyError from error
            self._workers.add(worker)
        return worker

    def _replace(self, worker: "_Worker") -> None:
        self._drop(worker)
        with suppress(RouterError):  # the next job tries again
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
                self._run({"messages": messages, "tools": tools}, {})
            except ShuttingDownError:
                return
            except RouterError as error:
                logger.warning(
                    "Chat requests will fail: the chat template can not render a short chat%s: %s",
                    " with a tool" if tools else "",
                    error.message,
                )
                return


class _Worker(Child):
    """A process that renders. One thread uses it at a time; any thread may call `kill`."""

    def __init__(self) -> None:
        """Raises OSError."""
        # Silent, because a traceback could show a client's text.
        super().__init__(_MODULE, is_silent=True)

    def begin(self, template: ChatTemplate) -> None:
        """Returns when the process is ready for jobs. Raises OSError and EOFError."""
        frame = {"sources": template.sources, "special_tokens": template.special_tokens}
        self.call(pack(frame), START_SECONDS)

    def call(self, frame: bytes, timeout_s: float) -> dict[str, str]:
        """The reply. Raises TimeoutError, and EOFError or OSError if the process has ended."""
        until = time.monotonic() + timeout_s
        self.connection.settimeout(timeout_s)
        self.connection.sendall(frame)
        (size,) = HEADER.unpack(self._receive(HEADER.size, until))
        reply: dict[str, str] = orjson.loads(self._receive(size, until))
        return reply

    def _receive(self, num_bytes: int, until: float) -> bytearray:
        received = bytearray()
        while len(received) < num_bytes:
            # Not 0, which would make the socket non-blocking.
            self.connection.settimeout(max(1e-3, until - time.monotonic()))
            piece = self.connection.recv(min(_PIECE_BYTES, num_bytes - len(received)))
            if not piece:
                raise EOFError("its process has ended")
            received += piece
        return received
