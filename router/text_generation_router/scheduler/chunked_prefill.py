"""The prefill budget: how many prompt tokens a step computes beside decoding rows."""

import math
from dataclasses import dataclass

from text_generation_process.defaults import CONTEXT_UNIT

# Without a target, a step with prompts may take this many times as long as one without, while
# hardly any request waits …
DEFAULT_STRETCH = 2.0
# … and the extra time is at most this many times as much while many wait.
_MOST_ROOM = 8.0
# Weight of the last step in the moving average, and the largest factor by which it may differ.
_WEIGHT = 0.25
_SURPRISE = 2.0
# At least this share of the time for prompts is used, even where steps are late: fewer tokens would
# not make them shorter.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What warm-up has measured, in nanoseconds; 0: nothing."""

    # A step of `num_rows` decoding rows.
    decode_step_ns: int = 0
    num_rows: int = 1
    # Cost of a prompt token, and what every CONTEXT_UNIT preceding tokens add to it.
    prefill_token_ns: int = 0
    prefill_context_ns: int = 0


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
    """Chooses the prefill budget of a step; learns how long steps take and how late they are.

    The cost of a prompt token is that of warm-up, by its position. The cost of a step without
    prompts is the moving average of the shard's times, for about as many rows. What steps with
    prompts take beyond both is their lateness, which shortens the next one.
    """

    def __init__(
        self,
        max_tokens: int,
        block_size: int,
        costs: StepCosts,
        target_ns: float | None = None,
    ) -> None:
        """`max_tokens`: in any step. `target_ns`: from one token to the next; None: DEFAULT_STRETCH
        times a step without prompts, and more while many requests wait for each that decodes. More
        prompt tokens in a step delay decoding rows; fewer delay all waiting requests."""
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._target_ns = target_ns
        self._token_ns = costs.prefill_token_ns
        self._context_ns = costs.prefill_context_ns / CONTEXT_UNIT
        # Duration of a step without prompts, by size class of the number of rows.
        self._step_ns: dict[int, float] = {}
        if costs.decode_step_ns:
            self._step_ns[_size_class(costs.num_rows)] = float(costs.decode_step_ns)
        # By how much steps with prompts are longer than expected.
        self._lateness_ns = 0.0

    def budget(self, num_decoding: int, num_waiting: int = 0) -> Budget:
        """The budget of the next step: whole blocks, at least one, if any row decodes.
        `num_waiting`: requests whose prompts could be computed now."""
        step_ns = self._decode_step_ns(num_decoding)
        if not num_decoding or not step_ns or not self._token_ns:
            return Budget(self._max_tokens)
        room_ns = self._room_ns(step_ns, num_waiting / num_decoding)
        time_ns = max(room_ns - self._lateness_ns, room_ns * _LEAST_SHARE)
        num_blocks = max(1, int(time_ns / self._token_ns) // self._block_size)
        share, least = self._context_ns / self._token_ns, min(self._max_tokens, self._block_size)
        return Budget(self._max_tokens, num_blocks * self._block_size, share, least)

    def note(
        self, duration_ns: int, num_decoding: int, num_prompt_tokens: int, num_in_front: int = 0
    ) -> None:
        """Learns from a step. `num_in_front`: for each prompt token the tokens that precede its
        part, summed up."""
        if not num_decoding:
            return  # it has delayed no row
        step_ns = self._decode_step_ns(num_decoding)
        if not num_prompt_tokens:
            size = _size_class(num_decoding)
            known = self._step_ns.get(size, float(duration_ns))
            measured = min(max(duration_ns, known / _SURPRISE), known * _SURPRISE)
            self._step_ns[size] = known + (measured - known) * _WEIGHT
        elif step_ns:
            room_ns = self._room_ns(step_ns)
            tokens_ns = num_prompt_tokens * self._token_ns + num_in_front * self._context_ns
            late_ns = duration_ns - step_ns - tokens_ns
            late_ns = min(max(late_ns, -room_ns), room_ns)
            self._lateness_ns += (late_ns - self._lateness_ns) * _WEIGHT

    def _room_ns(self, step_ns: float, waiting_share: float = 0.0) -> float:
        """How much longer than one without prompts a step may take; `waiting_share`: waiting
        requests for each that decodes."""
        if self._target_ns is None:
            return step_ns * (DEFAULT_STRETCH - 1) * min(1.0 + waiting_share, _MOST_ROOM)
        return max(0.0, self._target_ns - step_ns)

    def _decode_step_ns(self, num_decoding: int) -> float:
        """Duration of a step without prompts: of this size class, else the next larger, else the
        largest."""
        size = _size_class(num_decoding)
        larger = [known for known in self._step_ns if known >= size]
        nearest = min(larger) if larger else max(self._step_ns, default=None)
        return 0.0 if nearest is None else self._step_ns[nearest]


def _size_class(num_rows: int) -> int:
    """1, 2, 3 … 4, 5 … 8 and so on: steps of one class take about as long."""
    return max(0, num_rows - 1).bit_length()
