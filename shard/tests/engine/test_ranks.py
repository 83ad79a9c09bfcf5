"""The collectives that tests use hold what `Collectives` promises."""

import numpy as np
import pytest
import torch
from text_generation_shard.errors import RankError
from text_generation_shard.parallel import World

from shard.tests.ranks import run_ranks


def test_ranks_as_threads_compute_together() -> None:
    def body(world: World) -> tuple[list[float], list[float], list[int]]:
        own = torch.full((2,), float(world.rank + 1))
        return (
            world.all_reduce(own).tolist(),
            world.all_gather(own).tolist(),
            world.broadcast(np.array([world.rank + 7])).tolist(),
        )

    assert run_ranks(3, body) == [([6.0, 6.0], [1.0, 1.0, 2.0, 2.0, 3.0, 3.0], [7])] * 3


def test_a_rank_that_has_given_up_is_not_waited_for_and_is_there_again() -> None:
    def body(world: World) -> tuple[str, float]:
        message = ""
        world.collectives.begin(5)
        if world.rank == 1:
            world.collectives.fail(5)
        else:
            with pytest.raises(RankError) as found:
                world.all_reduce(torch.ones(1))
            message = str(found.value.args[0])
        world.collectives.begin(6)
        return message, world.all_reduce(torch.ones(1)).item()

    assert run_ranks(2, body) == [("shard 1 has aborted message 5", 2.0), ("", 2.0)]


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    def body(world: World) -> None:
        if world.rank == 1:
            raise ValueError("its own")
        world.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="its own"):
        run_ranks(2, body)
