"""Connecting to new shards: another socket, the same model, the same limits."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from text_generation_router.client import recovery
from text_generation_router.client.recovery import Reconnection
from text_generation_router.config import RouterConfig
from text_generation_router.errors import GenerationError
from text_generation_router.scheduler.step import GoneShardError

from router.tests.fake_shards import INFO, WARMUP, FakeShards

pytestmark = pytest.mark.usefixtures("clock")


async def hangs(method: str) -> None:
    """Shards whose warm-up does not end."""
    if method == "health":
        raise GenerationError("Server error", "deadline exceeded")
    if method == "warmup":
        await asyncio.Event().wait()


def failing(error: GenerationError) -> FakeShards:
    """Shards of which the first call fails."""

    async def fail(method: str) -> None:
        raise error

    return FakeShards(hook=fail)


class Place:
    """Where rank 0 listens, and the shards that are found there, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "shard-0"
        self.found: list[FakeShards | GenerationError] = []
        self.told: list[str] = []
        self.listen()
        monkeypatch.setattr(recovery, "ShardedClient", self)
        monkeypatch.setattr(recovery, "PATIENCE_S", 0.01)
        monkeypatch.setattr(recovery, "GRACE_S", 0.1)
        config = RouterConfig(
            tokenizer_name="",
            master_shard_uds_path=str(self.path),
            step_deadline=1.0,
            max_batch_size=128,
        )
        self.reconnection = Reconnection(config, INFO, WARMUP)

    def listen(self) -> None:
        """There is another socket."""
        self.path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))

    async def connect(self, path: str, answer_s: float) -> FakeShards:
        assert path == str(self.path) and answer_s == 1.0
        found = self.found.pop(0)
        if isinstance(found, GenerationError):
            raise found
        return found

    def again(self) -> "asyncio.Task[object]":
        """The wait for new shards."""
        return asyncio.ensure_future(self.reconnection(self.told.append))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


async def test_the_socket_of_before_is_not_asked(place: Place) -> None:
    again = place.again()
    await asyncio.sleep(0.5)
    # The launcher may not have been able to end them yet.
    assert len(place.told) > 1
    assert set(place.told) == {"The shards do not answer, and have not ended"}
    os.unlink(place.path)
    await asyncio.sleep(0.05)
    assert not again.done()
    shards = FakeShards()
    place.found = [shards]
    place.listen()
    assert await again is shards and not shards.is_closed
    assert shards.limits == {
        "max_prefill_tokens": 4096,
        "max_batch_size": 128,
        "max_input_tokens": WARMUP.max_input_tokens,
        "max_total_tokens": WARMUP.max_total_tokens,
        "max_batch_total_tokens": WARMUP.num_blocks * INFO.block_size,
        "num_snapshots": WARMUP.num_snapshots,
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda: FakeShards(shard_info=replace(INFO, dtype="int8")), "they have dtype 'int8'"),
        (lambda: FakeShards(capacity=replace(WARMUP, num_blocks=7)), "they have 7 KV blocks"),
        (lambda: FakeShards(capacity=replace(WARMUP, num_snapshots=7)), "have 7 snapshots of sta"),
    ],
)
async def test_others_are_refused(
    change: Callable[[], FakeShards], sentence: str, place: Place
) -> None:
    shards = change()
    place.found = [shards]
    again = place.again()
    place.listen()
    with pytest.raises(GenerationError, match=sentence):
        await again
    assert shards.is_closed


async def test_new_shards_may_have_another_last_number(place: Place) -> None:
    shards = FakeShards(shard_info=replace(INFO, last_number=9, spares_core=True))
    place.found = [shards]
    again = place.again()
    place.listen()
    assert await again is shards and not shards.is_closed


async def test_limits_that_do_not_fit_any_more_are_the_end(place: Place) -> None:
    place.found = [failing(GenerationError("Server error", "too little memory"))]
    again = place.again()
    place.listen()
    with pytest.raises(GenerationError, match="too little memory"):
        await again


@pytest.mark.parametrize(
    "first",
    [
        GenerationError("the shard listens and has not answered for 1 s"),
        failing(GoneShardError("Could not connect")),
        FakeShards(hook=hangs),
    ],
)
async def test_those_that_are_lost_at_once_have_followers(
    first: FakeShards | GenerationError, place: Place
) -> None:
    second = FakeShards()
    place.found = [first, second]
    again = place.again()
    place.listen()
    await asyncio.sleep(0.4)
    assert place.told and not again.done()  # no launcher has ended them
    place.listen()
    assert await again is second
    assert isinstance(first, GenerationError) or first.is_closed


async def test_an_attempt_ends_with_its_socket(place: Place) -> None:
    hanging, second = FakeShards(hook=hangs), FakeShards()
    recovery.PATIENCE_S = 100.0
    place.found = [hanging, second]
    again = place.again()
    place.listen()
    await asyncio.sleep(0.1)
    assert hanging.limits and not hanging.is_closed
    place.listen()
    async with asyncio.timeout(1):
        assert await again is second and hanging.is_closed and place.told == []
