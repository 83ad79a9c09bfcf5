"""Drives an engine as the router does: allocates blocks, admits, grows and preempts requests, and
launches each step before the result of the previous one is known."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from text_generation_shard.engine.engine import Engine, StepHandle
from text_generation_shard.errors import BatchError
from text_generation_shard.grammars.grammar import Grammar

# Rows per block that stays free: without it a new request would be preempted a step later.
_ROWS_A_SPARE_BLOCK = 8


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as a router sends it; see Request in generate.proto."""

    id: int
    input_ids: Sequence[int]
    block_table: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    ignore_eos_token: bool = True
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    grammar: Grammar | None = None

    def message(self) -> pb.Request:
        """The same as a message."""
        return pb.Request(
            id=self.id,
            input_ids=self.input_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            block_table=self.block_table,
            parameters=pb.NextTokenChooserParameters(**self.sampling.to_wire()),
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=self.max_new_tokens, ignore_eos_token=self.ignore_eos_token
            ),
            prefill_logprobs=self.prefill_logprobs,
            top_n_tokens=self.top_n_tokens,
        )


class LostError(AssertionError):
    """A request, a row or a block is lost or used twice."""


@dataclass(slots=True)
class Answer:
    """The tokens of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: pb.FinishReason = pb.FINISH_REASON_NONE


@dataclass(slots=True)
class _Held:
    """A request with a row and blocks."""

    request: NewRequest
    known: list[int]
    table: list[int]
    # Tokens whose KV is in the cache after all launched steps.
    computed: int
    # Tokens it may get in addition to those in flight.
    left: int


class Caller:
    """Owns the free blocks, the requests' blocks and the steps in flight, at most two. Raises
    LostError if the engine has other requests, or if blocks are lost or held twice."""

    def __init__(
        self, engine: Engine, num_blocks: int, max_rows: int, max_prefill_tokens: int
    ) -> None:
        self.answers: dict[int, Answer] = {}
        """Answers by request, including cancelled ones."""
        self.num_steps = self.num_preempted = 0
        self.most_blocks = 0
        """The most blocks held at one time."""
        self._engine, self._num_blocks, self._max_rows = engine, num_blocks, max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._free = list(range(num_blocks))
        self._held: dict[int, _Held] = {}
        # Requests without a row, in order of arrival.
        self._waiting: deque[NewRequest] = deque()
        self._under_way: deque[StepHandle] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def running_ids(self) -> list[int]:
        """Requests with a row, the oldest first."""
        return list(self._held)

    def ask(self, request: NewRequest) -> None:
        """Take a request; its block_table is empty. It needs fewer blocks than there are."""
        self.answers[request.id] = Answer()
        self._waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """End a request that runs or waits."""
        self._waiting = deque(item for item in self._waiting if item.id != request_id)
        self.settle()
        if request_id in self._held:
            self._drop(request_id)

    def advance(self) -> bool:
        """Launch a step, and collect steps until at most two are in flight. False: there was no
        work."""
        self._make_room()
        admitted = self._admitted()
        is_due = bool(admitted) or any(held.left for held in self._held.values())
        is_launched = is_due and self._launch(admitted)
        if len(self._under_way) > is_launched:
            self._collect()
            return True
        return is_launched

    def run(self) -> None:
        """Run until every request has ended."""
        while self.advance():
            pass
        self.check()

    def settle(self) -> None:
        """Collect all steps in flight."""
        while self._under_way:
            self._collect()

    def end(self) -> None:
        """Cancel everything. Then all blocks are free, and the engine has no row in use."""
        self.settle()
        self._waiting.clear()
        for request_id in self.running_ids:
            self._drop(request_id)
        self.check()
        if len(self._free) != self._num_blocks or self._engine.num_rows_taken:
            raise LostError(
                f"{self._num_blocks - len(self._free)} blocks and {self._engine.num_rows_taken} "
                "rows are taken and no request has them"
            )

    def check(self) -> None:
        """Each block is free or held by one request; the engine has a row for each of these."""
        held = [block for one in self._held.values() for block in one.table]
        if sorted([*held, *self._free]) != list(range(self._num_blocks)):
            raise LostError(
                f"{len(self._free)} blocks are free and {len(held)} held, of {self._num_blocks}"
            )
        if not self._under_way and self._engine.num_rows_taken != len(self._held):
            raise LostError(
                f"{self._engine.num_rows_taken} rows are in use for {len(self._held)} requests"
            )

    def _width(self, num_tokens: int) -> int:
        return -(-num_tokens // self._engine.block_size)

    def _lacking(self) -> list[int]:
        """Requests that need one block more for the next step."""
        return [
            request_id
            for request_id, held in self._held.items()
            if held.left and self._width(held.computed + 1) > len(held.table)
        ]

    def _make_room(self) -> None:
        """Make room for the next step of the running requests: the youngest are preempted."""
        while len(self._lacking()) > len(self._free):
            if self._under_way:
                # Requests that end there free their blocks.
                self.settle()
                continue
            request_id = self.running_ids[-1]
            held = self._held[request_id]
            self._drop(request_id)
            self._waiting.appendleft(replace(held.request, input_ids=held.known))
            self.num_preempted += 1

    def _admitted(self) -> list[NewRequest]:
        """Waiting requests, in order, that get a row and blocks; running requests go first."""
        admitted: list[NewRequest] = []
        room = len(self._free) - len(self._lacking()) - len(self._held) // _ROWS_A_SPARE_BLOCK
        tokens = self._max_prefill_tokens
        while self._waiting and len(self._held) + len(admitted) < self._max_rows:
            num_tokens = len(self._waiting[0].input_ids)
            width = self._width(num_tokens + 1)
            if width > room or (admitted and num_tokens > tokens):
                break
            room, tokens = room - width, tokens - num_tokens
            table = [self._free.pop() for _ in range(width)]
            admitted.append(replace(self._waiting.popleft(), block_table=table))
        return admitted

    def _launch(self, admitted: list[NewRequest]) -> bool:
        """False: all running requests may end in the steps in flight."""
        grown = []
        for request_id in self._lacking():
            block = self._free.pop()
            self._held[request_id].table.append(block)
            grown.append((request_id, block))
        counts = {request_id: 1 for request_id, held in self._held.items() if held.left}
        counts |= {new.id: len(new.input_ids) for new in admitted}
        step = pb.Step(
            request_ids=counts,
            counts=counts.values(),
            grown_request_ids=[request_id for request_id, _ in grown],
            grown_block_ids=[block for _, block in grown],
            is_ahead=bool(self._under_way),
        )
        grammars = {new.id: new.grammar for new in admitted if new.grammar is not None}
        try:
            handle = self._engine.launch(step, [new.message() for new in admitted], grammars)
        except BatchError:
            if admitted or not self._under_way:
                raise
            return False
        for held in self._held.values():
            if held.left:
                held.computed, held.left = held.computed + 1, held.left - 1
        for new in admitted:
            known = list(new.input_ids)
            generated = len(known) - new.num_prompt_tokens
            left = new.max_new_tokens - generated - 1
            self._held[new.id] = _Held(new, known, list(new.block_table), len(known), left)
        self._under_way.append(handle)
        self.num_steps += 1
        self.most_blocks = max(self.most_blocks, self._num_blocks - len(self._free))
        return True

    def _collect(self) -> None:
        output = self._under_way.popleft().result()
        self._take(output)
        if not self._under_way and set(output.batch.request_ids) != set(self._held):
            raise LostError(
                f"the engine runs {len(output.batch.request_ids)} requests, {len(self._held)} have "
                "none or another end"
            )

    def _take(self, output: pb.StepResponse) -> None:
        new = output.generations
        columns = new.request_ids, new.token_ids, new.logprobs, new.finish_reasons
        for request_id, token, logprob, reason in zip(*columns, strict=True):
            held, answer = self._held[request_id], self.answers[request_id]
            held.known.append(token)
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
            answer.reason = reason
            if reason:
                self._free += self._held.pop(request_id).table
        for request_id in (error.request_id for error in output.errors):
            # A request that failed before its first token is only reported here.
            self.answers[request_id].reason = pb.FINISH_REASON_ERROR
            if request_id in self._held:
                self._free += self._held.pop(request_id).table

    def _drop(self, request_id: int) -> None:
        """Take the row of a running request, while no step is in flight."""
        self._free += self._held.pop(request_id).table
        if self._held:
            self._engine.filter(self.running_ids)
        else:
            self._engine.clear()
