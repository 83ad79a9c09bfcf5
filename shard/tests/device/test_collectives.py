"""Collective operations: with ranks as threads, and as processes that are stopped."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from text_generation_shard.device.cpu import collectives as shared
from text_generation_shard.device.cpu.collectives import SharedMemoryCollectives, memory_bytes
from text_generation_shard.errors import ModelError, RankError
from text_generation_shard.parallel import Collectives, Rendezvous

from shard.tests.test_rendezvous import config_of, free_port, join, meet

pytestmark = pytest.mark.slow

SLOT_BYTES = 4096


def in_memory(size: int, deadline_s: float = 10.0) -> list[SharedMemoryCollectives]:
    """Collectives of ranks that are threads."""
    memory = torch.zeros(memory_bytes(size, SLOT_BYTES), dtype=torch.uint8)
    return [
        SharedMemoryCollectives(memory, rank, size, SLOT_BYTES, deadline_s) for rank in range(size)
    ]


def together(ranks: list[Any], work: Callable[[Any, int], Any]) -> list[Any]:
    """The results of all ranks, or their RankErrors."""

    def run(rank: int) -> Any:
        try:
            return work(ranks[rank], rank)
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


COUNTS = 1, 0, 1000, 1024, 5000
"""Empty, small, and larger than a slot."""
KINDS = torch.float32, torch.bfloat16, torch.float16


def part_of(rank: int, count: int, kind: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * count + rank)
    return torch.randn(count, 3, generator=generator).to(kind)


def all_operations(collectives: Collectives, rank: int) -> list[Any]:
    """Operations of every kind, size and dtype."""
    found: list[Any] = []
    for number, count in enumerate(COUNTS):
        collectives.begin(number + 1)
        for kind in KINDS:
            part = part_of(rank, count, kind)
            found += [collectives.all_reduce(part.clone()), collectives.all_gather(part)]
        numbers = torch.arange(count).numpy() * (rank + 1) + rank
        found.append(torch.from_numpy(collectives.broadcast(numbers)))
    return found


def expected_operations(size: int) -> list[Any]:
    """The expected results, by the definition in `Collectives`."""
    found: list[Any] = []
    for count in COUNTS:
        for kind in KINDS:
            parts = [part_of(rank, count, kind) for rank in range(size)]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            found += [total.to(kind), torch.cat(parts, dim=-1)]
        found.append(torch.arange(count))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same(size: int) -> None:
    """Bit for bit: float32 in the order of ranks, rounded once."""
    expected = expected_operations(size)
    for found in together(in_memory(size), all_operations):
        assert not isinstance(found, RankError), found
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_message_that_one_gives_up_fails_for_all_and_the_next_does_not() -> None:
    ranks = in_memory(3)

    def work(own: SharedMemoryCollectives, rank: int) -> list[str]:
        found = []
        for number in range(1, 40):
            own.begin(number)
            try:
                for count in range(4):
                    # A different rank each time, before its first or a later operation.
                    if number % 3 == rank and number % 4 == count and number % 5:
                        own.fail(number)
                        raise RankError("own", is_final=False)
                    total = own.all_reduce(torch.full((700,), float(number + count)))
                    assert total.tolist() == [3.0 * (number + count)] * 700
                found.append("")
            except RankError as error:
                assert not error.is_final
                found.append(str(error))
        return found

    for rank, found in enumerate(together(ranks, work)):
        assert not isinstance(found, RankError), found
        for number, sentence in enumerate(found, start=1):
            if number % 5 == 0:
                assert sentence == ""
            elif number % 3 == rank:
                assert sentence == "own"
            else:
                # The error may name a rank that aborted because of the first one.
                assert sentence.endswith(f"has aborted message {number}"), (rank, sentence)


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _ = in_memory(2, deadline_s=0.2)
    first.begin(5)
    with pytest.raises(RankError, match=r"shard 1 did not come within 0.2 s \(message 5\)") as late:
        first.all_reduce(torch.ones(3))
    assert late.value.is_final


def test_a_rank_that_stops_ends_its_wait() -> None:
    first, _ = in_memory(2)
    threading.Timer(0.1, first.stop).start()
    began = time.monotonic()
    with pytest.raises(RankError, match="this shard is stopping") as stopped:
        first.all_reduce(torch.ones(3))
    assert stopped.value.is_final and time.monotonic() - began < 3


def test_no_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks raise an error too."""
    monkeypatch.setattr(shared.host, "free_bytes", lambda: 2**20)
    with meet(2) as rendezvous:

        def work(rendezvous: Rendezvous, rank: int) -> None:
            kind = (ModelError, RankError)[rank]
            with pytest.raises(
                kind, match=r"need 32 MiB of shared memory to exchange results, and 1 MiB are free"
            ):
                SharedMemoryCollectives.meet(rendezvous, 8 << 20)

        together(rendezvous, work)


def rank_main(rank: int, port: int) -> None:
    """Main function of one of two processes; controlled by `Processes`."""
    config = config_of(rank, 2, port, deadline_s=1.0)
    rendezvous = Rendezvous.join(config)
    collectives = SharedMemoryCollectives.meet(rendezvous, SLOT_BYTES)
    left = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    print("ready", sum("text-generation-shards" in name for name in left), flush=True)
    number = 0
    for line in sys.stdin:
        try:
            number += 1
            if line.startswith("port"):
                join(config_of(1, 2, int(line.split()[1])), within_s=0.3)
            elif line.strip() == "meet":
                rendezvous.all_here(f"rendezvous {number}")
            else:
                collectives.begin(number)
                for _ in range(int(line)):
                    total = collectives.all_reduce(torch.full((3000,), float(rank)))
                    assert total.tolist() == [1.0] * 3000
            print("done", flush=True)
        except RankError as error:
            print(f"{error.is_final}: {error}", flush=True)


class Processes:
    """Owns two processes of `rank_main`, which run commands."""

    def __init__(self) -> None:
        code = "import sys; from shard.tests.device.test_collectives import rank_main; "
        code += "rank_main(int(sys.argv[1]), int(sys.argv[2]))"
        self.port = free_port()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code, str(rank), str(self.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[3],
            )
            for rank in range(2)
        ]

    def tell(self, rank: int, what: object) -> None:
        """A number: this number of sums. "meet": a barrier."""
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(f"{what}\n")
        pipe.flush()

    def answer(self, rank: int) -> str:
        pipe = self._processes[rank].stdout
        assert pipe is not None
        return pipe.readline().strip()

    def send(self, rank: int, number: signal.Signals) -> None:
        self._processes[rank].send_signal(number)

    def exit_code(self, rank: int) -> int:
        """The exit code of a process after its last command."""
        process = self._processes[rank]
        process.communicate(timeout=30)
        return process.returncode

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    try:
        yield found
    finally:
        found.end()


def test_processes_that_are_stopped_and_killed(processes: Processes) -> None:
    """Two processes; their shared memory has no name, and no descriptor of it stays open."""
    assert [processes.answer(rank) for rank in range(2)] == ["ready 0", "ready 0"]
    for count in (1, 500):
        for rank in range(2):
            processes.tell(rank, count)
        assert [processes.answer(rank) for rank in range(2)] == ["done", "done"]
    # Stopped at an arbitrary point within sums.
    for rank in range(2):
        processes.tell(rank, 10**9)
    processes.send(1, signal.SIGSTOP)
    began = time.monotonic()
    assert processes.answer(0) == "True: shard 1 did not come within 1 s (message 3)"
    assert time.monotonic() - began < 4
    processes.send(1, signal.SIGCONT)
    assert processes.answer(1) == "True: shard 0 did not come within 1 s (message 3)"
    # Stopped while the other process waits for it to load.
    processes.send(1, signal.SIGSTOP)
    processes.tell(0, "meet")
    found = processes.answer(0)
    assert found.startswith("True: shard 1 shows no sign of life for ")
    assert found.endswith(" s (waiting for: rendezvous 4)")
    assert time.monotonic() - began < 12
    processes.send(1, signal.SIGCONT)
    processes.tell(1, "meet")
    assert processes.answer(1) == found
    # The process that serves the store is gone.
    processes.send(0, signal.SIGKILL)
    processes.tell(1, "meet")
    assert processes.answer(1).startswith("True: shard ")
    # Another program at the port that does not answer; and an exit without an error.
    with socket.create_server(("localhost", 0)) as listener:
        processes.tell(1, f"port {listener.getsockname()[1]}")
        assert "(another program listens there)" in processes.answer(1)
        assert processes.exit_code(1) == 0
