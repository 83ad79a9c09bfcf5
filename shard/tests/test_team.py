"""Threads that go through phases together, stopped wherever they may be."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numba import int64, njit, typeof
from text_generation_shard.kernels import team
from text_generation_shard.kernels.atomic import exchange_word, get_word, pause
from text_generation_shard.kernels.calls import address_of
from text_generation_shard.kernels.linear import aligned

LOOKS = 200_000_000
"""Seconds, for what would otherwise never end."""


@njit(nogil=True)
def _count(address):  # type: ignore[no-untyped-def]
    while True:
        before = get_word(address)
        if exchange_word(address, before, before + 1):
            break


@njit(nogil=True)
def _follow(given, phase, item, ticket):  # type: ignore[no-untyped-def]
    """An item writes one more than all items of the phase before have written, or -1."""
    counts, values, phases = given
    before = phase - 1
    while before >= 0 and phases[before].items == 0:
        before -= 1
    value = np.int64(1)
    if before >= 0:
        value = values[before, 0] + 1
        for place in range(phases[before].items):
            if values[before, place] != value - 1:
                value = np.int64(-1)
    if team.may_put(ticket):
        values[phase, item] = value
        _count(counts.ctypes.data + (phase * counts.shape[1] + item) * 8)


@njit(nogil=True)
def _stop(given, phase, item, ticket):  # type: ignore[no-untyped-def]
    """Who comes first to item `values[0, 0]` of phase 1 stops there until all is done."""
    counts, values, phases = given
    is_first = phase == 1 and item == values[0, 0]
    if is_first and exchange_word(values[1].ctypes.data, 0, 1):
        for _ in range(LOOKS):
            if get_word(values[2].ctypes.data) == phases[len(phases) - 1].items:
                values[3, 0] = 1
                break
            pause()
    if team.may_put(ticket):
        _count(counts.ctypes.data + (phase * counts.shape[1] + item) * 8)
        if phase == len(phases) - 1:
            _count(values[2].ctypes.data)


def _given(items: list[int], is_short: bool) -> Any:
    """How often each item's results were put, what is written, and the phases."""
    phases = np.zeros(len(items), team.PHASE)
    phases["items"], phases["is_short"] = items, is_short
    size = max(4, len(items)), max(1, *items)
    return np.zeros(size, np.int64), np.zeros(size, np.int64), phases


def _go(function: Any, given: Any, num_threads: int, coming: int) -> None:
    """So many threads are expected, and so many come."""
    words = aligned(team.board_words(num_threads), torch.int64)
    board, phases = words.data_ptr(), given[2]
    code = address_of(function, (typeof(given), int64, int64, int64))
    team.begin(board, phases, num_threads)
    comers = [
        threading.Thread(target=team.work, args=(code, given, phases, board, me, num_threads))
        for me in range(coming)
    ]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join(60)
        assert not comer.is_alive()


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(("num_threads", "coming"), [(1, 1), (2, 2), (5, 1), (4, 4), (7, 3)])
def test_every_item_once_and_no_phase_before_its_time(
    num_threads: int, coming: int, is_short: bool
) -> None:
    """However many threads come. Phases without items are passed over, the last ones too."""
    generator = np.random.default_rng(num_threads)
    items = [0, *generator.integers(0, 9, 400).tolist(), 0]
    given = _given(items, is_short)
    _go(_follow, given, num_threads, coming)
    counts, values, _ = given
    number = 0
    for phase, count in enumerate(items):
        number += count > 0
        assert counts[phase].tolist() == [1] * count + [0] * (counts.shape[1] - count)
        assert values[phase, :count].tolist() == [number] * count


@pytest.mark.parametrize("item", [0, 3, 7])
def test_who_is_stopped_is_not_waited_for(item: int) -> None:
    """The others do its item and all that follows; what it finds when it goes on is not put."""
    given = _given([3, 8, 5, 6], is_short=True)
    counts, values, phases = given
    values[0, 0] = item
    _go(_stop, given, 2, 2)
    assert values[3, 0] == 1
    for phase, count in enumerate(phases["items"]):
        assert counts[phase].tolist() == [1] * count + [0] * (counts.shape[1] - count)


def test_without_phases_there_is_nothing_to_do() -> None:
    _go(_follow, _given([0, 0], is_short=False), 2, 2)
