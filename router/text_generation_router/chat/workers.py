"""Renders chat templates in processes that are killed if a template does not end."""

import logging
import math
import time
from asyncio import wrap_future
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from text_generation_process.worker import (
    Worker,
    WorkerClosedError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)

from text_generation_router.chat.format import ToolSpec
from text_generation_router.chat.template import MAX_BYTES, ChatTemplate
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
# How long a job waits for a free process.
MAX_WAIT_S = 5.0
_MODULE = "text_generation_router.chat.rendering"

Job = Mapping[str, Any]
"""JSON arguments of `rendering.Renderer.render`."""

logger = logging.getLogger(__name__)


class TemplateWorkers:
    """Renders the templates of one model, at most `NUM_WORKERS` chats at a time, in order of
    arrival. Owns the worker that does it."""

    def __init__(self) -> None:
        # Each thread waits for one process; the pool's queue holds the waiting jobs.
        self._threads = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="template")
        self.template: ChatTemplate | None = None
        """None: the model has no template, and nothing can be rendered."""
        self._worker: Worker | None = None

    def begin(self, template: ChatTemplate | None, tries: bool = True) -> None:
        """Takes the template, starts a process and renders a short chat in the background if it
        `tries`. A failure is logged."""
        self.template = template
        if template is not None:
            arguments = {"sources": template.sources, "special_tokens": template.special_tokens}
            self._worker = Worker(_MODULE, orjson.dumps(arguments), memory_bytes=MAX_BYTES)
            if tries:
                self._threads.submit(self._try_out)

    async def render(self, make_job: Callable[[], tuple[Job, Mapping[str, Any]]]) -> str:
        """The prompt. `make_job` returns a job and its template variables, off the event loop.

        Raises TemplateError, OverloadedError if all processes stay busy, UnhealthyError if none can
        be started, and what `make_job` raises.
        """
        until = time.monotonic() + MAX_WAIT_S
        return await wrap_future(self._threads.submit(self._render, make_job, until))

    def close(self) -> None:
        """Ends all processes and cancels waiting jobs. May be repeated."""
        if self._worker is not None:
            self._worker.close()
        self._threads.shutdown(cancel_futures=True)

    # ---- In the threads of the pool ----

    def _render(self, make_job: Callable[[], tuple[Job, Mapping[str, Any]]], until: float) -> str:
        if time.monotonic() > until:
            raise OverloadedError(math.ceil(MAX_SECONDS))
        return self._run(*make_job())

    def _run(self, arguments: Job, template_kwargs: Mapping[str, Any]) -> str:
        assert self._worker is not None
        try:
            job = orjson.dumps({"arguments": arguments, "kwargs": template_kwargs})
        except TypeError as error:
            raise TemplateError(f"the template's variables must be JSON: {error}") from error
        try:
            answer = self._worker.call("answer", job, MAX_SECONDS)
        except WorkerClosedError as error:
            raise ShuttingDownError from error
        except WorkerStartError as error:
            logger.error("A process for chat templates did not start: %s", error)
            raise UnhealthyError from error
        except WorkerError as error:
            sentence = "the process that rendered the template died"
            if isinstance(error, WorkerTimeoutError):
                sentence = f"the template did not end within {MAX_SECONDS:g} s"
            logger.warning("A chat can not be rendered: %s", sentence)
            raise TemplateError(sentence) from error
        found: dict[str, str] = orjson.loads(answer)
        if "error" in found:
            raise RefusedByTemplateError(found["error"])
        return found["prompt"]

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
