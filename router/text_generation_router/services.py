"""Everything the routes work with, and the order in which it comes up."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from text_generation_router.callers import ANYBODY, Caller
from text_generation_router.chat.format import detect_format
from text_generation_router.chat.service import ChatService
from text_generation_router.chat.template import ChatTemplate
from text_generation_router.chat.workers import TemplateWorkers
from text_generation_router.client.shards import ShardedClient
from text_generation_router.client.translate import ShardInfo, WarmupResult
from text_generation_router.config import RouterConfig
from text_generation_router.errors import GenerationError
from text_generation_router.grammar import GrammarCompiler
from text_generation_router.infer import Infer
from text_generation_router.lane import Lane, Room
from text_generation_router.metrics import Metrics
from text_generation_router.pooling import pooling_of
from text_generation_router.request import Pooling
from text_generation_router.reranker import Reranker, find_reranker
from text_generation_router.scheduler.batcher import Batcher, SchedulerLimits
from text_generation_router.scheduler.chunked_prefill import DEFAULT_STRETCH, StepCosts
from text_generation_router.scheduler.shards import Shards
from text_generation_router.scheduler.watch import (
    NUM_QUESTIONS,
    NUM_QUESTIONS_TO_SEVERAL,
    WatchedShards,
    longest_call_s,
)
from text_generation_router.tokenizer import Tokenizer
from text_generation_router.validation import Limits, Validation

# Of which `WarmupResponse.decode_step_ns` is measured, or of as many as there are.
WARMUP_ROWS = 32
# What the launcher passes on where nobody has chosen a --waiting-served-ratio.
LAUNCHERS_RATIO = 0.3
_POLL_S = 0.02
# What long answers of /tokenize and /chat_tokenize hold in all until their clients have read them.
_LONG_ANSWERS_BYTES = 64 * 1024 * 1024

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The router can not serve; one sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class Services:
    """The objects of one running router."""

    config: RouterConfig
    info: ShardInfo
    limits: Limits
    scheduler_limits: SchedulerLimits
    shards: Shards
    watch: WatchedShards
    tokenizer: Tokenizer
    metrics: Metrics
    batcher: Batcher
    infer: Infer
    grammars: GrammarCompiler
    chat: ChatService
    templates: TemplateWorkers
    # Of several threads one that waits for the interpreter could wait for each of the others.
    large_bodies: Lane
    long_answers: Room
    # In seconds since 1970.
    loaded_at: int
    # Of /v1/embeddings.
    pooling: Pooling
    # Of /score and /rerank, or why there is none.
    reranker: Reranker | str

    @property
    def compute_type(self) -> str:
        """`<shards>-<device>`, sent with every answer."""
        return f"{self.info.world_size}-{self.info.device_type}"

    def on_behalf_of(self, caller: Caller) -> "Services":
        """The same services, whose generations are this caller's."""
        if caller is ANYBODY:
            return self
        infer = self.infer.on_behalf_of(caller)
        return replace(self, infer=infer, chat=self.chat.over(infer))


@asynccontextmanager
async def start(config: RouterConfig) -> AsyncIterator[Services]:
    """Connects, warms the shards up and checks that everything fits. Raises StartError.

    The connections to the shards are closed at the end of the block, and the processes that render
    chat templates.
    """
    # The tokenizer is read while the shards warm up, and the first of those processes started.
    workers = TemplateWorkers()
    load = asyncio.create_task(_load(config, workers))
    try:
        while config.await_shards and not os.path.exists(config.master_shard_uds_path):
            if load.done():
                await load  # if it has failed, nobody needs to wait
            await asyncio.sleep(_POLL_S)
        with _explained("connect to the Python model shards"):
            shards = await ShardedClient.connect(
                config.master_shard_uds_path, answer_s=config.step_deadline
            )
        try:
            with _explained("clear the Python model shards cache"):
                await shards.clear_cache(None)
            with _explained("get the Python model shards info"):
                info = await shards.info()
            with _explained("warmup the Python model shards"):
                warmup = await _warm_up(shards, config)
            tokenizer = await load
            check_tokenizer(tokenizer, info)
            check_warmup(config, info, warmup)
            try:
                yield assemble(config, shards, tokenizer, info, warmup, workers)
            finally:
                tokenizer.close()
        finally:
            await shards.close()
    finally:
        load.cancel()
        workers.close()


def assemble(
    config: RouterConfig,
    shards: Shards,
    tokenizer: Tokenizer,
    info: ShardInfo,
    warmup: WarmupResult,
    workers: TemplateWorkers,
) -> Services:
    """The services on top of shards that are warm."""
    limits = Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_input_tokens=warmup.max_input_tokens,
        max_total_tokens=warmup.max_total_tokens,
        vocab_size=info.vocab_size,
        is_deterministic=info.deterministic,
    )
    scheduler_limits = _scheduler_limits(config, info, warmup)
    _warn_of_no_effect(config)
    _tell_pace(config, scheduler_limits.costs)
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens, info.world_size)
    watch = WatchedShards(
        shards,
        longest_call_s(scheduler_limits.costs, config.batch_rows, config.max_batch_prefill_tokens),
        NUM_QUESTIONS if info.world_size == 1 else NUM_QUESTIONS_TO_SEVERAL,
    )
    batcher = Batcher(watch, tokenizer, metrics, scheduler_limits)
    grammars = GrammarCompiler(shards, not config.disable_grammar_support)
    validation = Validation(limits, tokenizer, metrics, grammars)
    infer = Infer(batcher, validation, metrics, config.max_concurrent_requests)
    chat = _chat_service(config, tokenizer, infer, workers)
    return Services(
        config,
        info,
        limits,
        scheduler_limits,
        shards,
        watch,
        tokenizer,
        metrics,
        batcher,
        infer,
        grammars,
        chat,
        workers,
        Lane("large-bodies", 1, most_waiting=config.max_concurrent_requests),
        Room(_LONG_ANSWERS_BYTES),
        int(time.time()),
        *_readers(config, tokenizer),
    )


def _readers(config: RouterConfig, tokenizer: Tokenizer) -> tuple[Pooling, Reranker | str]:
    """What the model's folder and the flags say of embeddings and of reranking."""
    directory, name = Path(config.tokenizer_name), config.served_model_id
    try:
        pooling = pooling_of(directory, config.pooling)
        return pooling, find_reranker(directory, name, tokenizer, config.reranker)
    except ValueError as error:
        raise StartError(str(error)) from error


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
        speculate=config.speculate,
        runs_ahead=info.spares_core,
        costs=StepCosts(
            warmup.decode_step_ns,
            min(WARMUP_ROWS, config.batch_rows),
            warmup.prefill_token_ns,
            warmup.prefill_context_ns,
        ),
        target_ns=None if target_ms is None else target_ms * 1e6,
    )


def _tell_pace(config: RouterConfig, costs: StepCosts) -> None:
    """Says how prompts are cut, where they are."""
    if config.disable_prefill_chunking or not costs.decode_step_ns:
        return
    target_ms = config.inter_token_latency_target_ms
    if target_ms is None:
        target_ms = round(costs.decode_step_ns * DEFAULT_STRETCH / 1e6)
    logger.info(
        "A step of %d decoding requests takes %.1f ms, and a prompt token %.3f ms more: while "
        "others decode, prompts are computed in parts that make a step take about %d ms",
        costs.num_rows,
        costs.decode_step_ns / 1e6,
        costs.prefill_token_ns / 1e6,
        target_ms,
    )


def _warn_of_no_effect(config: RouterConfig) -> None:
    """Says so where somebody has chosen what does nothing."""
    defaults = RouterConfig(tokenizer_name=config.tokenizer_name)
    ratios = (defaults.waiting_served_ratio, LAUNCHERS_RATIO)
    is_ratio_chosen = config.waiting_served_ratio not in ratios
    is_patience_chosen = config.max_waiting_tokens != defaults.max_waiting_tokens
    if not config.disable_prefill_chunking and (is_ratio_chosen or is_patience_chosen):
        logger.warning(
            "--waiting-served-ratio and --max-waiting-tokens have no effect: prefill chunking is "
            "on, so that nobody is paused; turn it off with --disable-prefill-chunking"
        )


def check_tokenizer(tokenizer: Tokenizer, info: ShardInfo) -> None:
    """Raises StartError if the tokenizer makes ids that the model does not have."""
    if tokenizer.vocab_size > info.vocab_size:
        raise StartError(
            f"The tokenizer makes token ids up to {tokenizer.vocab_size - 1}, but the model has "
            f"only {info.vocab_size}; serve the model with the tokenizer it was trained with"
        )


def check_warmup(config: RouterConfig, info: ShardInfo, warmup: WarmupResult) -> None:
    """Raises StartError if the limits contradict each other or the memory there is."""
    for name in ("max_input_tokens", "max_total_tokens"):
        asked, got = getattr(config, name), getattr(warmup, name)
        if asked is not None and asked != got:
            raise _argument_error(f"`{name}` must be <= {got} for this model. Given: {asked}")
    if warmup.max_input_tokens >= warmup.max_total_tokens:
        raise _argument_error(
            "`max_input_tokens` must be < `max_total_tokens`. "
            f"Given: {warmup.max_input_tokens} and {warmup.max_total_tokens}"
        )
    # Room that the shards chose is filled as far as it goes; room that the user chose must do.
    room = config.max_batch_total_tokens
    if room is not None and config.max_batch_prefill_tokens > room:
        raise _argument_error(
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {config.max_batch_prefill_tokens} and {room}"
        )
    room = warmup.num_blocks * info.block_size
    if warmup.max_total_tokens > room:
        raise _argument_error(
            "`max_total_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {warmup.max_total_tokens} and {room}"
        )


def _chat_service(
    config: RouterConfig, tokenizer: Tokenizer, infer: Infer, workers: TemplateWorkers
) -> ChatService:
    template = workers.template
    chat_format = detect_format(
        None if template is None else template.tool_source, config.chat_format
    )
    special_ids = tokenizer.special_ids(chat_format.special_tokens)
    return ChatService(infer, workers, chat_format, special_ids)


async def _load(config: RouterConfig, workers: TemplateWorkers) -> Tokenizer:
    """The tokenizer; the workers begin with the chat template. Raises StartError."""
    tokenizer = await asyncio.to_thread(_load_tokenizer, config)
    workers.begin(await asyncio.to_thread(load_template, config, tokenizer))
    return tokenizer


def load_template(config: RouterConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, None if it has none. Raises StartError."""
    path = config.tokenizer_config_path
    try:
        return ChatTemplate.load(
            Path(config.tokenizer_name),
            None if path is None else Path(path),
            tokenizer.bos_token,
            tokenizer.eos_token,
        )
    except ValueError as error:
        raise StartError(str(error)) from error


def _load_tokenizer(config: RouterConfig) -> Tokenizer:
    try:
        return Tokenizer.load(Path(config.tokenizer_name), config.validation_workers)
    except ValueError as error:
        raise StartError(str(error)) from error


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Says what the router was about to do when a shard failed."""
    try:
        yield
    except (ConnectionError, GenerationError) as error:
        raise StartError(f"Unable to {action}: {error}") from error


async def _warm_up(shards: ShardedClient, config: RouterConfig) -> WarmupResult:
    return await shards.warmup(
        max_prefill_tokens=config.max_batch_prefill_tokens,
        max_batch_size=config.batch_rows,
        max_input_tokens=config.max_input_tokens,
        max_total_tokens=config.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
    )


def _argument_error(sentence: str) -> StartError:
    return StartError(f"Argument validation error: {sentence}")
