"""How the CUDA device launches its kernels; nothing is computed."""

from typing import Any

import numpy as np
import pytest
import torch
from text_generation_process.sampling import Sampling
from text_generation_shard.arrays import plain_upload
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.cuda import operators, sampler
from text_generation_shard.sampling import SamplingTable

META = torch.device("meta")


def test_a_tensor_with_gaps_is_refused() -> None:
    """The kernels have no strides."""
    device = operators.TritonDevice(META, torch.float32, DeviceOptions("float32", "float32"))
    heads = torch.empty(2, 3, 16, device=META)
    with pytest.raises(AssertionError, match="strides"):
        device.add_norm(heads[:, 1], None, 1.0, torch.empty(16, device=META), 1e-5)


@pytest.mark.parametrize("size", [1, 20, 64, 100, 300, 5000])
def test_numbers_changed_in_place_have_a_thread_each(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads with the same number, the second may load what the first has stored."""
    asked: dict[str, dict[str, Any]] = {}

    def launch(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        asked[kernel.__name__] = options

    for module in (operators, sampler):
        monkeypatch.setattr(module, "launch", launch)
    device = operators.TritonDevice(META, torch.bfloat16, DeviceOptions("bfloat16", "bfloat16"))
    hidden = torch.empty(2, size, dtype=torch.bfloat16, device=META)
    device.add_norm(hidden, hidden, 1.0, torch.empty(size, device=META), 1e-5)
    table, rows = SamplingTable(2), np.arange(2)
    for row in range(2):
        table.set(row, Sampling(do_sample=True))
    columns = table.columns(rows, plain_upload(META))
    sampler.choose(torch.empty(2, size, device=META), columns, torch.empty(2, device=META))
    for name, tile in (("add_norm", "SIZE_PAD"), ("draw", "TILE")):
        # All threads of a warp load at the same time.
        assert 32 * asked[name]["num_warps"] <= max(32, asked[name][tile])
