"""Uploads through a ring of buffers, which are not reused too early."""

import numpy as np
import torch
from text_generation_shard.device.cuda.staging import Uploads

from shard.tests.stream_device import LateBuffer


def test_arrays_arrive_as_they_were_in_one_copy_each_turn() -> None:
    made: list[LateBuffer] = []

    def make(nbytes: int) -> LateBuffer:
        made.append(LateBuffer(nbytes))
        return made[-1]

    upload = Uploads(torch.device("cpu"), make)
    generator, kept = np.random.default_rng(0), []
    for turn in range(70):
        arrays = [
            generator.integers(-(2**60), 2**60, (turn, 3)),
            generator.random((5, 7), dtype=np.float32)[:, 2:4],
            generator.integers(0, 9, 11 + turn).astype(np.int32),
            np.empty(0, dtype=np.int64),
        ]
        kept.append((arrays, upload(arrays)))
    for arrays, found in kept:
        for array, tensor in zip(arrays, found, strict=True):
            assert tensor.dtype == getattr(torch, array.dtype.name)
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
    # The most uploads of two steps: the host does not wait for a copy behind a step's kernels.
    assert len(made) >= 2 * 12


def test_a_buffer_grows_to_what_it_must_hold() -> None:
    made: list[int] = []

    def make(nbytes: int) -> LateBuffer:
        made.append(nbytes)
        return LateBuffer(nbytes)

    upload = Uploads(torch.device("cpu"), make)
    large = np.arange(100_000)
    for _ in range(70):
        (found,) = upload([large])
        assert np.array_equal(found.numpy(), large)
    assert made[-1] == 1 << 20
