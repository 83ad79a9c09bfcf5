"""`LLM`: a model in Python, with the server's scheduler and shards but without HTTP."""

import asyncio
import ctypes
import logging
import os
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import uvloop
from anyio.from_thread import start_blocking_portal
from pydantic import TypeAdapter, ValidationError
from text_generation_process.flags import OPTIONS
from text_generation_process.option import Child, Mode

from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.messages import MessageBody, ToolBody, to_messages
from text_generation_router.config import RouterConfig
from text_generation_router.offline.bulk import Job, RequestOutput, Tally, bar, run_jobs
from text_generation_router.offline.sampling import SamplingParams, complaint
from text_generation_router.offline.shards_process import (
    ShardsAddress,
    ShardsProcess,
    ShardsProcessError,
)
from text_generation_router.reading import vector_of
from text_generation_router.services import Services, StartError, start
from text_generation_router.validation import GenerateParameters

Prompt = str | Sequence[int]
"""Text, or token ids."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation in OpenAI's form: `[{"role": "user", "content": "…"}]`."""
OptionValue = str | int | float | bool | Path | None

_T = TypeVar("_T")
_CLOSED_MEANWHILE = "the LLM was closed while it was generating"
_MESSAGES = TypeAdapter(list[MessageBody])
_TOOLS = TypeAdapter(list[ToolBody])
# Options of a batch file that an `LLM` does not have: it has no files and no clients.
_NOT_OFFLINE = frozenset(
    {
        *("input", "output", "env", "json_output", "shard_uds_path", "max_input_length"),
        *("payload_limit", "served_model_name", "any_model_name", "max_best_of"),
        *("max_concurrent_requests", "max_client_batch_size"),
    }
)
# No limits that protect a server from its clients.
_NO_LIMIT = 2**31 - 1
_OFFLINE_LIMITS = {"max_stop_sequences": _NO_LIMIT, "max_top_n_tokens": 100}

# The results have the errors: they are logged only if the user configures logging.
logging.getLogger("text_generation_router.infer").addHandler(logging.NullHandler())


class LLMError(Exception):
    """The model could not be started, or has ended; the message says why."""


class LLM:
    """Owns a model in its own shards, until `close` or the end of this process.

        with LLM("Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16") as llm:
            for result in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
                print(result.outputs[0].text)

    The default is MODEL_ID (the launcher reads its environment variables), else the embedded model.
    The options are those of the launcher and the router, with underscores: `dtype`, `device`,
    `revision`, `num_shard`, `max_batch_size`, `max_total_tokens`, …, except those about HTTP. Can
    be used from any thread, with or without a running event loop. A process may have several.
    """

    def __init__(self, model: str | Path | None = None, **options: OptionValue) -> None:
        """Returns when the model is ready. Raises TypeError for an unknown option, ValueError for
        an invalid one, and LLMError if the model can not be started."""
        shard_flags, router_options = sort_options(model, options)
        self._calls: set[Future[Any]] = set()
        with ExitStack() as stack:
            self._process = stack.enter_context(closing(ShardsProcess(shard_flags)))
            try:
                address = self._process.wait_until_ready()
                config = router_config(router_options, address)
                # A thread with an event loop: the caller may have one of its own, as notebooks do.
                loop = {"loop_factory": uvloop.new_event_loop}
                self._portal = stack.enter_context(start_blocking_portal("asyncio", loop))
                services = self._portal.wrap_async_context_manager(_serve(config))
                self._started = stack.enter_context(services)
            except (ShardsProcessError, StartError) as error:
                raise LLMError(str(error)) from error
            self.model_id = address.model_id
            self._end = weakref.finalize(self, _close, stack.pop_all(), self._calls, os.getpid())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One result for each prompt, in order; `params` are for all prompts, or one for each.

        A failed prompt does not stop the others: its result has the error. Raises ValueError for
        invalid arguments, and LLMError if the model has ended.
        """
        given = _prompt_list(prompts)
        jobs = []
        for prompt, one in zip(given, _params_list(params, len(given)), strict=True):
            jobs.append(Job(prompt, _with_prompt(one.to_parameters(), prompt), one.n))
        return self._run(jobs, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The next message of a conversation, or of each of several; see `generate`."""
        conversations: Sequence[Any] = messages
        if not conversations or isinstance(conversations[0], Mapping):
            conversations = [messages]
        specs = tuple(tool.to_spec() for tool in _checked(_TOOLS, [*tools], "tools"))
        jobs = []
        listed = _params_list(params, len(conversations))
        for one, chosen in zip(conversations, listed, strict=True):
            if chosen.prompt_logprobs:
                raise ValueError("`prompt_logprobs` is not supported by `chat`: use `generate`")
            bodies = _checked(_MESSAGES, [dict(message) for message in one], "messages")
            if not bodies:
                raise ValueError("`messages` must not be empty")
            conversation = Conversation(
                messages=to_messages(bodies),
                parameters=chosen.to_parameters(),
                tools=specs,
                tool_choice=tool_choice,
                template_kwargs=chat_template_kwargs or {},
                num_sequences=chosen.n,
            )
            jobs.append(Job(one, conversation))
        return self._run(jobs, progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """A vector for each prompt, in order, as /v1/embeddings computes it.

        Raises ValueError for `dimensions` above the model's, RouterError for an invalid prompt, and
        LLMError if the model has ended.
        """
        services = self._services()
        size = services.info.hidden_size
        if dimensions is not None and not 0 < dimensions <= size:
            raise ValueError(f"`dimensions` must be 1 to {size}. Given: {dimensions}")
        asked = GenerateParameters(inputs="", max_new_tokens=1, pooling=services.pooling)
        requests = [_with_prompt(asked, prompt) for prompt in _prompt_list(prompts)]
        results = self._wait_for(partial(services.infer.read_prompts, requests))
        found = [result.prefill.pooled for result in results]
        return [list(vector_of(pooled, dimensions, normalize)) for pooled in found]

    def metrics(self) -> str:
        """The metrics of a server's /metrics, in Prometheus' text format."""
        return self._started.metrics.render().decode()

    def close(self) -> None:
        """Ends the model and frees its memory; running calls raise LLMError. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, jobs: Sequence[Job], progress: bool) -> list[RequestOutput]:
        services, tally = self._services(), Tally(len(jobs))
        with bar(tally, sys.stderr) if progress else nullcontext():
            return self._wait_for(partial(run_jobs, services, jobs, tally))

    def _services(self) -> Services:
        """The running services. Raises LLMError if the model has ended."""
        if not self._end.alive:
            raise LLMError("this LLM is closed: create another")
        if not self._process.is_alive:
            raise LLMError(f"the model has ended: {self._process.last_words()}")
        return self._started

    def _wait_for(self, work: Callable[[], Awaitable[_T]]) -> _T:
        try:
            running = self._portal.start_task_soon(work)
        except RuntimeError as error:  # it was closed a moment ago
            raise LLMError("this LLM is closed: create another") from error
        self._calls.add(running)
        try:
            results = running.result()
        except CancelledError as error:
            raise LLMError(_CLOSED_MEANWHILE) from error
        except BaseException:  # for example Ctrl-C: the work must not continue
            running.cancel()
            raise
        finally:
            self._calls.discard(running)
        if not self._end.alive:
            raise LLMError(_CLOSED_MEANWHILE)
        return results


def _close(running: ExitStack, calls: set[Future[Any]], owner: int) -> None:
    if os.getpid() != owner:
        # A fork does not own the model, and has no thread with its event loop. The stack must never
        # be freed: that would leave its contexts, which wait for this thread.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(running))
        return
    for call in list(calls):
        call.cancel()
    running.close()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list; a single prompt becomes a list of one. Raises ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and isinstance(listed[0], int):
        listed = [listed]
    for prompt in listed:
        is_sequence = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not is_sequence or not (isinstance(prompt, str) or all(type(i) is int for i in prompt)):
            raise ValueError(f"a prompt must be a text or a list of token ids, not {prompt!r:.60}")
    return listed


def _with_prompt(parameters: GenerateParameters, prompt: Prompt) -> GenerateParameters:
    if isinstance(prompt, str):
        return replace(parameters, inputs=prompt)
    return replace(parameters, input_ids=tuple(prompt))


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num: int
) -> Iterable[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise ValueError(
            f"{num} prompts need {num} SamplingParams, or one for all. Given: {len(params)}"
        )
    return params


def _checked(adapter: TypeAdapter[list[Any]], given: list[Any], name: str) -> list[Any]:
    """The list, validated by the adapter. Raises ValueError."""
    try:
        return adapter.validate_python(given)
    except ValidationError as error:
        raise ValueError(complaint(error, name)) from None


def sort_options(
    model: str | Path | None, given: Mapping[str, OptionValue]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The flags for `text-generation-launcher shards`, which validates them, and the fields of
    RouterConfig. None means "not given". The launcher's table of flags says who gets an option.

    Raises TypeError for an unknown option, ValueError for one that has no effect without HTTP or
    has an invalid value.
    """
    options = {option.name.replace("-", "_"): option for option in OPTIONS}
    known = {name for name, one in options.items() if one.applies_in(Mode.BATCH)} - _NOT_OFFLINE
    shard_flags: list[str] = []
    router: dict[str, Any] = {}
    for name, value in {"model_id": model, **given}.items():
        if name not in options:
            raise TypeError(f"LLM has no option `{name}`; see `help(LLM)`")
        if value is None:
            continue
        if name not in known:
            raise ValueError(f"`{name}` is an option of the server; remove it")
        option = options[name]
        if Child.ROUTER in option.to:
            router[name] = str(value) if isinstance(value, Path) else value
        if option.to == (Child.ROUTER,):
            continue
        if option.switch and isinstance(value, bool):
            shard_flags += [option.flag] * value
        else:
            written = str(value).lower() if isinstance(value, bool) else value
            shard_flags.append(f"{option.flag}={written}")
    router_config(router, ShardsAddress("", "", ""))  # validates before the model is loaded
    return tuple(shard_flags), router


def router_config(options: Mapping[str, Any], address: ShardsAddress) -> RouterConfig:
    """The configuration of the router's part. Raises ValueError."""
    rows = {"max_batch_size": RouterConfig(tokenizer_name="").batch_rows}
    return RouterConfig(
        tokenizer_name=address.model_path,
        model_id=address.model_id,
        master_shard_uds_path=address.master_shard_uds_path,
        max_concurrent_requests=_NO_LIMIT,
        **{**_OFFLINE_LIMITS, **rows, **options},
    )


@asynccontextmanager
async def _serve(config: RouterConfig) -> AsyncIterator[Services]:
    """The services of one model. At the end, running requests end with an error. Raises
    StartError."""
    asyncio.get_running_loop().set_exception_handler(_ignore_other_loops)
    async with start(config) as services, services.batcher.running():
        yield services


def _ignore_other_loops(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports errors except a harmless one: an event of gRPC wakes up every loop that uses gRPC,
    and all but one find its socket empty."""
    handle = repr(context.get("handle", "")) + str(context.get("message", ""))
    is_noise = isinstance(context.get("exception"), BlockingIOError)
    if not (is_noise and "PollerCompletionQueue" in handle):
        loop.default_exception_handler(context)
