"""Ranks meet, as threads: a missing, a different or a failed rank is named."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from text_generation_process.flags import ShardConfig
from text_generation_shard.errors import ModelError, RankError
from text_generation_shard.parallel import Rendezvous


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as listener:
        return int(listener.getsockname()[1])


def config_of(rank: int, size: int, port: int, deadline_s: float = 10.0) -> ShardConfig:
    return ShardConfig(
        model_path=Path("/model"),
        rank=rank,
        world_size=size,
        master_port=port,
        step_deadline=deadline_s,
    )


def join(config: ShardConfig, within_s: float = 5.0) -> Rendezvous:
    return Rendezvous.join(config, within_s)


@contextmanager
def meet(size: int, deadline_s: float = 10.0) -> Iterator[list[Rendezvous]]:
    """`size` ranks that have met."""
    port = free_port()
    with ThreadPoolExecutor(size) as pool:
        configs = [config_of(rank, size, port, deadline_s) for rank in range(size)]
        found = list(pool.map(join, configs))
    try:
        yield found
    finally:
        for rendezvous in found:
            rendezvous.close()


def test_all_give_and_all_get() -> None:
    with meet(3) as rendezvous, ThreadPoolExecutor(3) as pool:
        for what in ("first", "second"):
            given = [pool.submit(one.gather, what, f"{what} of {one.rank}") for one in rendezvous]
            found = [one.result() for one in given]
            assert found == [[f"{what} of {rank}" for rank in range(3)]] * 3


def test_only_this_address_is_listened_on() -> None:
    with meet(2) as rendezvous:
        port = int(rendezvous[0]._place.rpartition(":")[2])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5).close()


def test_a_failed_rank_is_named_with_the_reason() -> None:
    with meet(3) as rendezvous, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(rendezvous[rank].all_here, "loaded") for rank in (0, 2)]
        rendezvous[1].fail("no weights here")
        for one in waiting:
            with pytest.raises(RankError, match=r"^shard 1 has failed: no weights here$") as error:
                one.result(timeout=10)
            assert error.value.is_final


def test_values_that_are_complete_after_a_failure_do_not_count() -> None:
    with meet(2) as rendezvous:
        rendezvous[1]._store.set("loaded/1", "")
        rendezvous[1].fail("it waited too long")
        with pytest.raises(RankError, match=r"^shard 1 has failed: it waited too long$"):
            rendezvous[0].all_here("loaded")


def test_a_missing_rank_is_named() -> None:
    place = config_of(0, 2, free_port())
    where = f"localhost:{place.master_port}"
    with pytest.raises(RankError, match=f"^shard 1 did not come to {where} within 0.3 s$"):
        join(place, within_s=0.3)
    nobody = config_of(1, 2, free_port())
    with pytest.raises(
        RankError, match=r"^shard 0 was not found at .* \(no program listens there\)"
    ):
        join(nobody, within_s=0.3)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ModelError, match=r"Address already in use.*--master-port"):
            join(config_of(0, 2, port))


def test_an_unknown_host_name() -> None:
    with pytest.raises(ModelError, match=r"shard 0 can not listen at nowhere\.invalid:29500"):
        join(replace(config_of(0, 2, 29500), master_addr="nowhere.invalid"))


def test_nothing_of_a_rendezvous_runs_when_it_is_closed() -> None:
    with meet(2) as rendezvous:
        threads = [one._thread for one in rendezvous]
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert not [one for one in threading.enumerate() if one.name == "join" and one.is_alive()]
