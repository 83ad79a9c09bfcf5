"""One owner of rows, cache and model: everything that happens on the device begins here.

All methods but the constructor and `stop` are called from one thread, one at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np

from text_generation_shard.device.base import Device, Launched, Room, ScheduledTokens
from text_generation_shard.device.forward import CacheShape
from text_generation_shard.engine import memory, out_of_memory, ranks
from text_generation_shard.engine.forward_batch import BatchBuilder
from text_generation_shard.engine.ngram import Guesser
from text_generation_shard.engine.out_of_memory import NotLaunched, unless_short
from text_generation_shard.engine.output import Part, verify
from text_generation_shard.engine.plan import Fixed, Plan
from text_generation_shard.engine.planner import Planner
from text_generation_shard.engine.readings import deliver
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.step import (
    NewRequest,
    StepInput,
    StepOutput,
    WarmupLimits,
    WarmupResult,
)
from text_generation_shard.engine.step_handle import StepHandle
from text_generation_shard.engine.warmup import Costs, largest_steps, measure, rehearse
from text_generation_shard.errors import BatchError, ModelError
from text_generation_shard.grammars.masks import GrammarMasks
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.parallel import World
from text_generation_shard.sampling.table import Watermark

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Engine:
    """Owns the row table and the steps that are under way."""

    def __init__(
        self,
        device: Device,
        model: LlamaModel,
        weights_bytes: int,
        watermark: Watermark,
        world: World | None = None,
    ) -> None:
        """A loaded model on its device."""
        self.device, self.model = device, model
        self.world = world or World()
        self._weights_bytes, self._watermark = weights_bytes, watermark
        self._end_ids = frozenset(model.config.eos_token_ids)
        self._masks = GrammarMasks(model.config.vocab_size, device.torch_device)
        self._is_stopping = threading.Event()
        self._runner = device.runner(model)
        self._max_prefill_tokens = 1
        self._costs = Costs(1, 1, 1, 0)
        # Whether a step for which there is no memory is computed in parts: not while its memory is
        # measured, and not where other ranks would compute other parts.
        self._splits = False
        # Launched and not collected, oldest first: one, or two where the device runs behind.
        self._under_way: deque[StepHandle] = deque()
        # When the step that was collected last was computed.
        self._last_done_ns = 0
        self._use_table(0, 0, 0)

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""
        return self.model.attention.block_size

    @property
    def is_deterministic(self) -> bool:
        """Whether a request's tokens are the same, bit for bit, in whatever batch, however its
        prompt was cut and whatever was cached."""
        return self.device.is_deterministic and self.model.attention.is_deterministic

    @property
    def records_steps(self) -> bool:
        """See Runner."""
        return self._runner.records_steps

    @property
    def runs_behind(self) -> bool:
        """Whether a step may be launched before the previous one has a result. Not with several
        ranks: whether the previous one was collected when a step arrives is a matter of time, and
        another one on each."""
        return self.device.runs_behind and self.world.size == 1

    @property
    def num_rows_taken(self) -> int:
        """Rows in use; 0 when nothing runs."""
        return self._table.num_taken

    def _use_table(self, capacity: int, max_total_tokens: int, num_blocks: int) -> None:
        model = self.model
        self._table = table = RowTable(capacity, max_total_tokens, self.block_size, num_blocks)
        self._fixed = Fixed(
            model=model,
            table=table,
            builder=BatchBuilder(table, self.device.upload, model.length_rule),
            end_ids=np.array(model.config.eos_token_ids, dtype=np.int64),
            watermark=self._watermark,
            follows_grammars=self.world.rank == 0,
            is_stopping=self._is_stopping,
        )
        self._planner = Planner(
            *(self._fixed, Guesser(capacity, self.world.broadcast), self._masks),
            *(self._max_prefill_tokens, self._costs),
        )

    def warmup(self, limits: WarmupLimits) -> WarmupResult:
        """Allocate cache and rows, run first passes. Forgets everything that ran before.

        ModelError names the numbers when what is asked for does not fit.
        """
        self.clear()
        self._splits = False
        self._max_prefill_tokens = limits.max_prefill_tokens
        config = self.model.config
        sizes = config.num_layers, self.model.num_kv_heads, config.head_dim
        shape = CacheShape(*sizes, self.block_size, self.device.cache_dtype)
        room = self._room(shape, limits)
        spare = self.device.num_spare_blocks * shape.block_bytes
        # The same number of blocks on all ranks: that of the rank with least room.
        cache = max(0, ranks.least(self.world, room.cache, self.device) - spare)
        num_blocks, max_total = memory.cache_size(shape, limits, cache, config.max_position)
        self._use_table(limits.max_batch_size, max_total, num_blocks)
        cache_bytes = self._allocate(shape, num_blocks)
        costs = measure(self, limits.max_prefill_tokens, limits.max_batch_size, max_total)
        # Decisions that depend on costs must be the same on all ranks.
        self._costs = Costs(*self.world.broadcast(np.array(costs)).tolist())
        self._planner.costs = self._costs
        self._splits = self.world.size == 1
        ledger = memory.Ledger(
            self._weights_bytes,
            cache_bytes,
            f"{num_blocks} blocks of {shape.block_size} tokens in {shape.dtype_name}",
            room.step,
            f"{limits.max_prefill_tokens} prompt tokens beside {limits.max_batch_size} rows",
            *(room.graphs, room.graphs_note),
            self.device.left_bytes(cache_bytes, room),
        )
        for line in ledger.lines():
            logger.info("%s", line)
        return WarmupResult(
            num_blocks=num_blocks,
            max_input_tokens=limits.max_input_tokens or max_total - 1,
            max_total_tokens=max_total,
            kv_cache_bytes=cache_bytes,
            weights_bytes=self._weights_bytes,
            decode_step_ns=self._costs.full_ns,
            prefill_token_ns=self._costs.token_ns,
            # Where there are windows, the price does not go on growing as it begins.
            prefill_context_ns=0 if any(config.layer_windows) else self._costs.context_ns,
        )

    def _allocate(self, shape: CacheShape, num_blocks: int) -> int:
        """The cache for requests of `num_blocks`; its bytes."""
        return self.model.attention.allocate(shape, num_blocks + self.device.num_spare_blocks)

    def _room(self, shape: CacheShape, limits: WarmupLimits) -> Room:
        """What the KV cache may take, and what the largest step takes beside it."""
        config, attention = self.model.config, self.model.attention
        rows, tokens = limits.max_batch_size, limits.max_prefill_tokens

        def run_largest() -> None:
            longest = memory.longest_context(limits, config.max_position)
            try:
                # All rows share one block.
                self._allocate(shape, 1)
                found = largest_steps(rows, tokens, longest, attention.heaviest_keys)
                # The longest context last: the device measures what it records for such rows.
                for largest in reversed(found):
                    self._use_table(rows, largest.context, 1)
                    rehearse(self, largest)
            except out_of_memory.OUT_OF_MEMORY as error:
                raise ModelError(
                    f"Not enough memory to handle {tokens} prefill tokens beside {rows} requests. "
                    "You need to decrease `--max-batch-prefill-tokens` or `--max-batch-size`"
                ) from error

        workspace = attention.workspace_bytes(shape)
        estimate = memory.activation_bytes(config, self.device.dtype, limits) + workspace
        return self.device.free_bytes(estimate, run_largest)

    def step(self, step: StepInput) -> StepOutput:
        """Compute a step. If it fails: see StepHandle."""
        return self.launch(step).result()

    def launch(self, step: StepInput) -> StepHandle:
        """Begin with a step. The previous one is collected first, unless the device runs behind
        and nothing of this step depends on the tokens of that one.

        BatchError if the step makes no sense: nothing has changed then, but for grown tables.
        """
        began = time.perf_counter_ns()
        self.make_way(step)
        before = self._under_way[0].plan.samples if self._under_way else None
        if step.new_requests:
            self._check_vocabulary(step.new_requests)
        running = self._planner.running(step, before)
        rows: list[int] = []
        taking = time.perf_counter_ns()
        try:
            for request in step.new_requests:
                rows.append(self._table.take(request))
            admitted = time.perf_counter_ns()
            plan = self._planner.plan(running, step.new_requests, rows, before)
            launched = self._unless_short(partial(self._runner.launch, plan))
        except BaseException:
            self._table.release(rows)
            raise
        self._table.advance(plan.computed)
        handle = StepHandle(self, plan, launched or NotLaunched(), began, admitted - taking)
        self._under_way.append(handle)
        if launched is None:
            self.collect(handle)
        return handle

    def _unless_short(self, compute: Callable[[], _T]) -> _T | None:
        """What `compute` answers; None if there was no memory for it."""
        return unless_short(compute) if self._splits else compute()

    def make_way(self, step: StepInput) -> None:
        """Collect the steps that are under way and that this one can not run behind."""
        may_run_behind = (
            self.runs_behind
            and self._planner.may_run_behind(step)
            # How many tokens a row has behind guesses, its tokens tell.
            and all(other.plan.samples.is_single for other in self._under_way)
        )
        while len(self._under_way) > may_run_behind:
            self.collect(self._under_way[0])

    def _check_vocabulary(self, requests: Sequence[NewRequest]) -> None:
        size = self.model.config.vocab_size
        largest = max(
            max(max(item.input_ids, default=0), max(item.score_token_ids, default=0))
            for item in requests
        )
        if largest >= size:
            raise BatchError(f"token id {largest} is not below {size}, the vocabulary")

    def collect(self, handle: StepHandle) -> None:
        """Give a step its outcome, and those before it."""
        while handle.outcome is None:
            oldest = self._under_way.popleft()
            try:
                oldest.outcome = self._unless_short(partial(self._finish, oldest))
            except BaseException as error:
                self._lose(oldest, error)
            if oldest.outcome is None:
                self._compute_anew(oldest)
            elif self._under_way:
                self._follow(self._under_way[0])

    def _follow(self, handle: StepHandle) -> None:
        """Go on with a step, now that the one it was launched behind is collected."""
        plan, table = handle.plan, self._table
        try:
            self._planner.start_grammars(plan)
            if not table.driven.isdisjoint(plan.sampled_rows.tolist()):
                # A token was replaced that the device has taken for an input: all once more.
                plan.catch_up()
                table.rewind(plan.computed)
                handle.launched = NotLaunched()
                launched = self._unless_short(partial(self._runner.launch, plan))
                handle.launched = launched or handle.launched
                table.advance(plan.computed)
        except BaseException as error:
            self._under_way.popleft()
            self._lose(handle, error)

    def _compute_anew(self, short: StepHandle) -> None:
        """Give an outcome to a step for which there was no memory, and to those behind it."""
        self._undo(short)
        self.device.release_memory()
        step, failed = short, set[int]()
        while True:
            try:
                step.outcome = self._finish_in_parts(step, failed)
            except BaseException as error:
                self._lose(step, error)
            if not self._under_way:
                return
            step = self._under_way.popleft()

    def _lose(self, failed: StepHandle, error: BaseException) -> None:
        """End a step, and those behind it, with an error."""
        steps = self._undo(failed)
        self._under_way.clear()
        for handle in reversed(steps):
            self._table.release(handle.plan.new_rows)
            handle.outcome = error

    def _undo(self, failed: StepHandle) -> list[StepHandle]:
        """Set rows back to where they were before a step. Answers it and those launched behind it,
        of which nothing is held then: their inputs were never chosen."""
        steps = [failed, *self._under_way]
        for handle in steps[1:]:
            with suppress(Exception):
                unless_short(handle.launched.result)
        for handle in reversed(steps):
            handle.launched, plan = NotLaunched(), handle.plan
            self._table.rewind(out_of_memory.without(plan.computed, plan.ended_rows()))
        return steps

    def _finish(self, handle: StepHandle) -> StepOutput:
        """The output of a step that was computed."""
        launched, handle.launched = handle.launched, NotLaunched()
        part = self._computed(handle.plan, launched)
        return self._complete(self._write(part), handle, part.done_ns)

    def _finish_in_parts(self, handle: StepHandle, failed: set[int]) -> StepOutput:
        """The output of a step which is computed in parts, without the rows `failed`; those that do
        not fit alone join them. Nothing is written before all parts are computed."""
        plan, table = handle.plan, self._table

        def compute(scheduled: ScheduledTokens) -> Part | None:
            own = self._planner.part(scheduled)
            part = self._unless_short(lambda: self._computed(own, self._runner.launch(own)))
            if part is None:
                self.device.release_memory()
            return part

        passes = out_of_memory.without(plan.passes, failed | plan.ended_rows())
        parts, unfit = out_of_memory.compute_in_parts(passes, table, compute)
        for part in parts:
            table.advance(part.plan.computed)
        outputs = [self._write(part) for part in parts]
        for row, request_id in zip(unfit, table.ids(unfit), strict=True):
            gets_token = request_id in plan.request_ids
            outputs.append(out_of_memory.failure(request_id, int(table.lens[row]), gets_token))
        table.release(unfit)
        failed.update(unfit)
        logger.warning(
            "no memory for a step of %d passes: computed in %d parts, %d requests failed; decrease "
            "--max-batch-total-tokens, which leaves more memory to each step",
            *(len(plan.passes), len(parts), len(unfit)),
        )
        done_ns = parts[-1].done_ns if parts else time.perf_counter_ns()
        return self._complete(out_of_memory.merged(outputs), handle, done_ns)

    def _computed(self, plan: Plan, launched: Launched) -> Part:
        """Wait for what was launched, and see which of its tokens count."""
        scores, verified = launched.result(), None
        if scores.choice is not None:
            choice = plan.drop_ended(scores.choice)
            verified = verify(plan, choice, self._table, self._end_ids, self.world)
        return Part(plan, verified, scores.forward_done_ns)

    def _write(self, part: Part) -> StepOutput:
        """Put what was computed into the table, and release the rows that ended."""
        plan, verified, table = part.plan, part.verified, self._table
        for row, values in plan.prompt_logprobs.items():
            table.prompt_logprobs[row].extend(values)
        for row, part_reading in plan.readings:
            table.readings[row].add(part_reading)
        if verified is None:
            return StepOutput([], [])
        output, samples = verified.output, plan.samples
        table.write(verified.rows, verified.positions, verified.token_ids)
        if not samples.is_single:
            right = np.array(verified.counts) - 1
            table.set_lens(samples.owners, samples.positions[samples.firsts] + right)
            self._planner.learn(samples, right)
        if table.prompt_logprobs:
            for row, request_id in zip(samples.owners.tolist(), output.request_ids, strict=True):
                if (found := table.pop_prompt_logprobs(row)) is not None:
                    output.prefill_logprobs.append((request_id, found.logprobs))
                    output.prefill_ranks.append(found.ranks)
                    if ids := found.top_token_ids:
                        tops = request_id, ids, found.top_token_logprobs
                        output.prefill_top_tokens.append(tops)
        if table.readings:
            deliver(table, samples.owners.tolist(), output)
        table.drive(verified.driven)
        table.release(verified.ended)
        return output

    def _complete(self, output: StepOutput, handle: StepHandle, done_ns: int) -> StepOutput:
        """With who runs on, and the times of the step, whose passes were computed at `done_ns`."""
        table = self._table
        rows = table.running.tolist()
        if self._under_way:
            young = [row for other in self._under_way for row in other.plan.new_rows]
            rows = [row for row in rows if row not in young]
        output.running_ids = table.ids(rows)
        end = time.perf_counter_ns()
        # Before the last one was done, the device was not at this one yet.
        output.forward_ns = done_ns - max(handle.began_ns, self._last_done_ns)
        self._last_done_ns = done_ns
        output.decode_ns = end - done_ns
        output.total_ns = end - handle.began_ns
        output.admit_ns = handle.admit_ns
        return output

    def filter(self, request_ids: Sequence[int]) -> list[int]:
        """Keep these requests, in this order; the rows of the others are free again."""
        self._collect_all()
        if not request_ids:
            raise BatchError("Batch must have at least one request")
        if len(set(request_ids)) != len(request_ids):
            raise BatchError(f"a request is named twice in {list(request_ids)}")
        if strangers := [item for item in request_ids if self._table.row(item) is None]:
            raise BatchError(f"requests {strangers} are not running")
        self._table.keep(request_ids)
        return list(request_ids)

    def clear(self) -> None:
        """Forget all requests."""
        self._collect_all()
        self._table.release(self._table.running.tolist())

    def _collect_all(self) -> None:
        """What went wrong is told by the handles."""
        if self._under_way:
            self.collect(self._under_way[-1])

    def even_out(self, step: StepInput) -> None:
        """A step has failed on all ranks, on each somewhere else: have what it leaves behind be
        the same on all, whether it came to it or not. Its blocks are there, nothing is guessed."""
        for request_id, block in step.grown:
            with suppress(BatchError):
                self._table.grow_once(request_id, block)
        self._planner.forget_guesses()

    def stop(self) -> None:
        """From any thread: a prompt that is computed in pieces fails at the next piece, and what
        waits for other ranks at once."""
        self._is_stopping.set()
        if self.world.size > 1:
            self.world.collectives.stop()
