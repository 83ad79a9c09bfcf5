"""How many threads a pass uses while others want the cores as well.

All threads of a kernel wait for the slowest, some hundred times in a pass. Where another process
has one of the cores, that makes a pass many times slower than a single thread, which waits for
nobody. Nothing says beforehand which is better: it is tried when a pass was kept waiting.
"""

import time
from typing import Self

# A pass that took this many times the processor time of its first thread was kept waiting …
_WAITED = 1.4
# … and so many in turn are no accident.
_PASSES = 4
# Seconds until the other number is tried again: at first, and at most, when it keeps losing.
_SHORTEST_S, _LONGEST_S = 2.0, 60.0


class ThreadChoice:
    """Policy: all threads or one, from what passes took. Compares passes of as many tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = most
        # Seconds of the passes in turn that are being looked at, all of `_tokens` tokens.
        self._tokens = 0
        self._looked_at: list[float] = []
        # While the other number is tried: what passes of `_tokens` tokens took before.
        self._rival_s: float | None = None
        self._next_trial = 0.0
        self._interval_s = _SHORTEST_S

    @property
    def count(self) -> int:
        """For the next pass."""
        return self._count

    def observe(self, tokens: int, wall_s: float, cpu_s: float, now: float) -> None:
        """A pass of `tokens` tokens ended at `now`; cpu_s: what its first thread computed."""
        if self._most == 1:
            return
        if tokens != self._tokens:
            self._tokens = tokens
            self._looked_at.clear()
            if self._rival_s is not None:
                # Nothing to compare with any more: as it was before the trial.
                self._end_trial(won=False, now=now)
        is_kept_waiting = wall_s > _WAITED * cpu_s
        if self._rival_s is None and self._count > 1 and not is_kept_waiting:
            self._looked_at.clear()
            return
        self._looked_at.append(wall_s)
        if len(self._looked_at) < _PASSES:
            return
        # Of the first the caches know little.
        typical = sorted(self._looked_at[1:])[len(self._looked_at[1:]) // 2]
        self._looked_at.clear()
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
    """Has the passes of one thread run on as many threads as `ThreadChoice` says."""

    def __init__(self) -> None:
        import numba

        self._set = numba.set_num_threads
        self._choice = ThreadChoice(numba.get_num_threads())
        self._tokens = 0
        self._began = 0.0, 0.0

    def measured(self, tokens: int) -> Self:
        """Around a pass of so many tokens."""
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
