"""Several ranks in one process: one thread each, with collectives in memory."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from text_generation_shard.arrays import Ints
from text_generation_shard.errors import RankError
from text_generation_shard.parallel import Collectives, World
from torch import Tensor

_T = TypeVar("_T")


class Board:
    """Owns the values that `size` ranks exchange, by operation, until all have read them."""

    def __init__(self, size: int, deadline: float = 20.0) -> None:
        """deadline: seconds to wait for another rank."""
        self.size, self._deadline = size, deadline
        self._changed = threading.Condition()
        # By (message, operation): value of each rank, and number of ranks that have read them.
        self._given: dict[tuple[int, int], dict[int, Any]] = {}
        self._taken: dict[tuple[int, int], int] = {}
        # The last message that each rank has aborted, and the ranks that were stopped.
        self._given_up: dict[int, int] = {}
        self._stopped: set[int] = set()

    def exchange(self, rank: int, key: tuple[int, int], value: Any) -> list[Any]:
        """Publish a value and wait for those of all ranks, in rank order."""
        with self._changed:
            given = self._given.setdefault(key, {})
            given[rank] = value
            self._changed.notify_all()
            has_come = self._changed.wait_for(
                lambda: len(given) == self.size or self._problem(rank, key[0]) is not None,
                self._deadline,
            )
            if len(given) < self.size:
                late = next(other for other in range(self.size) if other not in given)
                raise (self._problem(rank, key[0]) if has_come else None) or RankError(
                    f"shard {late} did not come within {self._deadline} s", True
                )
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == self.size:
                del self._given[key], self._taken[key]
            return [given[other] for other in range(self.size)]

    def _problem(self, rank: int, number: int) -> RankError | None:
        if rank in self._stopped:
            return RankError(f"shard {rank} is stopping", True)
        for other, given_up in self._given_up.items():
            if other != rank and given_up == number:
                return RankError(f"shard {other} has aborted message {number}", False)
        return None

    def give_up(self, rank: int, number: int) -> None:
        """See Collectives.fail."""
        with self._changed:
            self._given_up[rank] = number
            self._changed.notify_all()

    def stop(self, rank: int) -> None:
        """See Collectives.stop."""
        with self._changed:
            self._stopped.add(rank)
            self._changed.notify_all()


class ThreadCollectives:
    """See `Collectives`."""

    name = "threads"

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._number, self._count = 0, 0
        self.num_operations = 0
        """Since it was made."""

    def wait_at_most(self, seconds: float) -> float:
        """See Collectives; the deadline does not change."""
        return seconds

    def begin(self, number: int) -> None:
        """See Collectives."""
        self._number, self._count = number, 0

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        # Other ranks read it after this rank has continued.
        first, *others = self._exchange(partial.clone())
        whole = first.float()
        for other in others:
            whole = whole + other.float()
        return whole.to(partial.dtype)

    def all_gather(self, part: Tensor) -> Tensor:
        """See Collectives."""
        return torch.cat(self._exchange(part.clone()), dim=-1)

    def broadcast(self, values: Ints) -> Ints:
        """See Collectives."""
        values[...] = self._exchange(values.copy())[0]
        return values

    def fail(self, number: int) -> None:
        """See Collectives."""
        self._board.give_up(self._rank, number)

    def stop(self) -> None:
        """See Collectives."""
        self._board.stop(self._rank)

    def _exchange(self, value: Any) -> list[Any]:
        self._count += 1
        self.num_operations += 1
        found = self._board.exchange(self._rank, (self._number, self._count), value)
        shapes = {tuple(item.shape) for item in found}
        assert len(shapes) == 1, f"ranks exchange tensors of one shape, not of {shapes}"
        return found


def run_ranks(
    size: int,
    body: Callable[[World], _T],
    wrap: Callable[[Collectives], Collectives] = lambda collectives: collectives,
) -> Sequence[_T]:
    """The results of `body` on each of `size` ranks, in order. Raises the error of the first rank
    that failed by itself; the other ranks end with it. `wrap`: applied to each rank's
    collectives."""
    board = Board(size)

    def run(rank: int) -> _T:
        # Otherwise each thread has its own thread pool.
        torch.set_num_threads(1)
        collectives = wrap(ThreadCollectives(board, rank))
        try:
            return body(World(rank, size, collectives))
        except BaseException:
            for other in range(size):
                board.stop(other)
            raise

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(size, "rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    torch.set_num_threads(threads)
    if errors:
        raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
    return [future.result() for future in futures]
