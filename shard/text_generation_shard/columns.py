"""How each row's tokens are chosen: values of a request, a table of rows, columns of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below it float32 arithmetic may take a temperature for 0.
_MIN_TEMPERATURE = 1e-30
# float32 holds integers up to here exactly; no vocabulary is larger.
_LARGEST_TOP_K = 1 << 24


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen; see NextTokenChooserParameters. Defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are drawn, or the best one is taken."""
        return self.do_sample or self.temperature != 1.0 or self.is_filtering

    @property
    def is_filtering(self) -> bool:
        """Whether some tokens can not be drawn."""
        return self.top_k != 0 or self.top_p < 1.0 or self.typical_p < 1.0

    @property
    def is_penalising(self) -> bool:
        """Whether tokens that occurred are treated differently."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Watermark:
    """Share of the vocabulary that is green, and what green tokens get."""

    gamma: float
    delta: float


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters of the S choices of a step, on the device; only who needs something has it."""

    # [n] choices that are drawn, and their parameters [n, 1]; seeds [n] are the int64 of the bits.
    sampling_rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    typical_p: Tensor
    seeds: Tensor
    # Whether some of them can not draw everything, and by which parameters.
    is_filtering: bool
    is_typical: bool
    # [m] choices that are penalised, and their parameters [m, 1]; the former on the host.
    penalised_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    # [b] which choice, which token, how much.
    bias_rows: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    # Choices that are watermarked.
    watermarked_rows: list[int]


class SamplingTable:
    """Owns the parameters of every row; a step's columns are gathered from it, row by row never."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        # temperature, top_k, top_p, typical_p, repetition, frequency and presence penalty.
        self._values = torch.zeros(capacity, 7)
        self._seeds = torch.zeros(capacity, dtype=torch.int64)
        # is_sampling, is_filtering, whether typical_p is on, is_penalising.
        self._flags = torch.zeros(capacity, 4, dtype=torch.bool)
        self._biases: dict[int, tuple[tuple[int, float], ...]] = {}
        self._watermarked: set[int] = set()
        # The columns gathered last, and of which rows: most steps have those of the step before.
        self._last: tuple[Tensor, SamplingColumns] | None = None

    def set(self, row: int, params: SamplingParams) -> None:
        """The parameters of a row that is taken now."""
        self._last = None
        self._values[row] = torch.tensor(
            (
                max(params.temperature, _MIN_TEMPERATURE),
                min(params.top_k, _LARGEST_TOP_K),
                params.top_p,
                params.typical_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        )
        # uint64 seeds as the int64 of the same bits.
        self._seeds[row] = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        self._flags[row] = torch.tensor(
            (
                params.is_sampling,
                params.is_filtering,
                params.typical_p < 1.0,
                params.is_penalising,
            )
        )
        self._biases.pop(row, None)
        if params.logit_bias:
            self._biases[row] = params.logit_bias
        self._watermarked.discard(row)
        if params.watermark:
            self._watermarked.add(row)

    def columns(self, rows: Tensor) -> SamplingColumns:
        """The columns of a step whose choices [S] belong to `rows`; a row may have several.

        A tensor given here must not be changed afterwards.
        """
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, self._gather(rows))
        return self._last[1]

    def _gather(self, rows: Tensor) -> SamplingColumns:
        device = self._device
        flags = self._flags[rows]
        sampling, penalised = flags[:, 0].nonzero()[:, 0], flags[:, 3].nonzero()[:, 0]
        drawn = self._values[rows[sampling]].to(device)
        punished = self._values[rows[penalised]].to(device)
        bias = self._bias_of(rows)
        watermarked = self._watermarked
        return SamplingColumns(
            sampling_rows=sampling.to(device),
            temperature=drawn[:, 0:1],
            top_k=drawn[:, 1:2].long(),
            top_p=drawn[:, 2:3],
            typical_p=drawn[:, 3:4],
            seeds=self._seeds[rows[sampling]],
            is_filtering=bool(flags[:, 1].any()),
            is_typical=bool(flags[:, 2].any()),
            penalised_rows=penalised,
            repetition=punished[:, 4:5],
            frequency=punished[:, 5:6],
            presence=punished[:, 6:7],
            bias_rows=torch.tensor([row for row, _, _ in bias], dtype=torch.int64, device=device),
            bias_ids=torch.tensor(
                [token for _, token, _ in bias], dtype=torch.int64, device=device
            ),
            bias_values=torch.tensor(
                [value for _, _, value in bias], dtype=torch.float32, device=device
            ),
            watermarked_rows=[row for row, item in enumerate(rows.tolist()) if item in watermarked]
            if watermarked
            else [],
        )

    def _bias_of(self, rows: Tensor) -> Sequence[tuple[int, int, float]]:
        if not self._biases:
            return ()
        return [
            (place, token, value)
            for place, row in enumerate(rows.tolist())
            for token, value in self._biases.get(row, ())
        ]
