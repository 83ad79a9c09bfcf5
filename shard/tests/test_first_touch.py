"""Pages of the KV cache are there before they are written, and nothing in them changes."""

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from text_generation_shard import first_touch
from text_generation_shard.first_touch import FirstTouch, Parts
from text_generation_shard.kv_cache import untouched

from shard.tests.driver import Driver, load_engine

PAGE = 4096
# 6 parts of 4096 blocks: 24 MiB.
COUNT, NUM_BLOCKS, BLOCK_BYTES = 6, 4096, 1024

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="madvise of Linux")


def resident_bytes(address: int, size: int) -> int:
    """How much is there of so many bytes from a page on."""
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
    return sum(page & 1 for page in pages) * PAGE


def reaches(condition: Callable[[], bool]) -> bool:
    """Whether it comes to that within some seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def some_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not of 512 MiB but of 1024 blocks."""
    monkeypatch.setattr(first_touch, "_AHEAD_BYTES", COUNT * 1024 * BLOCK_BYTES)
    monkeypatch.setattr(first_touch, "_PIECE_BYTES", COUNT * 8 * BLOCK_BYTES)
    yield


def test_regions_are_the_pages_of_some_blocks() -> None:
    parts = Parts(10 * PAGE, count=2, num_blocks=10, block_bytes=PAGE // 2)
    assert list(parts.regions(0, 10)) == [(10 * PAGE, 5 * PAGE), (15 * PAGE, 5 * PAGE)]
    assert list(parts.regions(3, 4)) == [(11 * PAGE, PAGE), (16 * PAGE, PAGE)]
    # A part that begins within a page.
    parts = Parts(0, count=2, num_blocks=3, block_bytes=PAGE // 2)
    assert list(parts.regions(0, 1)) == [(0, PAGE), (PAGE, PAGE)]
    assert list(parts.regions(1, 3)) == [(0, 2 * PAGE), (2 * PAGE, PAGE)]


@pytest.mark.usefixtures("some_ahead")
def test_pages_are_there_as_far_ahead_as_they_should_be_and_no_further() -> None:
    memory = untouched(COUNT * NUM_BLOCKS * BLOCK_BYTES)
    parts, size = Parts(memory.data_ptr(), COUNT, NUM_BLOCKS, BLOCK_BYTES), len(memory)
    memory[5], memory[-1] = 7, 9
    is_busy = threading.Event()
    touch = FirstTouch(is_busy.is_set)
    threading.Thread(target=touch.run, daemon=True).start()
    touch.follow(parts)
    some = COUNT * 1024 * BLOCK_BYTES
    assert reaches(lambda: resident_bytes(parts.address, size) >= some)
    time.sleep(0.2)
    assert resident_bytes(parts.address, size) <= some + 2 * PAGE
    # Nothing while somebody computes.
    is_busy.set()
    touch.note_use(2000)
    time.sleep(0.3)
    assert resident_bytes(parts.address, size) <= some + 2 * PAGE
    is_busy.clear()
    more = COUNT * 3024 * BLOCK_BYTES
    assert reaches(lambda: resident_bytes(parts.address, size) >= more)
    # All of them at most.
    touch.note_use(NUM_BLOCKS)
    assert reaches(lambda: resident_bytes(parts.address, size) == size)
    assert (memory[5], memory[-1], int(memory.sum())) == (7, 9, 16)
    # The next cache begins anew, and the last is left alone.
    touch.follow(None)
    other = untouched(COUNT * NUM_BLOCKS * BLOCK_BYTES)
    touch.follow(Parts(other.data_ptr(), COUNT, NUM_BLOCKS, BLOCK_BYTES))
    assert reaches(lambda: resident_bytes(other.data_ptr(), size) >= some)
    touch.follow(None)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_engine_tells_where_its_blocks_are(
    dtype: str, checkpoint: Callable[[str], Path]
) -> None:
    """The memory of both attentions, and how far it is in use."""
    engine = load_engine(checkpoint("llama3"), dtype=dtype)
    parts = engine.first_touch._parts
    assert parts is not None
    size = parts.count * parts.num_blocks * parts.block_bytes
    assert resident_bytes(parts.address, size) < size / 2
    threading.Thread(target=engine.first_touch.run, daemon=True).start()
    assert reaches(lambda: resident_bytes(parts.address, size) >= size)
    # What is written comes after, and is as it would be.
    driver = Driver(engine)
    driver.add([driver.request(0, range(3, 90), max_new_tokens=4)])
    driver.run()
    other = Driver(load_engine(checkpoint("llama3"), dtype=dtype))
    other.add([other.request(0, range(3, 90), max_new_tokens=4)])
    other.run()
    assert driver.tokens == other.tokens
    engine.first_touch.follow(None)


def test_a_system_that_can_not_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_touch, "_POPULATE_WRITE", 12345)
    memory = untouched(2**20)
    touch = FirstTouch(lambda: False)
    thread = threading.Thread(target=touch.run, daemon=True)
    thread.start()
    with caplog.at_level("INFO"):
        touch.follow(Parts(memory.data_ptr(), 1, 16, 2**16))
        thread.join(10)
    assert not thread.is_alive() and "does not bring pages" in caplog.text
    assert resident_bytes(memory.data_ptr(), 2**20) == 0
