"""Pages of the KV cache are populated in advance, and their contents do not change."""

import ctypes
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from text_generation_shard.device.cpu import first_touch
from text_generation_shard.device.cpu.first_touch import FirstTouch, Parts, Passes

from shard.tests.driver import Driver, load_engine

PAGE = 4096
# 6 parts of 4096 blocks: 24 MiB.
COUNT, NUM_BLOCKS, BLOCK_BYTES = 6, 4096, 1024

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or (HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text()),
    reason="madvise of Linux, and pages that are counted one by one",
)


def resident_bytes(address: int, size: int) -> int:
    """Resident bytes within a page-aligned range."""
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
    return sum(page & 1 for page in pages) * PAGE


@pytest.fixture
def some_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Populate 1024 blocks ahead instead of 512 MiB."""
    monkeypatch.setattr(first_touch, "_AHEAD_BYTES", COUNT * 1024 * BLOCK_BYTES)
    monkeypatch.setattr(first_touch, "_PIECE_BYTES", COUNT * 8 * BLOCK_BYTES)
    yield


def test_regions_are_the_pages_of_some_blocks() -> None:
    parts = Parts(10 * PAGE, count=2, num_blocks=10, block_bytes=PAGE // 2)
    assert list(parts.regions(0, 10)) == [(10 * PAGE, 5 * PAGE), (15 * PAGE, 5 * PAGE)]
    assert list(parts.regions(3, 4)) == [(11 * PAGE, PAGE), (16 * PAGE, PAGE)]
    # A part that does not begin at a page.
    parts = Parts(0, count=2, num_blocks=3, block_bytes=PAGE // 2)
    assert list(parts.regions(0, 1)) == [(0, PAGE), (PAGE, PAGE)]
    assert list(parts.regions(1, 3)) == [(0, 2 * PAGE), (2 * PAGE, PAGE)]


@pytest.mark.usefixtures("some_ahead")
def test_pages_are_there_as_far_ahead_as_they_should_be_and_no_further() -> None:
    touch = FirstTouch(lambda: False)
    touch.catch_up()  # there is nothing
    memory = touch.allocate(COUNT, NUM_BLOCKS, BLOCK_BYTES)
    address, size = memory.data_ptr(), len(memory)
    memory[5], memory[-1] = 7, 9
    there = []
    for num_used in (0, 2000, 2010, 2904, NUM_BLOCKS - 1100, NUM_BLOCKS - 1000, NUM_BLOCKS):
        touch.note_use(num_used)
        touch.catch_up()
        there.append(resident_bytes(address, size) - PAGE)
    blocks = [1024, 3024, 3024, 3928, 3928, NUM_BLOCKS, NUM_BLOCKS]
    assert there[:-2] == [COUNT * count * BLOCK_BYTES for count in blocks[:-2]]
    assert there[-2:] == [size - PAGE] * 2
    assert (memory[5], memory[-1], int(memory.sum())) == (7, 9, 16)
    # The next cache starts without pages, and the previous one is not populated further.
    other = touch.allocate(COUNT, NUM_BLOCKS, BLOCK_BYTES)
    touch.catch_up()
    assert resident_bytes(other.data_ptr(), size) == COUNT * 1024 * BLOCK_BYTES
    # Another cache gets its first pages immediately, without the thread.
    third = touch.allocate(COUNT, NUM_BLOCKS, BLOCK_BYTES, num_first=100)
    assert resident_bytes(third.data_ptr(), size) == COUNT * 100 * BLOCK_BYTES


def test_passes_are_computed_until_none_has_begun_since_the_last_question() -> None:
    passes = Passes()
    assert not passes.are_computed()
    with passes:
        assert passes.are_computed() and passes.are_computed()
    assert not passes.are_computed()
    with passes:
        pass
    assert passes.are_computed() and not passes.are_computed()


@pytest.mark.usefixtures("some_ahead")
def test_whoever_computes_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread polls before each part; once busy, it waits for several idle polls."""
    answers = iter([True, True, False, False, True, False, False, False, False, True])
    there, looks = [], []

    def is_busy() -> bool:
        there.append(resident_bytes(memory.data_ptr(), len(memory)))
        return next(answers, False)

    monkeypatch.setattr(first_touch.time, "sleep", looks.append)
    touch = FirstTouch(is_busy)
    memory = touch.allocate(COUNT, NUM_BLOCKS, BLOCK_BYTES)
    touch.catch_up()
    part = 8 * BLOCK_BYTES
    # Nothing until the third consecutive idle poll; then one part per poll, until it is busy again.
    assert there[:12] == [0] * 8 + [part, 2 * part, 2 * part, 2 * part]
    assert len(looks) == 7 + 3


@pytest.mark.usefixtures("some_ahead")
def test_a_cache_may_go_while_its_pages_are_brought() -> None:
    questions = []

    def is_busy() -> bool:
        questions.append(None)
        if len(questions) == 10:
            touch.allocate(COUNT, NUM_BLOCKS, BLOCK_BYTES)
        return False

    touch = FirstTouch(is_busy)
    memory = touch.allocate(COUNT, NUM_BLOCKS, BLOCK_BYTES)
    touch.catch_up()
    assert resident_bytes(memory.data_ptr(), len(memory)) == 9 * 8 * BLOCK_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_engine_tells_where_its_blocks_are(
    dtype: str, checkpoint: Callable[[str], Path]
) -> None:
    """The memory of both attentions; values written later are as usual."""
    answers = []
    for is_brought in (False, True):
        engine = load_engine(checkpoint("llama3"), dtype=dtype)
        touch = engine.device.pages
        parts = touch._parts
        assert parts is not None
        size = parts.count * parts.num_blocks * parts.block_bytes
        # Except for the pages of the timed warm-up passes.
        assert resident_bytes(parts.address, size) < size / 2
        if is_brought:
            touch.catch_up()
            assert resident_bytes(parts.address, size) >= size
        driver = Driver(engine)
        driver.add([driver.request(0, range(3, 90), max_new_tokens=4)])
        driver.run()
        answers.append((driver.tokens, driver.logprobs))
    assert answers[0] == answers[1]


def test_a_thread_brings_them_until_the_system_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brought = threading.Event()

    def populate(address: int, size: int) -> None:
        first_touch_populate(address, size)
        brought.set()

    first_touch_populate = first_touch.populate
    monkeypatch.setattr(first_touch, "populate", populate)
    touch = FirstTouch(lambda: False)
    thread = threading.Thread(target=touch.run, daemon=True)
    thread.start()
    touch.allocate(1, 16, 2**16)
    assert brought.wait(10)
    monkeypatch.setattr(first_touch, "_POPULATE_WRITE", 12345)
    with caplog.at_level("INFO"):
        other = touch.allocate(1, 16, 2**16, num_first=16)
        thread.join(10)
    assert not thread.is_alive() and "not populated in advance: [Errno 22]" in caplog.text
    assert resident_bytes(other.data_ptr(), 2**20) == 0
