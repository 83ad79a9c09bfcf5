"""Adapts the number of threads of a pass to the load of the machine.

All threads of a pass wait for the slowest one after each phase. If another process uses one of the
cores, a pass with all threads may take far longer than with a single one. Which is faster is not
known in advance, so it is tried when passes are delayed.
"""

import time
from typing import Self

# A pass is delayed if it took this multiple of its first thread's CPU time …
_DELAYED = 1.4
# … and this number of consecutive delayed passes starts a trial.
_PASSES = 4
# Seconds until the next trial: initially, and at most after repeated failures.
_SHORTEST_S, _LONGEST_S = 2.0, 60.0


class ThreadChoice:
    """Policy: all threads or one, by the times of passes. Compares only passes of the same number
    of tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = most
        # Seconds of the observed consecutive passes, all of `_tokens` tokens.
        self._tokens = 0
        self._observed: list[float] = []
        # During a trial: seconds of passes of `_tokens` tokens before it.
        self._rival_s: float | None = None
        self._next_trial = 0.0
        self._interval_s = _SHORTEST_S

    @property
    def count(self) -> int:
        """Threads for the next pass."""
        return self._count

    def observe(self, tokens: int, wall_s: float, cpu_s: float, now: float) -> None:
        """Record a pass of `tokens` tokens that ended at `now`; cpu_s: CPU time of its first
        thread."""
        if self._most == 1:
            return
        if tokens != self._tokens:
            self._tokens = tokens
            self._observed.clear()
            if self._rival_s is not None:
                # Times are no longer comparable: end the trial without a change.
                self._end_trial(won=False, now=now)
        is_delayed = wall_s > _DELAYED * cpu_s
        if self._rival_s is None and self._count > 1 and not is_delayed:
            self._observed.clear()
            return
        self._observed.append(wall_s)
        if len(self._observed) < _PASSES:
            return
        # Ignore the first pass, whose caches are cold.
        typical = sorted(self._observed[1:])[len(self._observed[1:]) // 2]
        self._observed.clear()
        if self._rival_s is not None:
            self._end_trial(won=typical < self._rival_s, now=now)
        elif now >= self._next_trial:
            self._rival_s = typical
            self._switch()

    def _end_trial(self, won: bool, now: float) -> None:
        self._rival_s = None
        if won:
            self._interval_s = _SHORTEST_S
        else:
            self._switch()
            self._interval_s = min(2 * self._interval_s, _LONGEST_S)
        self._next_trial = now + self._interval_s

    def _switch(self) -> None:
        self._count = 1 if self._count > 1 else self._most


class Threads:
    """Applies `ThreadChoice` to the passes of one thread."""

    def __init__(self) -> None:
        import numba

        self._set = numba.set_num_threads
        self._choice = ThreadChoice(numba.get_num_threads())
        self._tokens = 0
        self._began = 0.0, 0.0

    def measured(self, tokens: int) -> Self:
        """A context manager around a pass of `tokens` tokens."""
        self._tokens = tokens
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.thread_time()

    def __exit__(self, *error: object) -> None:
        wall, cpu = self._began
        now = time.perf_counter()
        before = self._choice.count
        self._choice.observe(self._tokens, now - wall, time.thread_time() - cpu, now)
        if self._choice.count != before:
            self._set(self._choice.count)
