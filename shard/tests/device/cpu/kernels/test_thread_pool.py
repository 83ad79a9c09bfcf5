"""The thread pool, with threads stopped at arbitrary points."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numba import int64, njit, typeof
from text_generation_shard.device.cpu.kernels import thread_pool
from text_generation_shard.device.cpu.kernels.llvm import (
    address_of,
    compare_exchange,
    load_word,
    pause,
    yield_core,
)
from text_generation_shard.device.cpu.kernels.vector import aligned

from integration_tests.marks import at_night

LOOKS = 200_000_000
"""Seconds, for tests that would otherwise hang."""


@njit(nogil=True)
def _count(address):  # type: ignore[no-untyped-def]
    while True:
        before = load_word(address)
        if compare_exchange(address, before, before + 1):
            break


@njit(nogil=True)
def _dawdle(state):  # type: ignore[no-untyped-def]
    """Usually continues at once; sometimes pauses for much longer than an item takes."""
    while True:
        before = load_word(state)
        number = before * np.int64(6364136223846793005) + np.int64(1442695040888963407)
        if compare_exchange(state, before, number):
            break
    draw = (number >> 33) & 1023
    if draw < 40:
        for _ in range(draw * 200):
            pause()
    elif draw < 160:
        yield_core()


@njit(nogil=True)
def _follow(given, phases, phase, item, ticket):  # type: ignore[no-untyped-def]
    """An item writes one more than all items of the previous phase, or a negative number. Phases
    write to two rows in turn, as passes reuse buffers, so that late writes are detected."""
    counts, values = given
    own, state = phases[phase].step, values[2].ctypes.data
    value, number = np.int64(1), phases[phase].layer
    _dawdle(state)
    if number > 1:
        value = number
        for place in range(values[3, number - 1]):
            if values[1 - own, place] != number - 1:
                value = np.int64(-1)
    _dawdle(state)
    if not phases[phase].is_short or thread_pool.may_store(ticket):
        _dawdle(state)
        values[own, item] = value
        if value != number:
            values[2, 1] = 1
        _count(counts.ctypes.data + (phase * counts.shape[1] + item) * 8)


@njit(nogil=True)
def _stop(given, phases, phase, item, ticket):  # type: ignore[no-untyped-def]
    """The first thread at item `values[0, 0]` of phase 1 stops there until all phases are done."""
    counts, values = given
    is_first = phase == 1 and item == values[0, 0]
    if is_first and compare_exchange(values[1].ctypes.data, 0, 1):
        for _ in range(LOOKS):
            if load_word(values[2].ctypes.data) == phases[len(phases) - 1].items:
                values[3, 0] = 1
                break
            pause()
    if thread_pool.may_store(ticket):
        _count(counts.ctypes.data + (phase * counts.shape[1] + item) * 8)
        if phase == len(phases) - 1:
            _count(values[2].ctypes.data)


def _given(items: list[int], is_short: bool) -> Any:
    """How often each item's results were stored, the written values, and the phases."""
    phases = np.zeros(len(items), thread_pool.PHASE)
    phases["items"], phases["is_short"] = items, is_short
    size = max(4, len(items)), max(2, len(items) + 1, *items)
    return (np.zeros(size, np.int64), np.zeros(size, np.int64)), phases


def _go(
    function: Any, given: Any, num_threads: int, coming: int, words: torch.Tensor | None = None
) -> None:
    """`num_threads` threads are planned, and `coming` arrive; words: those of the board."""
    words = aligned(thread_pool.board_words(num_threads), torch.int64) if words is None else words
    arrays, phases = given
    code = address_of(function, (typeof(arrays), typeof(phases), int64, int64, int64))
    work = thread_pool.Work(code, arrays, phases, words.data_ptr(), num_threads)
    thread_pool.begin(work)
    comers = [
        threading.Thread(target=thread_pool.run_thread, args=(work, me)) for me in range(coming)
    ]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join(60)
        assert not comer.is_alive()


@pytest.mark.parametrize("seed", [0, *at_night(*range(1, 4))])
@pytest.mark.slow
def test_every_item_once_and_no_phase_before_its_time(seed: int) -> None:
    """For any number of threads, with pauses anywhere, on a reused board. Phases without items are
    skipped, also at the end."""
    draw = np.random.default_rng(seed)
    words = aligned(thread_pool.board_words(13), torch.int64)
    for _ in range(600):
        num_threads = int(draw.choice([1, 2, 3, 5, 13]))
        coming = int(draw.integers(1, min(num_threads, 3) + 1))
        items = draw.integers(0, draw.choice([2, 4, 30]), draw.integers(1, 60))
        (counts, values), phases = given = _given(items.tolist(), is_short=False)
        phases["is_short"] = draw.choice([[0, 0], [1, 1], [0, 1]])[draw.integers(0, 2, len(items))]
        phases["item_bytes"] = draw.choice([0, 6400])
        number = 0
        for phase, count in enumerate(items):
            number += count > 0
            phases["layer"][phase], phases["step"][phase] = number, number % 2
            values[3, number] = max(count, values[3, number])
        values[2, 0] = draw.integers(2**60)
        _go(_follow, given, num_threads, coming, words)
        assert not values[2, 1]
        for phase, count in enumerate(items):
            assert counts[phase].tolist() == [1] * count + [0] * (counts.shape[1] - count)


@pytest.mark.slow
@pytest.mark.parametrize("item", [0, 3, 7])
def test_stopped_thread_does_not_block_the_pool(item: int) -> None:
    """The other threads compute its item and all later ones; its own result is not stored."""
    given = _given([3, 8, 5, 6], is_short=True)
    (counts, values), phases = given
    values[0, 0] = item
    _go(_stop, given, 2, 2)
    assert values[3, 0] == 1
    for phase, count in enumerate(phases["items"]):
        assert counts[phase].tolist() == [1] * count + [0] * (counts.shape[1] - count)
