"""Passes of several ranks, each a process: kernels that use all threads of a process can not be
those of two ranks.

`python -m shard.tests.rank_passes RANK SIZE DESCRIPTOR` is one of them: it reads cases from stdin,
and writes what each gives, as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from text_generation_shard.device import open_device
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.cpu.collectives import SharedMemoryCollectives, memory_bytes
from text_generation_shard.device.cpu.runner import FusedDecoder
from text_generation_shard.parallel import World

from shard.tests.driver import Driver, load_engine

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Case:
    """A model, how it is held, and bytes of a slot."""

    path: str
    form: Mapping[str, Any]
    slot_bytes: int = 2**16


def run_ranks(size: int, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    """What each case gives on each of so many ranks: [size][cases]."""
    memory = os.memfd_create("ranks")
    most = max(memory_bytes(size, case.slot_bytes) for case in cases)
    os.ftruncate(memory, most * len(cases))
    command = [sys.executable, "-W", "ignore", "-m", "shard.tests.rank_passes"]
    told = json.dumps([asdict(case) for case in cases])
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            pass_fds=[memory],
            env={**os.environ, "NUMBA_NUM_THREADS": "2" if size < 4 else "1"},
        )
        for rank in range(size)
    ]
    os.close(memory)
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(told)
            rank.stdin.close()
            rank.stdin = None
        return [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run_case(case: Case, world: World) -> dict[str, Any]:
    """Tokens and log-probabilities of prompts of many lengths, of parts of prompts beside rows that
    decode, of guesses, and of one that is longer than a product's rows."""
    settings = {"dtype": "float32", "quantize": None, "deterministic": False, **case.form}
    options = DeviceOptions(
        settings["dtype"],
        "float32",
        settings["quantize"],
        deterministic=settings["deterministic"],
        rank=world.rank,
        world_size=world.size,
    )
    device = open_device("cpu", options)
    engine = load_engine(Path(case.path), device=device, world=world, **case.form)
    driver, runner = Driver(engine), engine._runner
    given: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos_token": True}

    def ids(number: int, count: int) -> list[int]:
        return [3 + (7 * place + 11 * number) % 90 for place in range(count)]

    first = driver.request(0, ids(0, 40), prefill_logprobs=True, **given)
    driver.add([first, driver.request(1, ids(1, 300), **given)])
    driver.add([driver.request(2, [7, 8, 9] * 9, **given)], driver.advance({}, 3))
    driver.add([driver.request(3, ids(3, 1), **given)], driver.advance({}))
    while driver.running:
        driver.step(speculate=2)
    return {
        "is_fused": isinstance(getattr(runner, "_forward", None), FusedDecoder),
        "tokens": [driver.tokens[number] for number in range(4)],
        "logprobs": [driver.logprobs[number] for number in range(4)],
        "prompt": driver.prefill_logprobs[0][1:],
    }


def main() -> None:
    """One rank."""
    rank, size, descriptor = (int(word) for word in sys.argv[1:])
    torch.set_num_threads(2 if size < 4 else 1)
    cases = [Case(**case) for case in json.load(sys.stdin)]
    nbytes = os.fstat(descriptor).st_size // len(cases)
    whole = torch.from_file(
        f"/proc/self/fd/{descriptor}", True, nbytes * len(cases), dtype=torch.uint8
    )
    found = []
    for number, case in enumerate(cases):
        memory = whole[number * nbytes :]
        given = memory, rank, size, case.slot_bytes, DEADLINE_S
        found.append(run_case(case, World(rank, size, SharedMemoryCollectives(*given))))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
