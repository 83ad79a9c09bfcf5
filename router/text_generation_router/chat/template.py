"""Finds and reads the chat templates of a model, and renders them in processes that are killed if
a template does not end."""

import logging
import math
import time
from asyncio import wrap_future
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
from text_generation_process.json_file import content_of, read_object, read_settings, read_text
from text_generation_process.worker import (
    Worker,
    WorkerClosedError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)

from text_generation_router.chat.format import ToolSpec
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

# Memory for one rendering: prompts of millions of characters fit many times.
_MAX_BYTES = 2**30
# The name of the template that is not only for chats with tools.
_DEFAULT = "default"

logger = logging.getLogger(__name__)


class ChatTemplate:
    """The texts of one model's templates. Immutable."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` are templates by name, `default`, `tool_use` or both among them;
        `special_tokens` are variables of the templates, such as `bos_token`."""
        self.sources = {name: _text(source) for name, source in sources.items()}
        self.special_tokens = {name: _text(token) for name, token in special_tokens.items()}
        self.source = self.sources.get(_DEFAULT) or next(iter(self.sources.values()))
        """The default template."""
        self.tool_source = self.sources.get("tool_use", self.source)
        """The default template of a chat with tools."""

    @classmethod
    def load(cls, directory: Path, tokenizer_config_path: Path | None) -> "ChatTemplate | None":
        """Reads the model's templates; None if it has none.

        A `tokenizer_config_path` replaces the model's own files: a file like
        tokenizer_config.json, or a template if its name ends in `.jinja`. Raises ValueError, one
        sentence, for a file that can not be read. Invalid Jinja is an error of the rendering.
        """
        config = read_settings(directory)
        if tokenizer_config_path is None:
            sources = _read_sources(directory, config)
        elif tokenizer_config_path.suffix == ".jinja":
            sources = {_DEFAULT: read_text(tokenizer_config_path)}
        elif tokenizer_config_path.is_file():
            given = read_object(tokenizer_config_path)
            sources = _named(given.get("chat_template"), tokenizer_config_path)
            config |= given
        else:
            raise ValueError(
                f"The file {tokenizer_config_path} of --tokenizer-config-path does not exist; give "
                "a tokenizer_config.json or a .jinja file."
            )
        # A template without text is none: its prompts would be empty.
        sources = {name: source for name, source in sources.items() if source.strip()}
        tokens = {name: content_of(it) for name, it in config.items() if name.endswith("_token")}
        special_tokens = {name: text for name, text in tokens.items() if text is not None}
        return cls(sources, special_tokens) if sources else None


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
            arguments = {
                "sources": template.sources,
                "special_tokens": template.special_tokens,
                "max_bytes": _MAX_BYTES,
            }
            self._worker = Worker(_MODULE, orjson.dumps(arguments), memory_bytes=_MAX_BYTES)
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


def _read_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates in a model's directory, by name."""
    own_file = directory / "chat_template.jinja"
    old_file = directory / "chat_template.json"
    if own_file.is_file():
        sources = {_DEFAULT: read_text(own_file)}
    elif old_file.is_file():
        sources = _named(read_object(old_file).get("chat_template"), old_file)
    else:
        sources = _named(config.get("chat_template"), directory / "tokenizer_config.json")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path)
    return sources


def _named(template: Any, path: Path) -> dict[str, str]:
    """The templates in a `chat_template` field: a text, a list of objects, or an object."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {_DEFAULT: template}
    if isinstance(template, list) and all(isinstance(item, dict) for item in template):
        template = {item.get("name"): item.get("template") for item in template}
    if isinstance(template, dict) and all(
        isinstance(part, str) for item in template.items() for part in item
    ):
        return template
    raise ValueError(
        f"The chat_template in {path} must be a text or a list of objects with `name` and "
        "`template`."
    )


def _text(characters: str) -> str:
    """Without lone surrogates, which JSON can spell and no tokenizer accepts."""
    return characters.encode(errors="replace").decode()
