"""How much of the prompts a step may carry, so that those who decode do not wait too long."""

import math
from dataclasses import dataclass

# A step may take so many times as long as one that carries no prompt, if nobody says how long and
# hardly anybody waits …
DEFAULT_STRETCH = 2.0
# … and at most so many times longer if many do.
_MOST_ROOM = 8.0
# How much a step counts against those before it, and by what factor it may surprise.
_WEIGHT = 0.25
_SURPRISE = 2.0
# However late steps are, this share of the time for prompts is used as if they were not: what they
# take longer would not go away with fewer tokens.
_LEAST_SHARE = 0.5
_CONTEXT_UNIT = 1024


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What was measured at warm-up, in nanoseconds; 0: nothing was."""

    # A step of so many decoding rows.
    decode_step_ns: int = 0
    num_rows: int = 1
    # What a prompt token adds to it, and what every 1024 tokens in front add to that.
    prefill_token_ns: int = 0
    prefill_context_ns: int = 0


@dataclass(slots=True)
class Budget:
    """What a step may still carry of prompts."""

    # Tokens, wherever they are.
    most: int
    # The time there is, in tokens that have nothing in front of them.
    tokens: float = math.inf
    # Of how many such tokens one takes the time for each that is in front of it.
    context_share: float = 0.0
    # The first part of a step gets so many at least, wherever it is, so that nobody waits for ever.
    least: int = 0

    def room(self, start: int, is_first: bool = False) -> int:
        """How many tokens behind `start` others fit."""
        fitting = int(min(self.most, self.tokens / (1.0 + start * self.context_share)))
        return max(fitting, self.least) if is_first else fitting

    def take(self, start: int, count: int) -> None:
        """A part of so many tokens goes along."""
        self.most -= count
        self.tokens -= count * (1.0 + start * self.context_share)

    @property
    def is_spent(self) -> bool:
        """Whether no token fits any more, wherever it is."""
        return self.room(0) < 1


class ChunkedPrefill:
    """Chooses the prompt tokens of a step; learns how long steps take and how late they are.

    A prompt token takes what was measured at warm-up, by its place in the prompt: the attention of
    the 125 M checkpoint doubles that behind 3,000 tokens. A step without prompts is what the
    shard's own clock said of the last ones with about as many rows; whatever steps with prompts
    take beyond both is allowed for in the next.
    """

    def __init__(
        self,
        max_tokens: int,
        block_size: int,
        costs: StepCosts,
        target_ns: float | None = None,
    ) -> None:
        """`max_tokens`: in a step that nobody waits for. `target_ns`: from one token to the next;
        None: DEFAULT_STRETCH times a step without prompts, and longer the more requests wait for
        each that decodes: prompts in a step delay those who decode, but prompts in many steps delay
        those who wait by all of them."""
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._target_ns = target_ns
        self._token_ns = costs.prefill_token_ns
        self._context_ns = costs.prefill_context_ns / _CONTEXT_UNIT
        # By size class of the number of rows: a step that carried no prompt.
        self._step_ns: dict[int, float] = {}
        if costs.decode_step_ns:
            self._step_ns[_size_class(costs.num_rows)] = float(costs.decode_step_ns)
        # What steps with prompts took longer than they should have.
        self._lateness_ns = 0.0

    def budget(self, num_decoding: int, num_waiting: int = 0) -> Budget:
        """Prompt tokens for the next step: whole blocks, one at least, if somebody is decoding.
        `num_waiting`: requests whose prompts are not computed and could be."""
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
        """A step is done that carried so much. `num_in_front`: how many tokens were in front of the
        part that each prompt token is of, all added up."""
        if not num_decoding:
            return  # nobody waited for it
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
        """How much longer than one without prompts a step may take, with so many requests waiting
        for each that decodes."""
        if self._target_ns is None:
            return step_ns * (DEFAULT_STRETCH - 1) * min(1.0 + waiting_share, _MOST_ROOM)
        return max(0.0, self._target_ns - step_ns)

    def _decode_step_ns(self, num_decoding: int) -> float:
        """A step without prompts: of as many rows, else of the next more, else of the most."""
        size = _size_class(num_decoding)
        larger = [known for known in self._step_ns if known >= size]
        nearest = min(larger) if larger else max(self._step_ns, default=None)
        return 0.0 if nearest is None else self._step_ns[nearest]


def _size_class(num_rows: int) -> int:
    """1, 2, 3 … 4, 5 … 8 and so on: steps within one take about as long."""
    return max(0, num_rows - 1).bit_length()
