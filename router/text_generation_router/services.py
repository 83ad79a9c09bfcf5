"""The objects behind the routes, and the order in which they start."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from text_generation_process.defaults import LAUNCHER_WAITING_SERVED_RATIO, WARMUP_ROWS

from text_generation_router.chat.format import detect_format
from text_generation_router.chat.service import ChatService
from text_generation_router.chat.template import ChatTemplate, TemplateWorkers
from text_generation_router.client.ranks import ShardInfo, WarmupResult
from text_generation_router.client.recovery import Reconnection, WatchedShards
from text_generation_router.client.shards import ShardedClient
from text_generation_router.config import RouterConfig
from text_generation_router.errors import GenerationError
from text_generation_router.executor import Executor, MemoryBudget
from text_generation_router.grammar import GrammarCompiler
from text_generation_router.infer import Infer
from text_generation_router.metrics import Metrics
from text_generation_router.reading import Reranker, find_reranker, pooling_of
from text_generation_router.request import Pooling
from text_generation_router.request_options import NO_OPTIONS, RequestOptions
from text_generation_router.scheduler.batcher import Batcher
from text_generation_router.scheduler.costs import SchedulerLimits, StepCosts, StepDeadlines
from text_generation_router.state import LOADING, ServerState, State
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.validation import Limits, Validation

if TYPE_CHECKING:
    from text_generation_router.tracing.requests import TracedRequests

_POLL_S = 0.02
# The watch over the shards' steps comes first.
STALL_ROOM_S = 1.0
# Most bytes of long answers of /tokenize and /chat_tokenize that clients have not read yet.
_LONG_ANSWERS_BYTES = 64 * 1024 * 1024

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The router can not start; one sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Services:
    """The objects of one running router."""

    config: RouterConfig
    info: ShardInfo
    limits: Limits
    scheduler_limits: SchedulerLimits
    shards: ShardedClient
    watch: WatchedShards
    tokenizer: Tokenizer
    metrics: Metrics
    batcher: Batcher
    infer: Infer
    chat: ChatService
    templates: TemplateWorkers
    # One thread: several would compete with the event loop for the interpreter.
    large_bodies: Executor
    long_answers: MemoryBudget
    # `<number of shards>-<device>`, a header of every answer.
    compute_type: str
    # Unix time.
    loaded_at: int
    # For /v1/embeddings.
    pooling: Pooling
    # For /score and /rerank, or the reason why there is none.
    reranker: Reranker | str
    state: ServerState
    # Without a finished step for this long, work is stalled.
    stall_s: float
    # Of the request that they serve.
    options: RequestOptions = NO_OPTIONS


@asynccontextmanager
async def start(
    config: RouterConfig, tracing: "TracedRequests | None" = None, state: ServerState | None = None
) -> AsyncIterator[Services]:
    """Connects, warms the shards up and checks the limits. Raises StartError.

    The end of the block closes the connections to the shards and ends the processes that render
    chat templates. `state` reports the phases of the start.
    """
    # The tokenizer is read and the first template process starts while the shards warm up.
    workers = TemplateWorkers()
    state = state or ServerState()
    async with AsyncExitStack() as stack:
        stack.callback(workers.close)
        load = asyncio.create_task(_load(config, workers))
        stack.callback(load.cancel)
        state.go(State.STARTING, LOADING)
        while config.await_shards and not os.path.exists(config.master_shard_uds_path):
            if load.done():
                await load  # raises its failure
            await asyncio.sleep(_POLL_S)
        state.go(State.STARTING, "connecting to the shards")
        with _start_errors("connect to the Python model shards"):
            shards = await ShardedClient.connect(
                config.master_shard_uds_path, answer_s=config.starting_deadline_s
            )
        stack.push_async_callback(shards.close)
        with _start_errors("clear the Python model shards cache"):
            await shards.clear_cache(None)
        with _start_errors("get the Python model shards info"):
            info = await shards.info()
        state.go(State.STARTING, "warming up")
        with _start_errors("warmup the Python model shards"):
            warmup = await shards.warmup(
                max_prefill_tokens=config.max_batch_prefill_tokens,
                max_batch_size=config.batch_rows,
                max_input_tokens=config.max_input_tokens,
                max_total_tokens=config.max_total_tokens,
                max_batch_total_tokens=config.max_batch_total_tokens,
            )
        state.go(State.STARTING, "loading the tokenizer")
        tokenizer = await load
        check_warmup(config, info, warmup)
        services = assemble(config, shards, tokenizer, info, warmup, workers, tracing, state)
        stack.push_async_callback(services.watch.close)
        stack.callback(tokenizer.close)
        yield services


def assemble(
    config: RouterConfig,
    shards: ShardedClient,
    tokenizer: Tokenizer,
    info: ShardInfo,
    warmup: WarmupResult,
    workers: TemplateWorkers,
    tracing: "TracedRequests | None" = None,
    state: ServerState | None = None,
) -> Services:
    """The services for shards that are warm."""
    limits = _limits(config, info, warmup)
    scheduler_limits = _scheduler_limits(config, info, warmup)
    for warning in _warnings(config, info, tokenizer):
        logger.warning(warning)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens, info.world_size)
    deadlines = _step_deadlines(config, info, warmup, scheduler_limits)
    connect: Reconnection | None = None
    if config.restart and isinstance(shards, ShardedClient):
        metrics.restarts.inc(config.num_restarts, process="router")
        connect = Reconnection(config, info, warmup)
    trace = None if tracing is None else tracing.begin_step
    note_restart = partial(metrics.restarts.inc, process="shard")
    watch = WatchedShards(shards, deadlines, connect, note_restart, trace)
    batcher = Batcher(watch, tokenizer, metrics, scheduler_limits, config.resume_streams)
    grammars = GrammarCompiler(watch, not config.disable_grammar_support, tokenizer.added_ids())
    infer = Infer(
        batcher,
        Validation(limits, tokenizer, metrics, grammars),
        metrics,
        max_concurrent_requests=config.max_concurrent_requests,
        max_queue_wait_s=config.max_queue_wait,
    )
    directory, name = Path(config.tokenizer_name), config.served_model_id
    with _start_errors():
        pooling = pooling_of(directory, config.pooling)
        reranker = find_reranker(directory, name, tokenizer, config.reranker)
    return Services(
        config=config,
        info=info,
        limits=limits,
        scheduler_limits=scheduler_limits,
        shards=shards,
        watch=watch,
        tokenizer=tokenizer,
        metrics=metrics,
        batcher=batcher,
        infer=infer,
        chat=_chat(config, infer, workers, tokenizer),
        templates=workers,
        large_bodies=Executor("large-bodies", 1, most_waiting=config.max_concurrent_requests),
        long_answers=MemoryBudget(_LONG_ANSWERS_BYTES),
        compute_type=f"{info.world_size}-{info.device_type}",
        loaded_at=int(time.time()),
        pooling=pooling,
        reranker=reranker,
        state=state or ServerState(),
        stall_s=deadlines.of(config.max_batch_prefill_tokens) + STALL_ROOM_S,
    )


def _chat(
    config: RouterConfig, infer: Infer, workers: TemplateWorkers, tokenizer: Tokenizer
) -> ChatService:
    template = workers.template
    tool_source = None if template is None else template.tool_source
    chat_format = detect_format(tool_source, config.chat_format)
    special_ids = tokenizer.special_ids(chat_format.special_tokens)
    return ChatService(infer, workers, chat_format, special_ids)


def _step_deadlines(
    config: RouterConfig, info: ShardInfo, warmup: WarmupResult, limits: SchedulerLimits
) -> StepDeadlines:
    is_on_gpu = info.device_type != "cpu"
    deadlines = StepDeadlines.measured(
        costs=limits.costs,
        num_rows=limits.max_batch_size,
        speculate=limits.speculate,
        longest=warmup.max_total_tokens,
        is_on_gpu=is_on_gpu,
    )
    if config.step_deadline is not None:
        expected_s = deadlines.work_s(config.max_batch_prefill_tokens)
        if config.step_deadline < expected_s:
            logger.warning(
                "--step-deadline %g is less than the %.1f s that a step with %d prompt tokens may "
                "take: it would end the server; raise it, or lower --max-batch-prefill-tokens",
                config.step_deadline,
                expected_s,
                config.max_batch_prefill_tokens,
            )
        deadlines = StepDeadlines(config.step_deadline)
    if info.world_size > 1:
        deadlines = deadlines.behind_ranks(warmup.rank_deadline_s or config.starting_deadline_s)
    return deadlines


def _limits(config: RouterConfig, info: ShardInfo, warmup: WarmupResult) -> Limits:
    return Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_input_tokens=warmup.max_input_tokens,
        max_total_tokens=warmup.max_total_tokens,
        vocab_size=info.vocab_size,
        is_deterministic=info.deterministic,
    )


def _scheduler_limits(
    config: RouterConfig, info: ShardInfo, warmup: WarmupResult
) -> SchedulerLimits:
    target_ms = config.inter_token_latency_target_ms
    return SchedulerLimits(
        num_blocks=warmup.num_blocks,
        block_size=info.block_size,
        max_batch_size=config.batch_rows,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_batch_total_tokens=warmup.num_blocks * info.block_size,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        recompute_at=info.recompute_at,
        prompt_scaled_at=info.prompt_scaled_at,
        shares_prefixes=not config.disable_prefix_caching,
        chunks_prompts=not config.disable_prefill_chunking,
        num_snapshots=warmup.num_snapshots if info.keeps_state else None,
        # A state can not be taken back behind wrong draft tokens.
        speculate=0 if info.keeps_state else config.speculate,
        runs_ahead=info.spares_core,
        costs=StepCosts(
            warmup.decode_step_ns,
            min(WARMUP_ROWS, config.batch_rows),
            warmup.prefill_token_ns,
            warmup.prefill_context_ns,
        ),
        target_ns=None if target_ms is None else target_ms * 1e6,
    )


def _warnings(config: RouterConfig, info: ShardInfo, tokenizer: Tokenizer) -> Iterator[str]:
    """The sentences about flags without effect, and about a tokenizer of another model."""
    defaults = RouterConfig(tokenizer_name=config.tokenizer_name)
    ratios = (defaults.waiting_served_ratio, LAUNCHER_WAITING_SERVED_RATIO)
    is_ratio_chosen = config.waiting_served_ratio not in ratios
    is_patience_chosen = config.max_waiting_tokens != defaults.max_waiting_tokens
    if not config.disable_prefill_chunking and (is_ratio_chosen or is_patience_chosen):
        yield (
            "--waiting-served-ratio and --max-waiting-tokens have no effect with prefill chunking, "
            "which pauses no request; turn it off with --disable-prefill-chunking"
        )
    if info.keeps_state and config.speculate:
        yield (
            f"--speculate {config.speculate} has no effect: this model keeps a state per request, "
            "which can not be taken back behind wrong draft tokens"
        )
    if tokenizer.vocab_size > info.vocab_size:
        # `Validation` refuses them.
        yield (
            f"The tokenizer has token ids up to {tokenizer.vocab_size - 1}, the model only up to "
            f"{info.vocab_size - 1}: prompts with others are refused; if there are many, this is "
            "the tokenizer of another model"
        )


def check_warmup(config: RouterConfig, info: ShardInfo, warmup: WarmupResult) -> None:
    """Raises StartError if the limits contradict each other or exceed the memory."""

    def check(is_good: bool, names: str, given: object) -> None:
        if not is_good:
            raise StartError(f"Argument validation error: {names}. Given: {given}")

    longest_input, longest = warmup.max_input_tokens, warmup.max_total_tokens
    for name, got in (("max_input_tokens", longest_input), ("max_total_tokens", longest)):
        asked = getattr(config, name)
        check(asked in (None, got), f"`{name}` must be <= {got} for this model", asked)
    names = "`max_input_tokens` must be < `max_total_tokens`"
    check(longest_input < longest, names, f"{longest_input} and {longest}")
    # A limit of the shards' choice may be smaller than a prefill; the user's limit must not.
    prefill, room = config.max_batch_prefill_tokens, config.max_batch_total_tokens
    names = "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`"
    check(room is None or prefill <= room, names, f"{prefill} and {room}")
    room = warmup.num_blocks * info.block_size
    names = "`max_total_tokens` must be <= `max_batch_total_tokens`"
    check(longest <= room, names, f"{longest} and {room}")


async def _load(config: RouterConfig, workers: TemplateWorkers) -> Tokenizer:
    """Loads the tokenizer, and starts the workers with the chat template, if the model has one.
    Raises StartError."""
    directory, path = Path(config.tokenizer_name), config.tokenizer_config_path
    with _start_errors():
        tokenizer = await asyncio.to_thread(Tokenizer.load, directory, config.validation_workers)
        file = None if path is None else Path(path)
        workers.begin(await asyncio.to_thread(ChatTemplate.load, directory, file))
    return tokenizer


@contextmanager
def _start_errors(action: str = "") -> Iterator[None]:
    """Turns a sentence for the user, or a failure of the shards during `action`, into a
    StartError."""
    try:
        yield
    except ValueError as error:
        raise StartError(str(error)) from error
    except (ConnectionError, GenerationError) as error:
        raise StartError(f"Unable to {action}: {error}") from error
