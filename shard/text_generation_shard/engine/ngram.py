"""Speculation by n-grams: a row's last tokens occurred before, and what followed is drafted.

A draft token costs the time of one more token in the step. It is verified by sampling at its
position as if nothing were drafted, so draft tokens change the speed of tokens, never the tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from text_generation_shard.arrays import Ints
from text_generation_shard.engine.row_table import RowTable

# Length of the n-gram: longest, shortest, and shortest for a row of a low acceptance rate.
_LONGEST, _SHORTEST, _SHORTEST_AT_LOW_RATE = 4, 2, 3
# The acceptance rate is a moving average of the share of right draft tokens: its first value, the
# value below which it is low, and the weight of the latest verification.
_FIRST_RATE, _LOW_RATE, _WEIGHT = 0.6, 0.5, 0.3
# Keeps the logarithm of acceptance rate finite and not 0.
_LEAST_RATE, _MOST_RATE = 1e-6, 0.99
# Most steps between two searches of a row.
_MOST_MISSED = 4
# Steps without draft tokens after a wrong one, at a low acceptance rate; doubled each time, up to
# the second.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 4, 128
# Steps between the draft tokens of a row whose draft tokens do not pay.
_TRIAL_BACKOFF = 8


class Drafter:
    """Owns the acceptance rate in each row's draft tokens.

    A row gets as many draft tokens as pay for their time on average, and at least one. A row whose
    draft tokens are wrong gets none for longer and longer.
    """

    def __init__(self, capacity: int, agree: Callable[[Ints], Ints]) -> None:
        """`agree` returns rank 0's numbers on all ranks."""
        self._agree = agree
        self._rate = np.full(capacity, _FIRST_RATE)
        # Steps left to rest, the length of the last rest after a wrong draft token, and the number
        # of consecutive searches without a result.
        self._backoff = np.zeros(capacity, dtype=np.int64)
        self._last_backoff = np.zeros(capacity, dtype=np.int64)
        self._misses = np.zeros(capacity, dtype=np.int64)

    def forget(self, rows: int | slice = slice(None)) -> None:
        """Reset a row for a new request, or all rows."""
        self._rate[rows] = _FIRST_RATE
        for waits in (self._backoff, self._last_backoff, self._misses):
            waits[rows] = 0

    def draft(self, table: RowTable, rows: Ints, limits: Ints, price: float) -> Ints | None:
        """Write draft tokens into the table behind the known tokens of each row; the number of each
        [R], at most its limit, or None if there are none. A draft token pays if it is right with a
        probability of at least `price`."""
        backoff = self._backoff[rows]
        awake = np.flatnonzero(backoff == 0)
        self._backoff[rows] = np.maximum(backoff - 1, 0)
        if not len(awake):
            return None
        own = rows[awake]
        rate = np.clip(self._rate[own], _LEAST_RATE, _MOST_RATE)
        # The n-th draft token is right if all before it are: acceptance rate ** n >= price.
        paying = (math.log(min(price, 1.0)) / np.log(rate)).astype(np.int64)
        limits = np.minimum(limits[awake], np.maximum(paying, 1))
        found, draft_tokens = _continuations(table, own, max(1, int(limits.max())))
        needed = np.where(rate < _LOW_RATE, _SHORTEST_AT_LOW_RATE, _SHORTEST)
        has_found = found >= needed
        # Where nothing repeats, searching in every step costs too much.
        self._misses[own] = np.where(has_found, 0, self._misses[own] + 1)
        wanted = np.where(has_found, limits, 0)
        is_trial = (wanted > 0) & (paying == 0)
        self._backoff[own] = np.where(
            has_found, is_trial * _TRIAL_BACKOFF, np.minimum(self._misses[own], _MOST_MISSED)
        )
        if not wanted.any():
            return None
        if table.constraints:
            _cut_forbidden(table, own, wanted, draft_tokens)
            # Only rank 0 knows what a grammar allows.
            wanted = self._agree(wanted)
        row, step = np.nonzero(np.arange(draft_tokens.shape[1]) < wanted[:, None])
        known = table.lens[own] + 1
        table.token_ids[own[row], known[row] + step] = draft_tokens[row, step]
        counts = np.zeros(len(rows), dtype=np.int64)
        counts[awake] = wanted
        return counts if wanted.any() else None

    def learn(self, rows: Ints, drafted: Ints, right: Ints) -> None:
        """Of `drafted` [R] tokens of each row, the first `right` [R] were right."""
        tried = np.flatnonzero(drafted)
        own, tries, hits = rows[tried], drafted[tried], right[tried]
        # Draft tokens behind the first wrong one were not tried.
        share = hits / np.minimum(hits + 1, tries)
        rate = self._rate[own] + _WEIGHT * (share - self._rate[own])
        self._rate[own] = rate
        backoff, last = self._backoff[own], self._last_backoff[own]
        backs_off = (hits == 0) & (rate < _LOW_RATE)
        last = np.where(backs_off, np.clip(2 * last, _FIRST_BACKOFF, _LONGEST_BACKOFF), last)
        self._backoff[own] = np.where(backs_off, np.maximum(backoff, last), backoff)
        self._last_backoff[own] = np.where(hits > 0, 0, last)


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
    # A repetition shorter than the draft tokens is continued periodically.
    period = np.maximum(known - 1 - at, 1)
    after = at[:, None] + 1 + np.arange(width) % period[:, None]
    draft_tokens = token_ids[row[:, None], np.minimum(after, longest - 1)]
    return found[row, at], draft_tokens


def _cut_forbidden(table: RowTable, rows: Ints, counts: Ints, draft_tokens: Any) -> None:
    """Cut each row's draft tokens [R, width] at the first token that its grammar forbids."""
    for index in np.flatnonzero(counts).tolist():
        if (constraint := table.constraints.get(int(rows[index]))) is not None:
            own = draft_tokens[index, : int(counts[index])].tolist()
            counts[index] = len(constraint.allowed(own))
