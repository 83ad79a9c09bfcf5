"""The engine: owns rows, cache and model, and starts everything that the device computes.

All methods but the constructor and `stop` are called from one thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from text_generation_proto import pb

from text_generation_shard.device.base import ScheduledTokens
from text_generation_shard.device.reference.device import Device
from text_generation_shard.engine.output import Computed, verify, write
from text_generation_shard.engine.planner import Costs, Drafter, Plan, Planner
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.step import (
    LaunchedStep,
    StepRunner,
    compute_in_parts,
    failure,
    merged,
    unless_short,
    without,
)
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.grammar import Grammar
from text_generation_shard.grammars.masks import GrammarMasks
from text_generation_shard.models.registry import LanguageModel
from text_generation_shard.parallel import World
from text_generation_shard.sampling import Watermark

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StepHandle:
    """A launched step. The engine sets its outcome."""

    engine: "Engine"
    plan: Plan
    # None if there was no memory for it, or for a step that it depends on.
    launched: LaunchedStep | None
    began_ns: int
    admit_ns: int
    outcome: pb.StepResponse | BaseException | None = None

    def wait(self) -> None:
        """Wait until `result` returns almost at once. From any thread."""
        launched = self.launched
        if self.outcome is None and launched is not None:
            launched.wait()

    def result(self) -> pb.StepResponse:
        """Wait for the step. If it failed, its new requests have no rows, and the other rows are
        unchanged but for grown block tables; if the model keeps states, those that it computed
        have no rows either. Out of memory fails only the requests that do not fit alone, and with
        states all that it computed: see `StepResponse.errors`."""
        self.engine.collect(self)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None, "a collected step has an outcome"
        return self.outcome


class Engine:
    """Owns the row table and the steps in flight."""

    def __init__(
        self,
        device: Device,
        model: LanguageModel,
        weights_bytes: int,
        watermark: Watermark,
        world: World | None = None,
    ) -> None:
        """A loaded model on its device."""
        self.device, self.model, self.runner = device, model, device.runner(model)
        self.world = world or World()
        is_single = self.world.size == 1 and not model.state_bytes
        self.runs_behind = device.runs_behind and is_single
        """Whether a step may be launched before the previous one has a result. Not with several
        ranks: whether the previous one is already collected would differ by their timing. Nor if
        rows have states, which a launch that is repeated would advance twice."""
        self.weights_bytes, self._watermark = weights_bytes, watermark
        self._end_ids = frozenset(model.config.eos_token_ids)
        self._masks = GrammarMasks(model.config.vocab_size, device.torch_device)
        self._is_stopping = threading.Event()
        # Launched and not collected, oldest first: at most two if the device runs behind, else one.
        self._in_flight: deque[StepHandle] = deque()
        # When the step collected last was computed.
        self._last_done_ns = 0
        self.use_table(0, 0, 0, 1)

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""
        return self.model.attention.block_size

    @property
    def is_deterministic(self) -> bool:
        """Whether a request's tokens are the same, bit for bit, regardless of batch composition,
        chunked prefill and prefix cache."""
        model = self.model
        is_own = model.is_deterministic and model.attention.is_deterministic
        return self.device.is_deterministic and is_own

    @property
    def num_rows_taken(self) -> int:
        """Rows in use; 0 when nothing runs."""
        return len(self._table.running)

    def use_table(
        self,
        capacity: int,
        max_total_tokens: int,
        num_blocks: int,
        max_prefill_tokens: int,
        num_snapshots: int = 0,
    ) -> None:
        """Take new rows and plan with these limits. No request runs."""
        model = self.model
        if model.state_bytes:
            model.make_states(capacity, num_snapshots)
        # Whether a step that runs out of memory is computed in parts: not while memory is measured,
        # and not with several ranks, whose parts would differ.
        self._splits = False
        unused = np.array(model.config.unused_ids, dtype=np.int64)
        self._table = table = RowTable(
            capacity=capacity,
            max_total_tokens=max_total_tokens,
            block_size=self.block_size,
            num_cache_blocks=num_blocks,
            num_snapshots=num_snapshots,
        )
        self._steps = StepRunner(
            runner=self.runner,
            model=model,
            table=table,
            upload=self.device.upload,
            end_ids=np.array(model.config.eos_token_ids, dtype=np.int64),
            unused_ids=self.device.upload([unused])[0] if len(unused) else None,
            watermark=self._watermark,
            is_stopping=self._is_stopping,
        )
        self._drafter = Drafter(capacity, agree=self.world.broadcast)
        self._planner = Planner(
            model=model,
            table=table,
            drafter=self._drafter,
            # The limits of grammars' time and memory could differ by rank.
            masks=self._masks if self.world.rank == 0 else None,
            max_prefill_tokens=max_prefill_tokens,
        )

    def set_costs(self, costs: Costs) -> None:
        """Warm-up is over, and steps take these times."""
        self._planner.costs = costs
        self._splits = self.world.size == 1

    def step(self, step: pb.Step, requests: Sequence[pb.Request] = ()) -> pb.StepResponse:
        """Compute a step. If it fails: see StepHandle."""
        return self.launch(step, requests).result()

    def launch(
        self,
        step: pb.Step,
        requests: Sequence[pb.Request] = (),
        grammars: Mapping[int, Grammar] = MappingProxyType({}),
    ) -> StepHandle:
        """Start a step, with new requests, and the compiled grammars of those that have one. The
        previous step is collected first, unless the device runs behind and this step does not
        depend on its tokens.

        BatchError if the step is invalid: then nothing has changed but grown block tables.
        """
        began = time.perf_counter_ns()
        self.collect_before(step)
        before = self._in_flight[0].plan.samples if self._in_flight else None
        if requests:
            self._check_vocabulary(requests)
        # First, for the router does not give these blocks back if a new request is refused.
        for request_id, block in zip(step.grown_request_ids, step.grown_block_ids, strict=True):
            if not step.is_ahead or request_id in self._table.running:
                self._table.grow(request_id, block)
        rows: list[int] = []
        plan: Plan | None = None
        taking = time.perf_counter_ns()
        try:
            for request in requests:
                rows.append(self._table.take(request, grammars.get(request.id)))
            admitted = time.perf_counter_ns()
            plan = self._planner.plan(step, rows, before)
            if self._in_flight and self._in_flight[0].launched is not None:
                # Its tokens may be inputs of this step.
                self._in_flight[0].launched.choose()
            launched = unless_short(partial(self._steps.launch, plan), self._splits)
        except BaseException:
            self._table.release(rows if plan is None else self._lost_rows(plan))
            raise
        self._table.advance(plan.computed)
        handle = StepHandle(self, plan, launched, began, admitted - taking)
        self._in_flight.append(handle)
        if launched is None:
            self.collect(handle)
        return handle

    def collect_before(self, step: pb.Step) -> None:
        """Collect the steps in flight that must end before this one is launched."""
        may_run_behind = (
            self.runs_behind
            # It can be planned without the tokens of the previous step, and grammars are unlikely
            # to replace those.
            and not (step.speculate or self._table.driven)
            and self.model.recompute_at is None
            # After draft tokens a row's length is known only with its tokens.
            and all(other.plan.samples.is_single for other in self._in_flight)
        )
        while len(self._in_flight) > may_run_behind:
            self.collect(self._in_flight[0])

    def _check_vocabulary(self, requests: Sequence[pb.Request]) -> None:
        size = self.model.config.vocab_size
        largest = max(
            max(max(item.input_ids, default=0), max(item.score_token_ids, default=0))
            for item in requests
        )
        if largest >= size:
            raise BatchError(f"token id {largest} is not below {size}, the vocabulary")

    def collect(self, handle: StepHandle) -> None:
        """Wait for a step and those before it, and set their outcomes."""
        while handle.outcome is None:
            oldest = self._in_flight.popleft()
            try:
                oldest.outcome = unless_short(partial(self._finish, oldest), self._splits)
            except BaseException as error:
                self._fail(oldest, error)
            if oldest.outcome is None:
                self._recompute(oldest)
            elif self._in_flight:
                self._catch_up(self._in_flight[0])

    def _catch_up(self, handle: StepHandle) -> None:
        """The step before `handle` is collected: start its grammars, and launch it again if a token
        that it uses was replaced."""
        plan, table = handle.plan, self._table
        try:
            self._planner.start_grammars(plan)
            if not table.driven.isdisjoint(plan.samples.rows.tolist()):
                # A grammar replaced a token that the device used as an input: launch again.
                plan.before = None
                plan.prompt_parts.clear()
                table.rewind(plan.computed)
                handle.launched = None
                handle.launched = unless_short(partial(self._steps.launch, plan), self._splits)
                table.advance(plan.computed)
        except BaseException as error:
            self._in_flight.popleft()
            self._fail(handle, error)

    def _recompute(self, short: StepHandle) -> None:
        """Compute a step that ran out of memory, and those behind it, in parts."""
        self._undo(short)
        self.device.release_memory()
        step, failed = short, set[int]()
        while True:
            try:
                step.outcome = self._finish_in_parts(step, failed)
            except BaseException as error:
                self._fail(step, error)
            if not self._in_flight:
                return
            step = self._in_flight.popleft()

    def _fail(self, failed: StepHandle, error: BaseException) -> None:
        """End a step, and those behind it, with an error."""
        steps = self._undo(failed)
        self._in_flight.clear()
        for handle in reversed(steps):
            self._table.release(self._lost_rows(handle.plan))
            handle.outcome = error

    def _lost_rows(self, plan: Plan) -> Sequence[int]:
        """The rows that end with a failed step: the new ones and, if rows have states, all that it
        computed, because it may have advanced them."""
        if not self.model.state_bytes:
            return plan.new_rows
        computed = np.concatenate([scheduled.rows for scheduled in plan.passes])
        return [row for row in self._table.running.values() if row in computed]

    def _undo(self, failed: StepHandle) -> list[StepHandle]:
        """Rewind the rows to before a step. Returns this step and those launched behind it, whose
        results are dropped: their inputs were never chosen."""
        steps = [failed, *self._in_flight]
        for handle in steps[1:]:
            if handle.launched is not None:
                with suppress(Exception):
                    unless_short(handle.launched.result)
        for handle in reversed(steps):
            handle.launched, plan = None, handle.plan
            self._table.rewind(without(plan.computed, plan.ended_rows()))
        return steps

    def _finish(self, handle: StepHandle) -> pb.StepResponse | None:
        """Wait for a step, and write its results; None if it was not launched."""
        launched, handle.launched = handle.launched, None
        if launched is None:
            return None
        part = self._computed(handle.plan, launched)
        return self._complete(self._write(part), handle, part.done_ns)

    def _finish_in_parts(self, handle: StepHandle, failed: set[int]) -> pb.StepResponse:
        """Compute a step in parts, without the rows in `failed`; adds the rows that do not fit
        even alone. The row table is written after all parts are computed. Rows with states fail:
        the step may have advanced them."""
        plan, table = handle.plan, self._table

        def compute(scheduled: ScheduledTokens) -> Computed | None:
            own = Plan(table, [scheduled])
            self._planner.start_grammars(own)
            part = unless_short(lambda: self._computed(own, self._steps.launch(own)))
            if part is None:
                self.device.release_memory()
            return part

        passes = without(plan.passes, failed | plan.ended_rows())
        parts, unfit = list[Computed](), self._lost_rows(plan)
        if not self.model.state_bytes:
            parts, unfit = compute_in_parts(passes, table, compute)
        for part in parts:
            table.advance(part.plan.computed)
        outputs = [self._write(part) for part in parts]
        for row, request_id in zip(unfit, table.ids(unfit), strict=True):
            gets_token = request_id in plan.request_ids
            known, was_alone = int(table.lens[row]), not self.model.state_bytes
            outputs.append(failure(request_id, known, gets_token, was_alone))
        table.release(unfit)
        failed.update(unfit)
        logger.warning(
            "a step of %d passes ran out of memory: computed in %d parts, %d requests failed; "
            "decrease --max-batch-total-tokens, which leaves more memory to each step",
            len(plan.passes),
            len(parts),
            len(unfit),
        )
        done_ns = parts[-1].done_ns if parts else time.perf_counter_ns()
        return self._complete(merged(outputs), handle, done_ns)

    def _computed(self, plan: Plan, launched: LaunchedStep) -> Computed:
        """Wait for a launched step, and verify its tokens."""
        scores = launched.result()
        done_ns, table = scores.forward_done_ns, self._table
        if scores.choice is None:
            return Computed(plan, done_ns, pb.StepResponse())
        choice = plan.drop_ended(scores.choice) if plan.was_behind else scores.choice
        return verify(plan, choice, done_ns, table, self._end_ids, self.world)

    def _write(self, part: Computed) -> pb.StepResponse:
        """Write results into the row table, and release the rows that ended."""
        samples = part.plan.samples
        if part.counts and not samples.is_single:
            drafted = samples.ends - samples.firsts - 1
            self._drafter.learn(samples.owners, drafted, np.array(part.counts) - 1)
        return write(part, self._table)

    def _complete(
        self, output: pb.StepResponse, handle: StepHandle, done_ns: int
    ) -> pb.StepResponse:
        """Add the running requests and the times of the step; its passes ended at `done_ns`."""
        running = self._table.running
        request_ids = list(running)
        if self._in_flight:
            young = {row for other in self._in_flight for row in other.plan.new_rows}
            request_ids = [item for item, row in running.items() if row not in young]
        if request_ids:
            output.batch.request_ids.extend(request_ids)
        end = time.perf_counter_ns()
        # The device started this step after the previous one was done.
        output.forward_ns = done_ns - max(handle.began_ns, self._last_done_ns)
        self._last_done_ns = done_ns
        output.decode_ns = end - done_ns
        output.total_ns = end - handle.began_ns
        return output

    def filter(self, request_ids: Sequence[int]) -> list[int]:
        """Keep these requests, in this order, and release the rows of the others."""
        self._collect_all()
        if not request_ids:
            raise BatchError("Batch must have at least one request")
        if len(set(request_ids)) != len(request_ids):
            raise BatchError(f"a request is named twice in {list(request_ids)}")
        if unknown := [item for item in request_ids if item not in self._table.running]:
            raise BatchError(f"requests {unknown} are not running")
        self._table.keep(request_ids)
        return list(request_ids)

    def clear(self) -> None:
        """Drop all requests."""
        self._collect_all()
        self._table.release(list(self._table.running.values()))

    def _collect_all(self) -> None:
        """Collect every step; its handle holds its error."""
        if self._in_flight:
            self.collect(self._in_flight[-1])

    def align_after_failure(self, step: pb.Step) -> None:
        """Bring all ranks to the same state after a step that failed at a different point on each:
        block tables have grown, and draft tokens are forgotten."""
        for request_id, block in zip(step.grown_request_ids, step.grown_block_ids, strict=False):
            with suppress(BatchError):
                self._table.grow_once(request_id, block)
        self._drafter.forget()

    def stop(self) -> None:
        """From any thread: fail a step before its next pass, and any wait for other ranks."""
        self._is_stopping.set()
        if self.world.size > 1:
            self.world.collectives.stop()
