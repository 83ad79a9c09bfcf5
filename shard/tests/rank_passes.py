"""Passes of several ranks, each in its own process, because the kernels use all threads of a
process.

`python -m shard.tests.rank_passes` reads cases and numbers of ranks from stdin, forks the ranks,
and writes their results as JSON. The parent computes nothing, because kernel threads do not survive
a fork.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
import torch
from text_generation_shard.device import open_device
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.cpu.collectives import SharedMemoryCollectives, memory_bytes
from text_generation_shard.device.cpu.runner import FusedDecoder
from text_generation_shard.engine.engine import Engine
from text_generation_shard.errors import RankError
from text_generation_shard.parallel import World

from shard.tests.driver import Driver, load_engine

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 1.0


@dataclass(frozen=True)
class Case:
    """A model, its form, the number of ranks and of threads each, bytes of a slot; and whether to
    test failures instead of results."""

    path: str
    form: Mapping[str, Any]
    sizes: Sequence[int]
    num_threads: int = 1
    slot_bytes: int = 2**16
    fails: bool = False


Found = dict[str, list[Any]]
"""Results of each rank, by number of ranks and index of the case; see `key`."""


def key(size: int, number: int) -> str:
    """The key of `Found`."""
    return f"{size} ranks, case {number}"


def run_cases(cases: Sequence[Case]) -> Found:
    """Run the cases in child processes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "shard.tests.rank_passes"],
        input=json.dumps([asdict(case) for case in cases]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=True,
    )
    found: Found = json.loads(done.stdout)
    return found


def main() -> None:
    """See above."""
    cases = [Case(**case) for case in json.load(sys.stdin)]
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        _run_ranks(cases, Path(folder))
        for number, case in enumerate(cases):
            for size in case.sizes:
                paths = [_path(Path(folder), size, number, rank) for rank in range(size)]
                found[key(size, number)] = [json.loads(path.read_text()) for path in paths]
    print(json.dumps(found))


def _path(folder: Path, size: int, number: int, rank: int) -> Path:
    """Where a rank writes its results of a case."""
    return folder / f"{size}-{number}-{rank}"


def _run_ranks(cases: Sequence[Case], folder: Path) -> None:
    """Each rank runs all cases with more ranks than its number, one after another. Those with most
    ranks come first, so that no rank waits for one that still runs a case without it."""
    runs = [(size, number) for number, case in enumerate(cases) for size in case.sizes]
    runs.sort(key=lambda run: -run[0])
    memory = [mmap.mmap(-1, memory_bytes(size, cases[number].slot_bytes)) for size, number in runs]
    ranks = []
    for rank in range(runs[0][0]):
        process = os.fork()
        if process == 0:
            try:
                for (size, number), own in zip(runs, memory, strict=True):
                    if rank < size:
                        found = _be_rank(rank, size, cases[number], own)
                        _path(folder, size, number, rank).write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        ranks.append(process)
    for process in ranks:
        os.waitpid(process, 0)


def _be_rank(rank: int, size: int, case: Case, memory: mmap.mmap) -> dict[str, Any]:
    torch.set_num_threads(case.num_threads)
    own = torch.frombuffer(memory, dtype=torch.uint8)
    collectives = SharedMemoryCollectives(own, rank, size, case.slot_bytes, DEADLINE_S)
    world = World(rank, size, collectives) if size > 1 else World()
    engine = _engine(case, world)
    return _failures(engine, world) if case.fails else _answers(engine)


def _engine(case: Case, world: World) -> Engine:
    settings = {"quantize": None, "deterministic": False, **case.form}
    options = DeviceOptions(
        settings["dtype"],
        "float32",
        settings["quantize"],
        deterministic=settings["deterministic"],
        rank=world.rank,
        world_size=world.size,
    )
    device = open_device("cpu", options)
    numba.set_num_threads(case.num_threads)
    given = {"device": device, "world": world, "world_size": world.size}
    return load_engine(Path(case.path), **given, **case.form)


def prompt_ids(number: int, count: int) -> list[int]:
    """The ids of prompt `number` of a test."""
    return [3 + (7 * place + 11 * number) % 90 for place in range(count)]


def _answers(engine: Engine) -> dict[str, Any]:
    """Tokens and log-probabilities of prompts of many lengths, one longer than the rows of a
    product, of parts of prompts together with decoding rows, and of draft tokens."""
    driver = Driver(engine)
    given: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos_token": True}
    first = driver.request(0, prompt_ids(0, 40), prefill_logprobs=True, **given)
    driver.add([first, driver.request(1, prompt_ids(1, 300), **given)])
    driver.add([driver.request(2, [7, 8, 9] * 9, **given)], driver.advance({}, 3))
    driver.add([driver.request(3, prompt_ids(3, 30), chunk_len=12, **given)], driver.advance({}))
    driver.step({3: 18})
    while driver.running:
        driver.step(speculate=2)
    return {
        "is_fused": isinstance(getattr(engine.runner, "_forward", None), FusedDecoder),
        "tokens": [driver.tokens[number] for number in range(4)],
        "logprobs": [driver.logprobs[number] for number in range(4)],
        "prompt": driver.prefill_logprobs[0][1:],
    }


def _failures(engine: Engine, world: World) -> dict[str, Any]:
    """Rank 1 aborts a message, takes part in the next one, and then in none."""
    driver, collectives = Driver(engine), world.collectives
    given: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos_token": True}
    collectives.begin(1)
    driver.add([driver.request(0, prompt_ids(0, 40), **given)])
    collectives.begin(2)
    given_up, late, seconds = "", "", 0.0
    if world.rank == 1:
        collectives.fail(2)
    else:
        given_up = _error_of_step(driver)
    for number in range(3, 6):
        collectives.begin(number)
        driver.step()
    if world.rank == 0:
        collectives.wait_at_most(SHORT_DEADLINE_S)
        began = time.monotonic()
        # The first operation of a message was done in the previous one.
        late, seconds = _error_of_step(driver), time.monotonic() - began
    return {
        "tokens": driver.tokens[0],
        "given_up": given_up,
        "late": late,
        "seconds": seconds,
    }


def _error_of_step(driver: Driver) -> str:
    try:
        driver.step()
    except RankError as error:
        return f"{error} {error.is_final}"
    return ""


if __name__ == "__main__":
    main()
