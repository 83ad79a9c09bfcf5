"""Child processes that fill the kernel cache: jobs that a child does not do are still done."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_shard.device.cpu.kernels import cache, compile
from text_generation_shard.device.cpu.kernels.compile import do_in_children

FOREVER_S = 60.0


def note(path: Path) -> None:
    """Append a line with this process's id."""
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait()


def fail() -> None:
    raise RuntimeError("not in this process")


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("job", [die, fail])
def test_each_job_is_done_once_by_the_children_that_live(
    job: Callable[[], None], tmp_path: Path
) -> None:
    path = tmp_path / "rest"
    do_in_children([job, *[partial(note, path)] * 20], 2, FOREVER_S)
    assert len(pids(path)) == 20 and os.getpid() not in pids(path)


def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    do_in_children([lambda: (note(tmp_path / "id"), hang())], 1, 0.5)
    (process,) = pids(tmp_path / "id")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_no_job_is_done_if_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", refuse)
    do_in_children([partial(note, tmp_path / "none")], 2, FOREVER_S)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cache.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_cache_is_empty_until_it_has_been_filled(directory: Path) -> None:
    with pytest.raises(RuntimeError), cache.filling("one"):
        fail()
    for expected in (True, False):
        with cache.filling("one") as is_empty:
            assert is_empty == expected
    with cache.filling("another") as is_empty:
        assert is_empty


def test_two_servers_do_not_fill_one_cache_at_a_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def first() -> bool:
        with cache.filling("one") as is_empty:
            has_begun.set()
            may_end.wait()
            return is_empty

    def second() -> bool:
        has_begun.wait()
        with cache.filling("one") as is_empty:
            return is_empty

    # The first one ends while the second one waits.
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: may_end.set())
    with ThreadPoolExecutor(2) as pool:
        answers = pool.submit(first), pool.submit(second)
        assert [answer.result() for answer in answers] == [True, False]


def test_a_server_that_fills_for_ever_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.0)
    with cache.filling("one"), cache.filling("two") as is_empty:
        assert is_empty


class Function:
    """A fake numba function; records which process compiles it."""

    def __init__(self, path: Path, is_deadly: bool = False) -> None:
        self._path, self._is_deadly, self._parent = path, is_deadly, os.getpid()

    def compile(self, signature: Any) -> None:
        if self._is_deadly and os.getpid() != self._parent:
            die()
        note(self._path)


@pytest.mark.parametrize(
    ("processes", "free_bytes", "helpers"), [(2, 2**30, 1), (1, 2**30, 0), (2, 2**28, 0)]
)
def test_kernels_are_compiled_by_other_processes_first(
    processes: int,
    free_bytes: int,
    helpers: int,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [directory / name for name in ("deadly", "usual", "another")]
    functions = {Function(path, path == paths[0]): [()] for path in paths}
    monkeypatch.setattr(compile, "_kernels", lambda wanted: functions)
    for helpers_now in (helpers, 0):
        for path in paths:
            path.unlink(missing_ok=True)
        compile.prepare(compile.Wanted(torch.float32, None), processes, free_bytes)
        # This process compiles every kernel that no child has compiled.
        assert [pids(path)[-1] for path in paths] == [os.getpid()] * 3
        assert [len(pids(path)) for path in paths] == [1, 1 + helpers_now, 1 + helpers_now]
