"""Connects to the shards that replace lost ones."""

import asyncio
import logging
import os
from collections.abc import Callable

from text_generation_router.client.shards import ShardedClient
from text_generation_router.client.translate import ShardInfo, WarmupResult
from text_generation_router.config import RouterConfig
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.shards import LostStepError
from text_generation_router.scheduler.watch import PATIENCE_S, silence_of

# How often the socket is checked for a replacement.
POLL_S = 0.02
# A shard whose socket is still the old one after this has not ended: the launcher must end it.
GRACE_S = 1.0

logger = logging.getLogger(__name__)

_Identity = tuple[int, int, int]


class Reconnection:
    """Knows the socket of the last shards: new ones have another one at the same path.

    The shards that it returns serve the same model within the same limits, and are warm.
    """

    def __init__(self, config: RouterConfig, info: ShardInfo, warmup: WarmupResult) -> None:
        """`info` and `warmup` are the answers of the first shards."""
        self._path = config.master_shard_uds_path
        self._config = config
        self._info = info
        self._warmup = warmup
        self._last = _identity(self._path)

    async def __call__(self, report: Callable[[str], None]) -> ShardedClient:
        """Waits for new shards. Calls `report` with a sentence while the old ones have not ended.
        Raises GenerationError if the new shards differ from the lost ones, or refuse the same
        limits."""
        while True:
            await self._other_socket(report)
            attempt = asyncio.ensure_future(self._connect())
            try:
                # With another socket again, those that it waits for have ended.
                while not attempt.done() and _identity(self._path) == self._last:
                    await asyncio.wait({attempt}, timeout=POLL_S)
                if attempt.done():
                    return attempt.result()
            except LostStepError as error:
                logger.warning("The new shards are lost, too: %s", error)
            finally:
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)

    async def _other_socket(self, report: Callable[[str], None]) -> None:
        """Returns when there is a new socket. Until then it calls `report` repeatedly: the launcher
        may not be able to end the shards yet."""
        loop = asyncio.get_running_loop()
        patience_ends = loop.time() + GRACE_S
        while (found := _identity(self._path)) is None or found == self._last:
            if found and loop.time() > patience_ends:
                report("The shards do not answer, and have not ended")
                patience_ends = loop.time() + GRACE_S
            await asyncio.sleep(POLL_S)
        self._last = found

    async def _connect(self) -> ShardedClient:
        try:
            shards = await ShardedClient.connect(
                self._path, answer_s=self._config.starting_deadline_s
            )
        except GenerationError as error:
            # Some may have failed before they listened; the launcher starts new ones.
            raise LostStepError(*error.args) from error
        warm_up = asyncio.create_task(self._warm_up(shards))
        try:
            while not (await asyncio.wait({warm_up}, timeout=PATIENCE_S))[0]:
                if silence := await silence_of(shards):
                    raise LostStepError(silence)
            await warm_up
        except BaseException:
            warm_up.cancel()
            await asyncio.gather(warm_up, return_exceptions=True)
            await shards.close()
            raise
        return shards

    async def _warm_up(self, shards: ShardedClient) -> None:
        await shards.clear_cache(None)
        info = await shards.info()
        for name in {*ShardInfo.__slots__} - {"last_number", "spares_core"}:
            new, old = getattr(info, name), getattr(self._info, name)
            if new != old:
                raise GenerationError(f"they have {name} {new!r}, the old ones had {old!r}")
        warmup = await shards.warmup(
            max_prefill_tokens=self._config.max_batch_prefill_tokens,
            max_batch_size=self._config.batch_rows,
            max_input_tokens=self._warmup.max_input_tokens,
            max_total_tokens=self._warmup.max_total_tokens,
            max_batch_total_tokens=self._warmup.num_blocks * self._info.block_size,
            num_snapshots=self._warmup.num_snapshots,
        )
        for name, kind in (("num_blocks", "KV blocks"), ("num_snapshots", "snapshots of states")):
            new, old = getattr(warmup, name), getattr(self._warmup, name)
            if new != old:
                raise GenerationError(f"they have {new} {kind}, the old ones had {old}")


def _identity(path: str) -> _Identity | None:
    """The identity of the file at a path; None: there is none. An inode number alone is reused."""
    try:
        state = os.lstat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_ctime_ns
