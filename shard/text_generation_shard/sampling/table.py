"""The sampling parameters of all rows, and the columns of a step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from text_generation_process.sampling import DRAWING, NUMBERS, PENALTIES, Sampling
from torch import Tensor

from text_generation_shard.arrays import Array, Flags, Floats, Ints, Upload

SAMPLING_ROW = np.dtype(
    [
        *((name, np.float32) for name in NUMBERS),
        # uint64 seeds as the int64 of the same bits.
        ("seed", np.int64),
        ("is_sampling", np.bool_),
        ("is_penalising", np.bool_),
    ],
    align=True,
)
"""What kernels read of a row: the numbers of `Sampling`, of min_p its logarithm."""

# A smaller temperature or penalty could become 0 in float32, and the reciprocal of a larger penalty
# infinite. float32 holds integers up to 2^24 exactly; no vocabulary is larger.
_COLUMNS: dict[str, Callable[[float], float]] = {
    "temperature": lambda value: max(value, 1e-30),
    "top_k": lambda value: min(value, 1 << 24),
    "min_p": lambda value: math.log(value) if value > 0 else -math.inf,
    "repetition_penalty": lambda value: min(max(value, 1e-30), 1e30),
}


@dataclass(frozen=True, slots=True)
class Watermark:
    """The green share of the vocabulary (gamma), and the bias of green tokens (delta)."""

    gamma: float
    delta: float


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters of the choices of a step, on a device."""

    # [n] the choices that are drawn, and their numbers [n, DRAWING] float32 and seeds [n] int64.
    sampling_rows: Tensor
    drawn: Tensor
    seeds: Tensor
    # [m] the penalised choices, on the host, and their numbers [m, PENALTIES] float32.
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
        self.rows: Array = np.zeros(capacity, dtype=SAMPLING_ROW)
        # By row, if it has any: token ids and what is added to their scores.
        self._biases: dict[int, tuple[Ints, Floats]] = {}
        self._watermarked: set[int] = set()
        # By row, if it has any: tokens that end its text beside the model's end tokens.
        self.stop_token_ids: dict[int, frozenset[int]] = {}
        # The last columns and their rows: most steps have the rows of the previous step.
        self._last: tuple[Ints, SamplingColumns] | None = None
        self._last_biases: tuple[Ints, bytes, Biases] | None = None

    def set(self, row: int, params: Sampling, stop_token_ids: Sequence[int] = ()) -> None:
        """Set the parameters and stop tokens of a row."""
        self._last = self._last_biases = None
        numbers = [_COLUMNS.get(name, float)(getattr(params, name)) for name in NUMBERS]
        seed = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        self.rows[row] = (*numbers, seed, params.is_sampling, params.is_penalising)
        self._biases.pop(row, None)
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias, strict=True)
            self._biases[row] = np.array(token_ids), np.array(values, dtype=np.float32)
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
        own = self.rows[rows]
        sampling, penalised = own["is_sampling"].nonzero()[0], own["is_penalising"].nonzero()[0]
        drawn, penalties = _numbers(own[sampling], DRAWING), _numbers(own[penalised], PENALTIES)
        places, drawn_there, seeds, penalties_there = upload(
            [sampling, drawn, own["seed"][sampling], penalties]
        )
        return SamplingColumns(
            sampling_rows=places,
            drawn=drawn_there,
            seeds=seeds,
            penalised_rows=penalised,
            penalties=penalties_there,
        )

    def depends_on_tokens(self, rows: Ints) -> bool:
        """Whether the choice of one of these rows depends on its earlier tokens."""
        return bool(self.rows["is_penalising"][rows].any()) or bool(self.watermarked(rows))

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
            last = self._last_biases = (rows, early, self._biases_of(rows.tolist(), is_early))
        return last[2]

    def _biases_of(self, own: list[int], is_early: Flags) -> Biases:
        found = [(place, self._biases[row]) for place, row in enumerate(own) if row in self._biases]
        for place in np.flatnonzero(is_early).tolist():
            if stops := sorted(self.stop_token_ids.get(own[place], ())):
                found.append((place, (np.array(stops), np.full(len(stops), -np.inf, np.float32))))
        if not found:
            return _NO_BIASES
        places, kept = zip(*found, strict=True)
        token_ids, values = zip(*kept, strict=True)
        return Biases(
            np.repeat(places, [len(ids) for ids in token_ids]),
            np.concatenate(token_ids),
            np.concatenate(values),
        )


_NO_BIASES = Biases(
    np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
)


def _numbers(rows: Array, names: Sequence[str]) -> Floats:
    return np.stack([rows[name] for name in names], axis=1)
