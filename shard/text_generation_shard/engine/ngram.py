"""Guesses of what a row writes next: what followed the last time it wrote the same.

A guess costs the time of one more token in the step. Whether it was right is found out by sampling
at its position as if nothing had been guessed: guesses change how fast tokens come, never which.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.engine.row_table import RowTable

# Tokens at the end of a row that must have occurred before: at most, at least, and at least where
# guesses are mostly wrong.
_LONGEST, _SHORTEST, _SHORTEST_DOUBTED = 4, 2, 3
# The share of right guesses that a row starts from, below which it is doubted, and how much of it
# the latest verification decides.
_FIRST_TRUST, _DOUBTED, _WEIGHT = 0.6, 0.5, 0.3
# So that its logarithm is a number, and not 0.
_LEAST_TRUST, _MOST_TRUST = 1e-6, 0.99
# Steps between two searches of a row for something that repeats, at most.
_MOST_MISSED = 4
# A doubted row that guessed wrong rests for this many steps, then twice as many, up to so many.
_FIRST_REST, _LONGEST_REST = 4, 128
# A row whose guesses do not pay tries one after so many steps, even if the last was right.
_TRIAL_REST = 8


class Guesser:
    """Owns how far each row's guesses are trusted.

    A row guesses as many tokens as are likely right often enough to pay for their time, one if none
    are; where that fails, only now and then: text that does not repeat pays for a wrong guess in a
    hundred steps or so.
    """

    def __init__(self, capacity: int, agree: Callable[[Ints], Ints]) -> None:
        """`agree` answers rank 0's numbers, on all ranks."""
        self._agree = agree
        self._trust = np.full(capacity, _FIRST_TRUST)
        # Steps a row has still to rest, how long it rested last for wrong guesses, and how often in
        # a row nothing was found to guess.
        self._rest = np.zeros(capacity, dtype=np.int64)
        self._last_rest = np.zeros(capacity, dtype=np.int64)
        self._misses = np.zeros(capacity, dtype=np.int64)

    def forget(self, row: int) -> None:
        """A row that is taken now knows nothing of what it held before."""
        self._trust[row] = _FIRST_TRUST
        self._rest[row] = self._last_rest[row] = self._misses[row] = 0

    def forget_all(self) -> None:
        """The same of all rows."""
        self._trust.fill(_FIRST_TRUST)
        for waits in (self._rest, self._last_rest, self._misses):
            waits.fill(0)

    def guess(
        self, table: RowTable, rows: Ints, limits_of: Callable[[Ints], Ints], price: float
    ) -> Ints | None:
        """Have the table hold guesses behind what is known of each row; how many of each [R], or
        None: none at all.

        `limits_of` says of some rows how many at most; a guess pays if it is right with a
        probability of `price`.
        """
        rest = self._rest[rows]
        awake = np.flatnonzero(rest == 0)
        self._rest[rows] = np.maximum(rest - 1, 0)
        if not len(awake):
            return None
        own = rows[awake]
        limits, trust = limits_of(own), np.clip(self._trust[own], _LEAST_TRUST, _MOST_TRUST)
        # The n-th guess is right if all before it are: trust ** n >= price.
        paying = (math.log(min(price, 1.0)) / np.log(trust)).astype(np.int64)
        limits = np.minimum(limits, np.maximum(paying, 1))
        found, guesses = _continuations(table, own, max(1, int(limits.max())))
        needed = np.where(trust < _DOUBTED, _SHORTEST_DOUBTED, _SHORTEST)
        has_found = found >= needed
        # Where nothing repeats, even looking for it every time is too much.
        self._misses[own] = np.where(has_found, 0, self._misses[own] + 1)
        wanted = np.where(has_found, limits, 0)
        is_trial = (wanted > 0) & (paying == 0)
        self._rest[own] = np.where(
            has_found, is_trial * _TRIAL_REST, np.minimum(self._misses[own], _MOST_MISSED)
        )
        if not wanted.any():
            return None
        if table.constraints:
            _cut_forbidden(table, own, wanted, guesses)
            # What a grammar allows only rank 0 knows.
            wanted = self._agree(wanted)
        row, step = np.nonzero(np.arange(guesses.shape[1]) < wanted[:, None])
        known = table.lens[own] + 1
        table.write(own[row], known[row] + step, guesses[row, step])
        counts = np.zeros(len(rows), dtype=np.int64)
        counts[awake] = wanted
        return counts if wanted.any() else None

    def learn(self, rows: Ints, guessed: Ints, right: Ints) -> None:
        """Of `guessed` [R] tokens of each row, the first `right` [R] were."""
        tried = np.flatnonzero(guessed)
        own, tries, hits = rows[tried], guessed[tried], right[tried]
        # Those behind the first wrong one were not tried.
        share = hits / np.minimum(hits + 1, tries)
        trust = self._trust[own] + _WEIGHT * (share - self._trust[own])
        self._trust[own] = trust
        rest, last = self._rest[own], self._last_rest[own]
        is_tired = (hits == 0) & (trust < _DOUBTED)
        last = np.where(is_tired, np.clip(2 * last, _FIRST_REST, _LONGEST_REST), last)
        self._rest[own] = np.where(is_tired, np.maximum(rest, last), rest)
        self._last_rest[own] = np.where(hits > 0, 0, last)


def _continuations(table: RowTable, rows: Ints, width: int) -> tuple[Any, Any]:
    """What followed the latest of the longest earlier occurrences of each row's last tokens:
    how many tokens were the same [R], up to _LONGEST, and the guesses [R, width]."""
    known = table.lens[rows] + 1
    longest = int(known.max())
    token_ids = table.token_ids[rows, :longest]
    row = np.arange(len(rows))
    # How many of the last tokens stand before and at each position but the last [R, longest].
    is_same = np.arange(longest) < known[:, None] - 1
    found = np.zeros(is_same.shape, dtype=np.int8)
    for count in range(min(_LONGEST, longest)):
        last = token_ids[row, np.maximum(known - 1 - count, 0)]
        is_same[:, :count] = False
        is_same[:, count:] &= token_ids[:, : longest - count] == last[:, None]
        is_same &= (known > count)[:, None]
        found += is_same
    # The last position with the most of them.
    at = longest - 1 - found[:, ::-1].argmax(axis=1)
    # A repetition that is shorter than the guess goes on in itself.
    period = np.maximum(known - 1 - at, 1)
    after = at[:, None] + 1 + np.arange(width) % period[:, None]
    guesses = token_ids[row[:, None], np.minimum(after, longest - 1)]
    return found[row, at], guesses


def _cut_forbidden(table: RowTable, rows: Ints, counts: Ints, guesses: Any) -> None:
    """Drop the guesses [R, width] of each row from the first that its grammar does not allow."""
    for index in np.flatnonzero(counts).tolist():
        if (constraint := table.constraints.get(int(rows[index]))) is not None:
            own = guesses[index, : int(counts[index])].tolist()
            counts[index] = len(constraint.allowed(own))
