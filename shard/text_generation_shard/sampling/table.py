"""The sampling parameters of all rows, and the columns of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from text_generation_process.sampling import Sampling
from torch import Tensor

from text_generation_shard.arrays import Flags, Floats, Ints, Upload

# A smaller temperature could become 0 in float32.
_MIN_TEMPERATURE = 1e-30
# The same for a penalty, whose reciprocal must be finite, too.
_LEAST_PENALTY, _MOST_PENALTY = 1e-30, 1e30
# float32 holds integers up to here exactly; no vocabulary is larger.
_LARGEST_TOP_K = 1 << 24


@dataclass(frozen=True, slots=True)
class Watermark:
    """The green share of the vocabulary (gamma), and the bias of green tokens (delta)."""

    gamma: float
    delta: float


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters of the choices of a step, on a device."""

    # [n] the choices that are drawn.
    sampling_rows: Tensor
    # [n, 5] float32: temperature, top_k, top_p, typical_p and the logarithm of min_p.
    drawn: Tensor
    # [n] uint64 seeds as int64 of the same bits.
    seeds: Tensor
    # Whether a drawn choice filters tokens, and whether one uses typical_p.
    is_filtering: bool
    is_typical: bool
    # [m] the penalised choices, on the host; [m, 3] float32: their repetition, frequency and
    # presence penalties.
    penalised_rows: Ints
    penalties: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Additions to the scores of a step, [b] each, on the host."""

    choices: Ints
    token_ids: Ints
    values: Floats


class SamplingTable:
    """Owns the sampling parameters of every row, on the host."""

    def __init__(self, capacity: int) -> None:
        # temperature, top_k, top_p, typical_p, log of min_p; repetition, frequency and presence
        # penalty.
        self.values: Floats = np.zeros((capacity, 8), dtype=np.float32)
        self.seeds: Ints = np.zeros(capacity, dtype=np.int64)
        # is_sampling, is_filtering, whether typical_p is on, is_penalising.
        self.flags: Flags = np.zeros((capacity, 4), dtype=np.bool_)
        self._biases: dict[int, tuple[tuple[int, float], ...]] = {}
        self._watermarked: set[int] = set()
        # By row, if it has any: tokens that end its text beside the model's end tokens.
        self.stop_token_ids: dict[int, frozenset[int]] = {}
        # The last columns and their rows: most steps have the rows of the previous step.
        self._last: tuple[Ints, SamplingColumns] | None = None
        self._last_biases: tuple[Ints, bytes, Biases] | None = None

    def set(self, row: int, params: Sampling, stop_token_ids: Sequence[int] = ()) -> None:
        """Set the parameters and stop tokens of a row."""
        self._last = self._last_biases = None
        self.values[row] = (
            max(params.temperature, _MIN_TEMPERATURE),
            min(params.top_k, _LARGEST_TOP_K),
            params.top_p,
            params.typical_p,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            min(max(params.repetition_penalty, _LEAST_PENALTY), _MOST_PENALTY),
            params.frequency_penalty,
            params.presence_penalty,
        )
        # uint64 seeds as the int64 of the same bits.
        self.seeds[row] = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        self.flags[row] = (
            params.is_sampling,
            params.is_filtering,
            params.typical_p < 1.0,
            params.is_penalising,
        )
        self._biases.pop(row, None)
        if params.logit_bias:
            self._biases[row] = params.logit_bias
        self._watermarked.discard(row)
        if params.watermark:
            self._watermarked.add(row)
        self.stop_token_ids.pop(row, None)
        if stop_token_ids:
            self.stop_token_ids[row] = frozenset(stop_token_ids)

    def columns(self, rows: Ints, upload: Upload) -> SamplingColumns:
        """The columns of a step whose choices [S] belong to `rows`; a row may have several.

        `rows` must not be modified afterwards: results are cached by its identity.
        """
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, self._gather(rows, upload))
        return self._last[1]

    def _gather(self, rows: Ints, upload: Upload) -> SamplingColumns:
        flags = self.flags[rows]
        sampling, penalised = np.flatnonzero(flags[:, 0]), np.flatnonzero(flags[:, 3])
        drawn, penalties = self.values[rows[sampling], :5], self.values[rows[penalised], 5:]
        places, drawn_there, seeds, penalties_there = upload(
            [sampling, drawn, self.seeds[rows[sampling]], penalties]
        )
        return SamplingColumns(
            sampling_rows=places,
            drawn=drawn_there,
            seeds=seeds,
            is_filtering=bool(flags[:, 1].any()),
            is_typical=bool(flags[:, 2].any()),
            penalised_rows=penalised,
            penalties=penalties_there,
        )

    def depends_on_tokens(self, rows: Ints) -> bool:
        """Whether the choice of one of these rows depends on its earlier tokens."""
        return bool(self.flags[rows, 3].any()) or bool(self.watermarked(rows))

    def watermarked(self, rows: Ints) -> Sequence[int]:
        """The watermarked choices of a step."""
        if not self._watermarked:
            return ()
        return [place for place, row in enumerate(rows.tolist()) if row in self._watermarked]

    def biases(self, rows: Ints, is_early: Flags) -> Biases:
        """The biases of a step's choices; see `columns`. Stop tokens get -inf where `is_early`
        [S]."""
        if not self._biases and not self.stop_token_ids:
            return _NO_BIASES
        early = is_early.tobytes() if self.stop_token_ids else b""
        last = self._last_biases
        if last is None or last[0] is not rows or last[1] != early:
            last = self._last_biases = (rows, early, self._biases_of(rows, is_early))
        return last[2]

    def _biases_of(self, rows: Ints, is_early: Flags) -> Biases:
        found = [
            (place, token, value)
            for place, row in enumerate(rows.tolist())
            for token, value in self._biases.get(row, ())
        ]
        found += [
            (place, token, -math.inf)
            for place in np.flatnonzero(is_early).tolist()
            for token in sorted(self.stop_token_ids.get(int(rows[place]), ()))
        ]
        if not found:
            return _NO_BIASES
        choices, token_ids, values = zip(*found, strict=True)
        return Biases(
            np.array(choices, dtype=np.int64),
            np.array(token_ids, dtype=np.int64),
            np.array(values, dtype=np.float32),
        )


_NO_BIASES = Biases(
    np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
)
