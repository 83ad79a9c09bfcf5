"""Which requests are computed again when the shards are lost."""

from collections.abc import Callable, Iterable
from typing import Protocol

from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.entry import MOST_LOSSES, Entry


class NoShardsError(GenerationError):
    """The shards are lost and will not be replaced."""


class Replacement(Protocol):
    """The Batcher's view of shards that are replaced when they are lost."""

    num_losses: int
    """How often the shards were lost."""
    error: GenerationError
    """The error of requests that can not be computed again."""
    on_loss: Callable[[], None]
    """Called at each loss."""

    async def is_lost_with(self, error: GenerationError) -> bool:
        """Whether the shards are lost, after a call failed with `error`."""
        ...

    async def wait(self) -> None:
        """Returns when shards are connected; raises NoShardsError if none will come."""
        ...


class Recovery:
    """Decides which requests are computed again. Used by one Batcher."""

    def __init__(
        self,
        shards: Replacement,
        resumes_streams: bool = True,
        most_losses: int = MOST_LOSSES,
    ) -> None:
        """With `resumes_streams`, streams that have begun go on. Other requests always go on,
        unless they ran at `most_losses` losses."""
        self._shards = shards
        self._resumes_streams = resumes_streams
        self._most_losses = most_losses
        self._num_losses = 0

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Calls `wake` at each loss."""
        self._shards.on_loss = wake

    @property
    def is_due(self) -> bool:
        """Whether the shards were lost since `begin`."""
        return self._num_losses != self._shards.num_losses

    def begin(self, ran: Iterable[Entry]) -> list[tuple[Entry, GenerationError]]:
        """Records a loss. Returns the running entries that can not go on, with their errors."""
        self._num_losses = self._shards.num_losses
        ended = []
        for entry in ran:
            entry.num_losses += 1
            if entry.num_losses >= self._most_losses:
                why = f"the shards ended {entry.num_losses} times while this request ran"
                ended.append((entry, GenerationError(f"{why}: it is not computed again")))
            elif entry.is_shown and entry.token_ids and not self._resumes_streams:
                ended.append((entry, GenerationError(*self._shards.error.args)))
        return ended

    async def is_lost_with(self, error: GenerationError) -> bool:
        """See Replacement."""
        return await self._shards.is_lost_with(error)

    async def wait(self) -> None:
        """See Replacement."""
        await self._shards.wait()
