"""The limits of steps and what they cost, and what follows from it: how many prompt tokens a step
computes beside decoding rows, how long it may take, and when it is worth coming again."""

import math
from collections import deque
from dataclasses import dataclass, field, replace

from text_generation_process.defaults import (
    CONTEXT_UNIT,
    LEAST_STEP_DEADLINE_ON_GPU_S,
    LEAST_STEP_DEADLINE_S,
    STEP_DEADLINE_FACTOR,
)

# Without a target, a step with prompts may take this many times as long as one without, while
# hardly any request waits: benchmarks/results/chunked-2026-11-22.json …
DEFAULT_STRETCH = 2.0
# … and the extra time is at most this many times as much while many wait: each then waits longer
# for its first token than a decoding row for its next.
_MOST_ROOM = 8.0
_WEIGHT = 0.25  # of the last step: one slow step changes little, ten change it all
# How long a step may take where warm-up could measure nothing.
UNMEASURED_S = 300.0
# Ranks notice a missing rank first: they know which one it is.
BEHIND_RANKS_S = 1.0
_MOST_CHANGE = 2.0  # by one step: what makes it later than that is no cost of its tokens
# Only the last endings count, and only within the window.
MAX_ENDINGS = 64
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What warm-up has measured, in nanoseconds; 0: nothing."""

    # A step of `num_rows` decoding rows.
    decode_step_ns: int = 0
    num_rows: int = 1
    # Cost of a prompt token, and what every CONTEXT_UNIT preceding tokens add to it.
    prefill_token_ns: int = 0
    prefill_context_ns: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of the scheduler, in tokens where nothing else is said."""

    num_blocks: int
    block_size: int
    # Rows.
    max_batch_size: int
    # Prompt tokens in one step.
    max_batch_prefill_tokens: int
    # In KV blocks at once; no effect when the blocks hold less.
    max_batch_total_tokens: int
    # Without chunks, entries join a running batch when this many times its size are waiting …
    waiting_served_ratio: float
    # … or when this number of steps has passed since entries joined.
    max_waiting_tokens: int
    # A row that grows beyond this length rewrites all its blocks; None: no row does.
    recompute_at: int | None = None
    # The KV of a longer prompt depends on its length; None: it never does.
    prompt_scaled_at: int | None = None
    # Snapshots of the states that the model keeps per row; None: it keeps none.
    num_snapshots: int | None = None
    # Requests share the blocks of equal beginnings.
    shares_prefixes: bool = True
    # A prompt is computed in several steps if it would delay decoding rows.
    chunks_prompts: bool = True
    # Draft tokens per request and step at most.
    speculate: int = 0
    # A step may be launched before the previous step is done, if it does not depend on its result.
    runs_ahead: bool = False
    costs: StepCosts = field(default_factory=StepCosts)
    # From one token of a request to the next; None: as `ChunkedPrefill` decides.
    target_ns: float | None = None


@dataclass(frozen=True, slots=True)
class StepDeadlines:
    """The longest time of a step, by what it carries.

    By default that is the larger of `LEAST_STEP_DEADLINE_S` and `STEP_DEADLINE_FACTOR` times what
    warm-up has measured for the largest step with as many prompt tokens: they are at the end of the
    longest context, and all rows decode there. Nothing in a step takes longer:

    - It is an upper bound of the work. The factor covers what warm-up has not measured
      (log-probabilities of prompts, grammars, rows that are computed again because memory was
      short) and a slower machine.
    - One-time work is not part of a step. Warm-up is not watched. On a CPU the kernels are
      compiled, or loaded, before a shard listens, and warm-up samples in every way. On a GPU the
      first steps do more: therefore `LEAST_STEP_DEADLINE_ON_GPU_S`.
    """

    # The same for every step where it is all there is, as with --step-deadline.
    least_s: float
    decode_s: float = 0.0
    token_s: float = 0.0

    @classmethod
    def measured(
        cls, costs: StepCosts, num_rows: int, speculate: int, longest: int, is_on_gpu: bool
    ) -> "StepDeadlines":
        """For at most `num_rows` rows of up to `longest` tokens."""
        if not costs.decode_step_ns:
            return cls(UNMEASURED_S)
        token_ns = costs.prefill_token_ns + costs.prefill_context_ns * longest / CONTEXT_UNIT
        decode_ns = costs.decode_step_ns * max(1.0, num_rows / costs.num_rows)
        decode_ns += num_rows * (1 + speculate) * token_ns
        factor = STEP_DEADLINE_FACTOR
        least_s = LEAST_STEP_DEADLINE_ON_GPU_S if is_on_gpu else LEAST_STEP_DEADLINE_S
        return cls(least_s, factor * decode_ns / 1e9, factor * token_ns / 1e9)

    def behind_ranks(self, ranks_s: float) -> "StepDeadlines":
        """The same, but longer than ranks wait for one another."""
        return replace(self, least_s=max(self.least_s, ranks_s + BEHIND_RANKS_S))

    def work_s(self, num_prompt_tokens: int) -> float:
        """The expected time of such a step, without the factor."""
        return (self.decode_s + num_prompt_tokens * self.token_s) / STEP_DEADLINE_FACTOR

    def of(self, num_prompt_tokens: int) -> float:
        """Seconds for a step with that number of prompt tokens."""
        return max(self.least_s, self.decode_s + num_prompt_tokens * self.token_s)


@dataclass(slots=True)
class Budget:
    """What is left of the prefill budget of a step."""

    # Number of tokens, at any position.
    most: int
    # Time, in tokens at the beginning of a prompt.
    tokens: float = math.inf
    # Relative cost per preceding token.
    context_share: float = 0.0
    # The first part of a step gets at least this many, so that every prompt makes progress.
    least: int = 0

    def room(self, start: int, is_first: bool = False) -> int:
        """How many tokens fit behind `start` preceding ones."""
        fitting = int(min(self.most, self.tokens / (1.0 + start * self.context_share)))
        return max(fitting, self.least) if is_first else fitting

    def take(self, start: int, count: int) -> None:
        """Spends `count` tokens behind `start` preceding ones."""
        self.most -= count
        self.tokens -= count * (1.0 + start * self.context_share)

    @property
    def is_spent(self) -> bool:
        """Whether no token fits any more, at any position."""
        return self.room(0) < 1


class ChunkedPrefill:
    """Chooses the prefill budget of a step from the measured cost of steps: of one without prompts,
    by its number of rows, and of prompt tokens, as a multiple of what warm-up has measured."""

    def __init__(
        self, max_tokens: int, block_size: int, costs: StepCosts, target_ns: float | None = None
    ) -> None:
        """`max_tokens`: in any step. `target_ns`: from one token to the next; None: DEFAULT_STRETCH
        times a step without prompts, and more while many requests wait for each that decodes. More
        prompt tokens in a step delay decoding rows; fewer delay all waiting requests."""
        self._max_tokens, self._block_size, self._target_ns = max_tokens, block_size, target_ns
        self._token_ns = costs.prefill_token_ns
        self._context_ns = costs.prefill_context_ns / CONTEXT_UNIT
        # Duration of a step without prompts, by the bits of its number of rows.
        self._step_ns: dict[int, float] = {}
        if costs.decode_step_ns:
            self._step_ns[costs.num_rows.bit_length()] = float(costs.decode_step_ns)
        self._token_cost = 1.0

    def budget(self, num_decoding: int, num_waiting: int = 0) -> Budget:
        """The budget of the next step: whole blocks, at least one, if any row decodes.
        `num_waiting`: requests whose prompts could be computed now."""
        step_ns = self._decode_step_ns(num_decoding)
        if not num_decoding or not step_ns or not self._token_ns:
            return Budget(self._max_tokens)
        room_ns = self._room_ns(step_ns, num_waiting / num_decoding)
        num_tokens = int(room_ns / (self._token_cost * self._token_ns))
        num_blocks = max(1, num_tokens // self._block_size)
        share, least = self._context_ns / self._token_ns, min(self._max_tokens, self._block_size)
        return Budget(self._max_tokens, num_blocks * self._block_size, share, least)

    def note(
        self, duration_ns: int, num_decoding: int, num_prompt_tokens: int, num_in_front: int = 0
    ) -> None:
        """Learns from a step. `num_in_front`: for each prompt token the tokens that precede its
        part, summed up."""
        if not num_decoding:
            return
        if not num_prompt_tokens:
            bits = num_decoding.bit_length()
            known = self._step_ns.get(bits, duration_ns)
            self._step_ns[bits] = known + (min(duration_ns, _MOST_CHANGE * known) - known) * _WEIGHT
        elif (step_ns := self._decode_step_ns(num_decoding)) and self._token_ns:
            tokens_ns = num_prompt_tokens * self._token_ns + num_in_front * self._context_ns
            measured = (duration_ns - step_ns) / tokens_ns
            measured = min(max(measured, 1 / _MOST_CHANGE), _MOST_CHANGE)
            # A short chunk says little: most of its time is no cost of its tokens.
            weight = _WEIGHT * min(1.0, tokens_ns / max(1.0, self._room_ns(step_ns)))
            self._token_cost += (measured - self._token_cost) * weight

    def _room_ns(self, step_ns: float, waiting_share: float = 0.0) -> float:
        """How much longer than one without prompts a step may take; `waiting_share`: waiting
        requests for each that decodes."""
        if self._target_ns is None:
            return step_ns * (DEFAULT_STRETCH - 1) * min(1.0 + waiting_share, _MOST_ROOM)
        return max(0.0, self._target_ns - step_ns)

    def _decode_step_ns(self, num_decoding: int) -> float:
        """Duration of a step without prompts, of the nearest known number of rows; 0: unknown."""
        bits = num_decoding.bit_length()
        nearest = min(self._step_ns, key=lambda known: abs(known - bits), default=0)
        return self._step_ns.get(nearest, 0.0)


class EndingRate:
    """How fast requests end: the source of `retry-after`. Owns the times of the last endings, in
    seconds of one monotonic clock.

    It measures from the first request to an idle server: the rate of endings under low load says
    nothing about high load.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._times: deque[float] = deque(maxlen=MAX_ENDINGS)

    def begin(self, now: float) -> None:
        """The first request has come to an idle server."""
        self._since = now
        self._times.clear()

    def end(self, now: float, num: int) -> None:
        """`num` requests have ended."""
        self._times.extend([now] * min(num, MAX_ENDINGS))

    def retry_after_s(self, now: float, num: int) -> int:
        """In how many whole seconds, 1 to 60, `num` requests will have ended.

        Before the first ending: the time since `begin`, for each.
        """
        while self._times and self._times[0] < now - WINDOW_S:
            self._times.popleft()
        start = max(self._since, now - WINDOW_S)
        if len(self._times) == MAX_ENDINGS:
            start = self._times[0]
        seconds = num * (now - start) / max(1, len(self._times))
        return max(1, math.ceil(min(seconds, WINDOW_S)))
