"""Speculation by n-grams: a row's last tokens occurred before, and what followed is guessed.

A guess costs the time of one more token in the step. It is verified by sampling at its position as
if nothing were guessed, so guesses change the speed of tokens, never the tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.engine.row_table import RowTable

# Length of the n-gram: longest, shortest, and shortest for a row that is doubted.
_LONGEST, _SHORTEST, _SHORTEST_DOUBTED = 4, 2, 3
# Trust is a moving average of the share of right guesses: its first value, the value below which a
# row is doubted, and the weight of the latest verification.
_FIRST_TRUST, _DOUBTED, _WEIGHT = 0.6, 0.5, 0.3
# Keeps the logarithm of trust finite and not 0.
_LEAST_TRUST, _MOST_TRUST = 1e-6, 0.99
# Most steps between two searches of a row.
_MOST_MISSED = 4
# Steps that a doubted row rests after a wrong guess; doubled each time, up to the second.
_FIRST_REST, _LONGEST_REST = 4, 128
# Steps between the guesses of a row whose guesses do not pay.
_TRIAL_REST = 8


class Guesser:
    """Owns the trust in each row's guesses.

    A row guesses as many tokens as pay for their time on average, and at least one. A row whose
    guesses are wrong rests between them for longer and longer.
    """

    def __init__(self, capacity: int, agree: Callable[[Ints], Ints]) -> None:
        """`agree` returns rank 0's numbers on all ranks."""
        self._agree = agree
        self._trust = np.full(capacity, _FIRST_TRUST)
        # Steps left to rest, the length of the last rest after a wrong guess, and the number of
        # consecutive searches without a result.
        self._rest = np.zeros(capacity, dtype=np.int64)
        self._last_rest = np.zeros(capacity, dtype=np.int64)
        self._misses = np.zeros(capacity, dtype=np.int64)

    def forget(self, row: int) -> None:
        """Reset a row for a new request."""
        self._trust[row] = _FIRST_TRUST
        self._rest[row] = self._last_rest[row] = self._misses[row] = 0

    def forget_all(self) -> None:
        """Reset all rows."""
        self._trust.fill(_FIRST_TRUST)
        for waits in (self._rest, self._last_rest, self._misses):
            waits.fill(0)

    def guess(
        self, table: RowTable, rows: Ints, limits_of: Callable[[Ints], Ints], price: float
    ) -> Ints | None:
        """Write guesses into the table behind the known tokens of each row; the number of each [R],
        or None if there are none.

        `limits_of`: the most guesses of given rows. A guess pays if it is right with a probability
        of at least `price`.
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
        # Where nothing repeats, searching in every step costs too much.
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
            # Only rank 0 knows what a grammar allows.
            wanted = self._agree(wanted)
        row, step = np.nonzero(np.arange(guesses.shape[1]) < wanted[:, None])
        known = table.lens[own] + 1
        table.write(own[row], known[row] + step, guesses[row, step])
        counts = np.zeros(len(rows), dtype=np.int64)
        counts[awake] = wanted
        return counts if wanted.any() else None

    def learn(self, rows: Ints, guessed: Ints, right: Ints) -> None:
        """Of `guessed` [R] tokens of each row, the first `right` [R] were right."""
        tried = np.flatnonzero(guessed)
        own, tries, hits = rows[tried], guessed[tried], right[tried]
        # Guesses behind the first wrong one were not tried.
        share = hits / np.minimum(hits + 1, tries)
        trust = self._trust[own] + _WEIGHT * (share - self._trust[own])
        self._trust[own] = trust
        rest, last = self._rest[own], self._last_rest[own]
        is_tired = (hits == 0) & (trust < _DOUBTED)
        last = np.where(is_tired, np.clip(2 * last, _FIRST_REST, _LONGEST_REST), last)
        self._rest[own] = np.where(is_tired, np.maximum(rest, last), rest)
        self._last_rest[own] = np.where(hits > 0, 0, last)


def _continuations(table: RowTable, rows: Ints, width: int) -> tuple[Any, Any]:
    """Find the longest n-gram at each row's end that occurred before, and its latest occurrence:
    the length of the n-gram [R], up to _LONGEST, and the tokens that followed [R, width]."""
    known = table.lens[rows] + 1
    longest = int(known.max())
    token_ids = table.token_ids[rows, :longest]
    row = np.arange(len(rows))
    # Length of the match that ends at each position but the last [R, longest].
    is_same = np.arange(longest) < known[:, None] - 1
    found = np.zeros(is_same.shape, dtype=np.int8)
    for count in range(min(_LONGEST, longest)):
        last = token_ids[row, np.maximum(known - 1 - count, 0)]
        is_same[:, :count] = False
        is_same[:, count:] &= token_ids[:, : longest - count] == last[:, None]
        is_same &= (known > count)[:, None]
        found += is_same
    # The last position with the longest match.
    at = longest - 1 - found[:, ::-1].argmax(axis=1)
    # A repetition shorter than the guess is continued periodically.
    period = np.maximum(known - 1 - at, 1)
    after = at[:, None] + 1 + np.arange(width) % period[:, None]
    guesses = token_ids[row[:, None], np.minimum(after, longest - 1)]
    return found[row, at], guesses


def _cut_forbidden(table: RowTable, rows: Ints, counts: Ints, guesses: Any) -> None:
    """Cut each row's guesses [R, width] at the first token that its grammar forbids."""
    for index in np.flatnonzero(counts).tolist():
        if (constraint := table.constraints.get(int(rows[index]))) is not None:
            own = guesses[index, : int(counts[index])].tolist()
            counts[index] = len(constraint.allowed(own))
