"""A shard's memory, and its first steps: they warm its kernels and measure the time of steps."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from text_generation_process.defaults import CONTEXT_UNIT, WARMUP_ROWS
from text_generation_process.sampling import NUMBERS, Sampling
from text_generation_proto import pb

from text_generation_shard.device.base import CacheShape, MemoryBudget
from text_generation_shard.device.reference.device import Device
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.planner import Costs
from text_generation_shard.engine.step import LOGPROB_ROWS, OUT_OF_MEMORY
from text_generation_shard.errors import ModelError
from text_generation_shard.models.registry import LanguageModel
from text_generation_shard.parallel import World

logger = logging.getLogger(__name__)

# Bytes are exchanged in MiB, which float32 holds exactly up to 2^24.
_MIB = 1 << 20
# Bytes per choice and vocabulary entry when sampling with all parameters: float32 and float64
# copies of the scores, and their order.
_SAMPLING_BYTES = 50
# The share of the cache's memory that snapshots of states get at most. A guess that leaves nearly
# all of it to blocks; a prompt stores two snapshots at most, and has many blocks.
_SNAPSHOT_SHARE = 1 / 8


def warm_up(engine: Engine, limits: pb.WarmupRequest) -> pb.WarmupResponse:
    """Allocate cache and rows, and time the first steps. Drops all requests.

    ModelError, with the numbers, if `limits` do not fit into memory.
    """
    engine.clear()
    model, device, world = engine.model, engine.device, engine.world
    shape = model.cache_shape
    budget = _memory_budget(engine, shape, limits)
    spare = device.num_spare_blocks * shape.block_bytes
    # All ranks use the number of blocks of the rank with the least memory.
    available = max(0, _least(world, budget.cache, device) - spare)
    state_bytes = model.state_bytes
    fitting = int(available * _SNAPSHOT_SHARE) // state_bytes if state_bytes else 0
    if limits.HasField("num_snapshots"):
        fitting = limits.num_snapshots
    available = max(0, available - fitting * state_bytes)
    num_blocks, max_total = cache_size(shape, limits, available, model.config.max_position)
    # A snapshot is of the state at the end of a block.
    num_snapshots = min(fitting, num_blocks)
    tokens, rows = limits.max_prefill_tokens, limits.max_batch_size
    engine.use_table(rows, max_total, num_blocks, tokens, num_snapshots)
    cache_bytes = _allocate(engine, shape, num_blocks)
    measured = measure(engine, tokens, rows, max_total)
    # Decisions depend on costs, and must be the same on all ranks.
    costs = Costs(*world.broadcast(np.array(measured)).tolist())
    engine.set_costs(costs)
    blocks = f"{num_blocks} blocks of {shape.block_size} tokens in {shape.dtype_name}"
    snapshots = f"{num_snapshots} snapshots; those of rows are activations"
    for name, size, note in (
        ("weights", engine.weights_bytes, ""),
        ("KV cache", cache_bytes, blocks),
        *([("states", num_snapshots * state_bytes, snapshots)] if state_bytes else []),
        ("activations", budget.step, f"{tokens} prompt tokens beside {rows} rows"),
        ("graphs", budget.graphs, ""),
    ):
        logger.info("%s", f"memory: {name:<12}{size / 1e9:8.3f} GB  {note}".rstrip())
    return pb.WarmupResponse(
        num_blocks=num_blocks,
        max_input_tokens=limits.max_input_tokens or max_total - 1,
        max_total_tokens=max_total,
        kv_cache_bytes=cache_bytes,
        weights_bytes=engine.weights_bytes,
        decode_step_ns=costs.full_ns,
        prefill_token_ns=costs.token_ns,
        # With sliding windows the cost stops growing with the context.
        prefill_context_ns=0 if model.has_windows else costs.context_ns,
        num_snapshots=num_snapshots,
    )


def _least(world: World, nbytes: int, device: Device) -> int:
    """The least `nbytes` of all ranks, rounded down to MiB with several ranks."""
    if world.size == 1:
        return nbytes
    own = torch.tensor([nbytes // _MIB], dtype=torch.float32, device=device.torch_device)
    return int(world.all_gather(own).min()) * _MIB


def _allocate(engine: Engine, shape: CacheShape, num_blocks: int) -> int:
    """Allocate a cache of `num_blocks` and the device's spare ones; returns its bytes."""
    return engine.model.attention.allocate(shape, num_blocks + engine.device.num_spare_blocks)


def _memory_budget(engine: Engine, shape: CacheShape, limits: pb.WarmupRequest) -> MemoryBudget:
    """The memory for the KV cache, and for the largest step beside it."""
    model, attention = engine.model, engine.model.attention
    rows, tokens = limits.max_batch_size, limits.max_prefill_tokens
    state_bytes = model.state_bytes

    def run_largest() -> None:
        # Of one request: the size of the cache is not known yet.
        longest = limits.max_total_tokens or model.config.max_position
        longest = max(2, min(longest, limits.max_batch_total_tokens or longest))
        try:
            # All rows share one block.
            _allocate(engine, shape, 1)
            found = largest_steps(rows, tokens, longest, attention.heaviest_keys)
            # The longest context last: the device measures the graphs for such rows.
            for largest in reversed(found):
                engine.use_table(rows, largest.context, 1, tokens)
                profile_memory(engine, largest)
            if state_bytes:
                engine.model.make_states(0, 0)  # they are a part of the largest step
        except OUT_OF_MEMORY as error:
            raise ModelError(
                f"Not enough memory to handle {tokens} prefill tokens beside {rows} requests. "
                "You need to decrease `--max-batch-prefill-tokens` or `--max-batch-size`"
            ) from error

    workspace = attention.workspace_bytes(shape) + rows * state_bytes
    estimate = activation_bytes(model, engine.device.dtype, limits) + workspace
    return engine.device.free_bytes(estimate, run_largest)


def activation_bytes(model: LanguageModel, dtype: torch.dtype, limits: pb.WarmupRequest) -> int:
    """Estimated bytes of the largest step in `dtype`, for a device that does not profile it: the
    full prefill budget beside all decoding rows, then sampling for all with all parameters."""
    tokens = limits.max_prefill_tokens + limits.max_batch_size
    passing = tokens * model.widest * dtype.itemsize
    # Prompt log-probabilities hold the scores of some tokens twice during the pass.
    prompts = 2 * LOGPROB_ROWS * model.config.vocab_size * 4
    return max(passing + prompts, _SAMPLING_BYTES * limits.max_batch_size * model.config.vocab_size)


def cache_size(
    shape: CacheShape, limits: pb.WarmupRequest, available: int, max_position: int
) -> tuple[int, int]:
    """Number of blocks and longest request; ModelError with the numbers if they do not fit."""
    fitting = available // shape.block_bytes
    wanted = limits.max_batch_total_tokens
    if wanted:
        num_blocks = wanted // shape.block_size
        if num_blocks > fitting:
            raise ModelError(
                f"--max-batch-total-tokens {wanted} needs "
                f"{num_blocks * shape.block_bytes / 1e9:.1f} GB of KV cache, but there is room for "
                f"{fitting * shape.block_size} tokens; decrease it"
            )
    else:
        # No more than all rows at their longest can use.
        longest = limits.max_total_tokens or max_position
        rows = limits.max_batch_size * -(-longest // shape.block_size)
        num_blocks = min(fitting, rows)
    tokens = num_blocks * shape.block_size
    if limits.max_total_tokens == 1:
        raise ModelError("--max-total-tokens must be at least 2: a prompt token and a new one")
    max_total = limits.max_total_tokens or min(max_position, tokens)
    if max_total > tokens or tokens < 2:
        raise ModelError(
            f"Not enough memory to handle `max_total_tokens={max(max_total, 2)}`: the KV cache has "
            f"room for {tokens} tokens; decrease it or `--max-batch-size`, or give the server more "
            "memory"
        )
    return num_blocks, max_total


# Known tokens of a row of the measured full batch.
_CONTEXT = 128
# Tokens of the measured prompt.
_PROMPT = 64
# Preceding tokens of the measured chunk.
_FRONT = 2048
# Measured steps of each kind; the fastest counts. A device that records graphs does so after a few
# steps of a kind, and only later steps are as fast as in service.
_TRIES, _TRIES_RECORDED = 2, 6
# A step of at least this time is measured once: repeating it would delay the start, and a short
# disturbance hardly changes it.
_LONG_NS = 150_000_000
# Alternatives of a token, as many as a router allows by default.
_TOP_TOKENS = 5
# No sampling parameter in use, and all of them.
_NUMBERS: dict[str, Any] = {name: number.example for name, number in NUMBERS.items()}
_PLAIN = pb.NextTokenChooserParameters(**Sampling().to_wire())
_EVERYTHING = pb.NextTokenChooserParameters(
    **Sampling(**_NUMBERS, do_sample=True, watermark=True, logit_bias=((0, 1.0),)).to_wire()
)


class LargestStep(NamedTuple):
    """A step of the largest size: `num_tokens` of inputs, each at the end of its context, beside
    rows that decode at the end of theirs."""

    num_rows: int
    # Rows with inputs among them.
    num_prompts: int
    num_tokens: int
    # Tokens of each row.
    context: int


def largest_steps(
    num_rows: int, num_tokens: int, longest: int, heaviest_keys: int | None
) -> list[LargestStep]:
    """Candidates for the step that takes the most memory: one with the longest contexts and, if
    attention takes most at `heaviest_keys` prompt tokens, one with about that many."""
    least = min(num_rows, -(-num_tokens // max(1, longest - 2)))
    found = [LargestStep(num_rows, least, num_tokens, longest)]
    if heaviest_keys is not None:
        num_prompts = min(num_rows, max(least, -(-heaviest_keys // longest)))
        context = max(2, min(longest, heaviest_keys // num_prompts))
        found.append(LargestStep(num_rows, num_prompts, num_tokens, context))
    return [step for index, step in enumerate(found) if step not in found[:index]]


def profile_memory(engine: Engine, largest: LargestStep) -> None:
    """Run three steps, each behind the other if the device can: rows decode; the largest step; all
    rows decode. All sampling parameters and prompt log-probabilities are in use.

    All rows share the first block, so the results are meaningless. Grammars are not profiled:
    their masks are freed before penalties take more memory.
    """
    num_rows, num_prompts, num_tokens, context = largest
    share, more = divmod(num_tokens, num_prompts)
    prompts = [
        _demanding(engine, number, share + (number < more), context, 2)
        for number in range(num_prompts)
    ]
    others = range(num_prompts, num_rows)
    handles = []
    if others:
        first = [_demanding(engine, number, 1, context, 3) for number in others]
        for request in first:
            request.prefill_logprobs = False
        handles.append(engine.launch(pb.Step(request_ids=others), first))
    # They have ended if the context holds no more of their tokens.
    others = others if context > 2 else range(0)
    ids, counts = [*others, *range(num_prompts)], [1] * len(others) + _counts(prompts)
    handles.append(engine.launch(pb.Step(request_ids=ids, counts=counts), prompts))
    if context > 2:
        ids = ids if context > 3 else [*range(num_prompts)]
        handles.append(engine.launch(pb.Step(request_ids=ids)))
    for handle in handles:
        handle.result()
    engine.clear()


def measure(engine: Engine, max_prefill_tokens: int, max_rows: int, max_total: int) -> Costs:
    """Run each kind of step once to warm it, then again to measure it.

    All rows share the first blocks, so the results are meaningless.
    """
    length = max(1, min(_PROMPT, max_prefill_tokens, max_total - 1 - _TRIES))
    new = min(1 + _TRIES, max_total - length)
    request = _request(engine, 0, length, 0, new)
    # Compiles all sampling kernels before the first request.
    everything = _request(engine, 0, length, 0, new, _EVERYTHING)
    everything.stopping_parameters.min_new_tokens = 1
    _steps(engine, [everything])
    prompt, others = _fastest(engine, request)
    single = others or prompt
    token = max(1, (prompt - single) // max(1, length - 1))
    in_front = _time_in_front(engine, length, max_total, prompt)
    tries = _TRIES_RECORDED if engine.runner.records_steps else _TRIES
    context = max(1, min(_CONTEXT, max_total - 1 - tries))
    new = min(1 + tries, max_total - context)
    rows = min(max_rows, WARMUP_ROWS)
    # The first step only warms if there are more.
    first, later = _steps(
        engine, [_request(engine, row, context, context - 1, new) for row in range(rows)]
    )
    full = later or first
    # With prompts of one or two tokens the difference is noise: a token costs at most a step.
    costs = Costs(single, full, min(token, full), in_front)
    logger.info(
        "a step of one request takes %.2f ms, of %d %.2f ms, a prompt token adds %.3f ms, and %.3f "
        "ms for %d preceding tokens",
        costs.single_ns / 1e6,
        rows,
        costs.full_ns / 1e6,
        costs.token_ns / 1e6,
        costs.context_ns / 1e6,
        CONTEXT_UNIT,
    )
    return costs


def _time_in_front(engine: Engine, length: int, max_total: int, prompt_ns: int) -> int:
    """What CONTEXT_UNIT preceding tokens add to each of `length` prompt tokens, which take
    `prompt_ns` alone."""
    front = min(_FRONT, max_total - length)
    if front < length:
        return 0  # the difference would be noise
    behind_ns, _ = _fastest(engine, _request(engine, 0, front + length, front, 0))
    return max(0, behind_ns - prompt_ns) * CONTEXT_UNIT // (front * length)


def _fastest(engine: Engine, request: pb.Request) -> tuple[int, int]:
    """The best result of `_steps` after a warming run, or of that run if it is long."""
    tries = [_steps(engine, [request])]
    # Not if the first run may have compiled, nor with several ranks, which must compute the same
    # steps but have their own clocks.
    may_be_enough = not engine.runner.compiles_steps and engine.world.size == 1
    while len(tries) <= _TRIES and not (may_be_enough and tries[-1][0] >= _LONG_NS):
        tries.append(_steps(engine, [request]))
    first, others = zip(*(tries[1:] or tries), strict=True)
    return min(first), min(others)


def _steps(engine: Engine, requests: Sequence[pb.Request]) -> tuple[int, int]:
    """Time of the first step of these requests, and of the fastest later one; 0: none."""
    ids = [request.id for request in requests]
    last = first = engine.step(pb.Step(request_ids=ids, counts=_counts(requests)), requests)
    others: list[int] = []
    # Rows end early if a damaged checkpoint yields no finite scores.
    most = requests[0].stopping_parameters.max_new_tokens - 1
    while last.batch.request_ids and len(others) < most:
        last = engine.step(pb.Step(request_ids=last.batch.request_ids))
        others.append(last.total_ns)
    engine.clear()
    return first.total_ns, min(others, default=0)


def _counts(requests: Sequence[pb.Request]) -> list[int]:
    """Of a step that computes all their inputs."""
    return [len(request.input_ids) - request.num_cached_tokens for request in requests]


def _demanding(engine: Engine, number: int, count: int, context: int, most_new: int) -> pb.Request:
    """A request with `count` input tokens left to compute; with up to `most_new` new tokens it
    fills the context. All its blocks are the first one."""
    new = min(most_new, context - 1)
    known = context - new
    request = _request(engine, number, known, max(0, known - count), new, _EVERYTHING)
    request.block_table[:] = [0] * len(request.block_table)
    request.stopping_parameters.min_new_tokens = new
    request.prefill_logprobs, request.top_n_tokens = True, _TOP_TOKENS
    return request


def _request(
    engine: Engine,
    number: int,
    known: int,
    cached: int,
    new: int,
    parameters: pb.NextTokenChooserParameters = _PLAIN,
) -> pb.Request:
    return pb.Request(
        id=number,
        input_ids=bytes(known),
        num_prompt_tokens=known,
        num_cached_tokens=cached,
        block_table=range(-(-(known + new) // engine.block_size)),
        parameters=parameters,
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=new, ignore_eos_token=True
        ),
    )
