"""Uploads of several arrays in one copy."""

import numpy as np
import torch
from text_generation_shard.device.cuda.staging import pinned_upload


def test_arrays_arrive_as_they_were() -> None:
    generator = np.random.default_rng(0)
    arrays = [
        generator.integers(-(2**60), 2**60, (11, 3)),
        generator.random((5, 7), dtype=np.float32)[:, 2:4],
        generator.integers(0, 9, 11).astype(np.int32),
        np.empty(0, dtype=np.int64),
    ]
    found = pinned_upload(torch.device("cpu"))(arrays)
    for array, tensor in zip(arrays, found, strict=True):
        assert tensor.dtype == getattr(torch, array.dtype.name)
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
