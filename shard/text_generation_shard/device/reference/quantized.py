"""How weights are quantised: the numbers that stand for them in 8 or 4 bits.

In int8 and int4 only weights are quantised: activations and sums keep their type. In fp8 both
operands of a product are.
"""

import torch
from torch import Tensor

from text_generation_shard.device.base import ALL

GROUP: int = 32
"""Inputs that share a scale and a zero in int4, as in llama.cpp's Q4_0."""

# Rows of a part are whole panels of so many, and as many as have so many numbers at most: what is
# computed of them stays in the second-level cache.
_PANEL = 64
_FITTED_NUMBERS = 2**18
# Passes over a group that fit scale and zero to the whole numbers and these to those.
_INT4_FITS = 2


def parts_of(weight: Tensor, most: int = _FITTED_NUMBERS) -> tuple[Tensor, ...]:
    """The weight in parts of whole panels, of about `most` numbers, so that all that is computed of
    one stays in the cache, and that no copy in float32 of a large matrix is ever made."""
    return torch.split(weight, max(1, most // weight.shape[1] // _PANEL) * _PANEL)


def quantize_rows(
    weight: Tensor, dtype: torch.dtype, columns: slice = ALL
) -> tuple[Tensor, Tensor]:
    """Numbers int8 [N, K] and scale [N] of type `dtype`. Numbers of these columns alone, by the
    scales of whole rows."""
    wide = weight.float()
    scale = _rounded_scale(wide.abs().amax(dim=1) / 127, dtype).to(dtype)
    wide = wide[:, columns]
    return (wide / scale.float()[:, None]).round_().clamp_(-127, 127).char(), scale


def quantize_rows_float8(weight: Tensor, columns: slice = ALL) -> tuple[Tensor, Tensor]:
    """Numbers float8_e4m3fn [N, K] and scale [N] in float32: the largest of a row becomes the
    largest number there is (Micikevicius et al. 2022). columns: see `quantize_rows`."""
    wide = weight.float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = wide.abs().amax(dim=1).clamp_min_(1e-30) / largest
    wide = wide[:, columns]
    return (wide / scale[:, None]).to(torch.float8_e4m3fn), scale


def quantize_groups(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers int32 [N, K], scale and zero [N, K / 32] of type `dtype` with a small squared error.

    Starts from the least and the largest of each group, then alternates: scale and zero by least
    squares for the numbers, the nearest numbers for these. Each uses scale and zero as they
    are kept, so rounding them is part of what is fitted.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).clamp_min_(torch.finfo(torch.float32).tiny)
    scale, zero = _rounded_scale(scale, dtype), _rounded(low + 8 * scale, dtype)
    numbers = _nearest(groups, scale, zero)
    middle = groups.mean(dim=-1)
    for _ in range(_INT4_FITS):
        average = numbers.mean(dim=-1)
        spread = numbers.square().mean(dim=-1) - average.square()
        together = (numbers * groups).mean(dim=-1) - average * middle
        # A group of equal numbers says nothing about the scale.
        scale = _rounded_scale(torch.where(spread > 0, together / spread, scale), dtype)
        zero = _rounded(middle - scale * average, dtype)
        numbers = _nearest(groups, scale, zero)
    return numbers.add_(8).int().flatten(1), scale.to(dtype), zero.to(dtype)


def _rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is kept, and never 0: it is divided by."""
    kept, wide = torch.finfo(dtype), torch.finfo(torch.float32)
    return _rounded(scale.clamp_min(max(kept.tiny * kept.eps, wide.tiny)), dtype)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).float()


def _nearest(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The numbers from -8 to 7 that stand for the weights best."""
    return ((groups - zero[..., None]) / scale[..., None]).round_().clamp_(-8, 7)
