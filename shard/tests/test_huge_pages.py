"""Weights in huge pages: which pages, the conversion, and unchanged contents."""

import mmap
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from text_generation_shard.device.cpu import huge_pages
from text_generation_shard.device.cpu.huge_pages import PAGE_BYTES, collapse, pages_of
from text_generation_shard.device.cpu.kernels import are_vectors_wide

from shard.tests.driver import load_engine

HALF = PAGE_BYTES // 2


@pytest.mark.parametrize(
    ("regions", "pages"),
    [
        ([], []),
        ([(0, PAGE_BYTES)], [0]),
        # Two regions that together fill half a page, and one that does not.
        ([(10, HALF // 2), (HALF, HALF // 2), (5 * PAGE_BYTES, HALF - 1)], [0]),
        # A region across pages fills too little of the last one.
        ([(HALF, 2 * PAGE_BYTES)], [0, PAGE_BYTES, 2 * PAGE_BYTES]),
        ([(HALF + 1, PAGE_BYTES + HALF)], [PAGE_BYTES]),
    ],
)
def test_pages_that_are_filled_by_half(regions: list[tuple[int, int]], pages: list[int]) -> None:
    assert pages_of(regions) == pages


def huge_bytes() -> int:
    """Bytes of huge pages of this process, if the system counts them."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHuge"))


def has_collapse() -> bool:
    """Whether the system collapses pages, checked without the code under test."""
    memory = mmap.mmap(-1, 2 * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"1" * len(memory))
    try:
        memory.madvise(25)
    except OSError:
        return False
    return True


@pytest.mark.skipif(platform.system() != "Linux", reason="madvise of Linux")
def test_what_lies_there_stays_as_it_is() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 6 * PAGE_BYTES, flags=flags)
    numbers = np.frombuffer(memory, np.int64)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    numbers[:] = np.arange(len(numbers))
    memory.madvise(mmap.MADV_HUGEPAGE)
    # Whole pages of this mapping only.
    start = -(-numbers.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    pages, before = pages_of([(start, 5 * PAGE_BYTES)]), huge_bytes()
    assert len(pages) == 5
    done = collapse(pages)
    assert (numbers == np.arange(len(numbers))).all()
    assert bool(done) == has_collapse()
    assert huge_bytes() - before >= done * PAGE_BYTES


def test_nothing_is_tried_for_long_where_it_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses without a mapping."""
    memory = mmap.mmap(-1, 500 * PAGE_BYTES, prot=mmap.PROT_READ)
    numbers = np.frombuffer(memory, np.uint8)
    pages = pages_of([(numbers.ctypes.data, numbers.nbytes)])
    del numbers
    memory.close()
    tried: list[float] = []
    monkeypatch.setattr(huge_pages.time, "sleep", tried.append)
    assert collapse(pages) == 0
    assert len(tried) < 10


def test_the_weights_that_every_pass_reads_are_known(checkpoint: Callable[[str], Path]) -> None:
    engine = load_engine(checkpoint("llama3"), dtype="bfloat16")
    config = engine.model.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.hidden_size * (heads + config.num_heads * config.head_dim)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    numbers = config.num_layers * layer + config.vocab_size * config.hidden_size
    nbytes = (1.5 if are_vectors_wide() else 2) * numbers
    # Outputs are padded to whole vectors.
    assert 0 <= sum(size for _, size in engine.device._weights) - nbytes < 0.1 * numbers
