"""The ranks of one model: the operations with which they exchange tensors, and how their processes
meet and detect lost ranks while they load."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, Protocol, Self

import torch
from text_generation_process.flags import ShardConfig
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from text_generation_shard.arrays import Ints
from text_generation_shard.errors import ModelError, RankError

JOIN_S: Final = 10.0
"""How long to wait for a rank's arrival, and for the first operation of all ranks."""
# Most seconds between two heartbeats, and the interval of reads from the store.
_BEAT_S = 1.0
_LOOK_S = 0.02
# How long a failed rank waits until the other ranks have read its error.
_ERROR_READ_S = 1.0
# Longer than a process takes to end.
_NEVER = timedelta(hours=1)


class Collectives(Protocol):
    """Operations of all ranks together.

    All ranks call the same operations in the same order, with tensors of the same shapes, in their
    device threads. An operation raises RankError, which names a rank, if that rank misses the step
    deadline or has failed the message, or if this process stops.
    """

    # Shown in the log and /info.
    name: str

    def wait_at_most(self, seconds: float) -> float:
        """Set the deadline for other ranks; returns the deadline in force, which some
        implementations can not change."""

    def begin(self, number: int) -> None:
        """Later operations belong to this message. Unfinished operations of an earlier message,
        which has failed, are dropped."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, added in float32 in the order of ranks; `partial` may be
        overwritten."""

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' tensors [..., N] of one shape, concatenated: [..., size * N]."""

    def broadcast(self, values: Ints) -> Ints:
        """Rank 0's numbers; other ranks pass an array of the same size, which is overwritten."""

    def fail(self, number: int) -> None:
        """This rank has failed the message: other ranks stop waiting for it in this message."""

    def stop(self) -> None:
        """From any thread: current and later operations raise RankError."""


class World:
    """`size` processes that compute the same steps, each with a part of the weights.

    With one rank, each operation returns its argument.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        collectives: Collectives | None = None,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """meet: waits for all ranks without limit, while they load; called once."""
        assert 0 <= rank < size, "a rank is below the size"
        self.rank, self.size, self.meet = rank, size, meet
        self._collectives = collectives

    @property
    def collectives(self) -> Collectives:
        """The operations; only with several ranks."""
        assert self._collectives is not None, "one rank has no collectives"
        return self._collectives

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        return partial if self.size == 1 else self.collectives.all_reduce(partial)

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        return part if self.size == 1 else self.collectives.all_gather(part)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        return values if self.size == 1 else self.collectives.broadcast(values)


class Rendezvous:
    """Owns this rank's connection to rank 0's key-value store, and a thread that sends heartbeats
    until `close`.

    Raises a final RankError, which names a rank, if that rank has not arrived within JOIN_S, has
    sent no heartbeat within the step deadline, or has failed.
    """

    def __init__(self, store: TCPStore, config: ShardConfig, within_s: float = JOIN_S) -> None:
        """The store is used by this object only. within_s: how long to wait for arrivals."""
        self.rank, self.size = config.rank, config.world_size
        self.address, self.deadline_s = config.master_addr, config.starting_deadline_s
        self._store, self._within_s = store, within_s
        self._place = f"{config.master_addr}:{config.master_port}"
        self._changed = threading.Condition()
        now = time.monotonic()
        self._answered, self._noted = now, now
        # Per rank: the count of its heartbeats, and the time of the last one.
        self._signs, self._heard = [0] * self.size, [now] * self.size
        # The name of the value that is gathered, and the values of all ranks; empty: incomplete.
        self._wanted: str | None = None
        self._found: list[str] = []
        self._asked: list[Callable[[], None]] = []
        self._failure = ""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls, config: ShardConfig, within_s: float = JOIN_S) -> "Rendezvous":
        """Meet all ranks of a launch. ModelError if rank 0 can not listen."""
        connect = _host if config.rank == 0 else _find
        rendezvous = cls(connect(config, within_s), config, within_s)
        try:
            rendezvous.all_here("all have come")
        except RankError:
            rendezvous.close()
            raise
        return rendezvous

    @property
    def store(self) -> Store:
        """A store for torch.distributed, with its own connection."""
        return PrefixStore("torch", self._store.clone())  # type: ignore[attr-defined]

    def gather(self, what: str, value: str) -> list[str]:
        """Publish a value, and wait for those of all ranks, in rank order. Each `what` is used
        once. From one thread."""
        with self._changed:
            self._asked.append(lambda: self._store.set(f"{what}/{self.rank}", value))
            self._wanted, self._found = what, []
            self._changed.notify_all()
        sentence = ""
        while not sentence:
            with self._changed:
                if found := self._found:
                    self._wanted = None
                    return found
                if not (sentence := self._reason(what)):
                    self._changed.wait(_LOOK_S)
        if not self._failure:
            self._announce(sentence)
        raise RankError(sentence, is_final=True)

    def all_here(self, what: str) -> None:
        """Wait until all ranks call this, without limit while they send heartbeats."""
        self.gather(what, "")

    def fail(self, sentence: str) -> None:
        """Report to the other ranks that this rank has failed, and wait a moment until they have
        read it. Raises nothing."""
        self._announce(f"shard {self.rank} has failed: {sentence}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Close it; the other ranks are told of an error that is not theirs."""
        if error is not None and not isinstance(error, RankError):
            self.fail(str(error) or type(error).__name__)
        self.close()

    def close(self) -> None:
        """End the heartbeats. `store` works as long as rank 0 keeps this object. Rank 0 waits a
        moment until all have closed, as other ranks may still read values."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        # A thread that returns from torch while Python exits would abort this process.
        self._thread.join(2 * _ERROR_READ_S)

    def _reason(self, what: str) -> str:
        """Why this rank must stop waiting; empty: it can wait."""
        now = self._now()
        if self._failure:
            return self._failure
        if now - self._answered > self.deadline_s:
            return f"shard 0 shows no sign of life for {self.deadline_s:g} s (waiting for: {what})"
        for rank in range(self.size):
            silent_s = now - self._heard[rank]
            if rank == self.rank:
                continue
            if not self._signs[rank] and silent_s > self._within_s:
                return f"shard {rank} did not come to {self._place} within {self._within_s:g} s"
            if self._signs[rank] and silent_s > self.deadline_s:
                return (
                    f"shard {rank} shows no sign of life for {silent_s:.0f} s (waiting for: {what})"
                )
        return ""

    def _now(self) -> float:
        """The current time. If this process was suspended, shifts the times of other ranks'
        heartbeats by that gap."""
        now = time.monotonic()
        gap, self._noted = now - self._noted, now
        if gap > _BEAT_S:
            self._answered += gap
            self._heard = [heard + gap for heard in self._heard]
        return now

    def _announce(self, sentence: str) -> None:
        """Publish this error unless there is one already. Rank 0 waits until the other ranks have
        read it, because the store ends with its process."""
        done = threading.Event()

        def publish() -> None:
            said = self._store.compare_set("failed", "", sentence).decode()
            self._failure = self._failure or said
            self._linger("read", self.size - 1)
            done.set()

        with self._changed:
            self._asked.append(publish)
            self._changed.notify_all()
        if self._thread.is_alive():
            done.wait(2 * _ERROR_READ_S)

    def _linger(self, name: str, count: int) -> None:
        """Rank 0 waits until a counter reaches `count`, at most for _ERROR_READ_S."""
        end = time.monotonic() + _ERROR_READ_S
        while self.rank == 0 and time.monotonic() < end:
            if self._store.add(name, 0) >= count:
                return
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        next_beat = 0.0
        try:
            while True:
                with self._changed:
                    self._now()
                    asked, wanted, self._asked = self._asked, self._wanted, []
                    is_closed = self._is_closed
                for one in asked:
                    one()
                if is_closed:
                    self._store.add("closed", 1)
                    if not self._failure:
                        self._linger("closed", self.size)
                    return
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + min(_BEAT_S, self.deadline_s / 4)
                self._look(wanted)
                with self._changed:
                    self._answered = time.monotonic()
                    self._changed.notify_all()
                    if not self._asked:
                        self._changed.wait(_LOOK_S if self._wanted else _BEAT_S / 4)
        except DistError:
            with self._changed:
                self._failure = self._failure or f"shard 0 at {self._place} has ended"
                self._changed.notify_all()

    def _beat(self) -> None:
        """Send a heartbeat, and read those of the other ranks."""
        self._store.add(f"alive/{self.rank}", 1)
        for rank in range(self.size):
            signs = self._store.add(f"alive/{rank}", 0)
            if signs != self._signs[rank]:
                self._signs[rank], self._heard[rank] = signs, time.monotonic()

    def _look(self, wanted: str | None) -> None:
        """Read whether a rank has failed, then the gathered values: after a failure there are
        none, as the failed rank may have left before they were complete."""
        if self._failure:
            return
        if self._store.check(["failed"]):
            self._store.add("read", 1)
            self._failure = self._store.get("failed").decode()
        elif wanted is not None:
            names = [f"{wanted}/{rank}" for rank in range(self.size)]
            if self._store.check(names):
                found = [value.decode() for value in self._store.multi_get(names)]
                with self._changed:
                    if self._wanted == wanted:
                        self._found = found


def _host(config: ShardConfig, within_s: float) -> TCPStore:
    """Rank 0's store, which listens on this address only."""
    address, port = config.master_addr, config.master_port
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        # Prefers an IPv4 address.
        family, *_, place = min(found, key=lambda one: one[0])
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise ModelError(
            f"shard 0 can not listen at {address}:{port} ({error.strerror}): choose another "
            "--master-port, or --master-addr"
        ) from error
    seconds = timedelta(seconds=within_s)
    return TCPStore(address, port, None, True, seconds, False, master_listen_fd=listener.detach())


def _find(config: ShardConfig, within_s: float) -> TCPStore:
    """The connection of another rank to rank 0's store."""
    address, port = config.master_addr, config.master_port
    end, is_there = time.monotonic() + within_s, False
    while not is_there and time.monotonic() < end:
        # torch itself would retry rarely, and log each time.
        with suppress(OSError), socket.create_connection((address, port), timeout=within_s):
            is_there = True
        if not is_there:
            time.sleep(_LOOK_S)
    stores: list[TCPStore] = []

    def connect() -> None:
        with suppress(DistError):
            stores.append(TCPStore(address, port, None, False, _NEVER, False))

    # If another program listens there and does not answer, torch ignores its timeout. Then this
    # process ends, and the thread must not return to Python meanwhile.
    thread = threading.Thread(target=connect, name="join", daemon=True)
    if is_there:
        thread.start()
        thread.join(max(1.0, end - time.monotonic()))
    if not stores:
        who = "another program listens there" if is_there else "no program listens there"
        raise RankError(
            f"shard 0 was not found at {address}:{port} within {within_s:g} s ({who}): see what it "
            "logged, or choose another --master-port",
            is_final=True,
        )
    return stores[0]


def try_out(collectives: Collectives, rendezvous: Rendezvous, device: str = "cpu") -> None:
    """Test the collectives with a sum of known result. ModelError if the result is wrong."""
    collectives.begin(0)
    numbers = torch.full((64,), rendezvous.rank + 1.0, device=device)
    found = collectives.all_reduce(numbers).tolist()
    expected = rendezvous.size * (rendezvous.size + 1) / 2
    if found != [expected] * len(found):
        raise ModelError(
            f"{rendezvous.size} shards added their numbers by {collectives.name}, and shard "
            f"{rendezvous.rank} has {found[0]:g} for {expected:g}: their connection is not reliable"
        )
