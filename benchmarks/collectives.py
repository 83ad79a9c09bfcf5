"""Checks and times sums over ranks on one machine: sums of many sizes after random sleeps, through
shared memory and by gloo.

    python benchmarks/collectives.py --operations 1000000
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from machine import machine
from servers import FOLDER

SHAPES = ((1, 2048), (32, 2048), (240, 2048))
# Slots as large as a server's, so that no sum of these shapes is split.
SLOT_BYTES = 8 << 20
# Of the checked sums: the most numbers, the number of sums per sleep, and the longest sleep.
MOST_NUMBERS = 20_000
SLEEPS, LONGEST_SLEEP_S = 1000, 0.003
# A sum of whole numbers below this is exact in float32.
EXACT = 1 << 21


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000, help="checked sums")
    parser.add_argument("--rounds", type=int, default=2000, help="measured sums of each shape")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="default: in results")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(run_rank(options)))
        return
    found = run_all(options)
    report = {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", "benchmarks/collectives.py", *sys.argv[1:]]),
        "machine": machine(),
        "ranks": options.ranks,
        **found,
    }
    checked = found["checked"]
    print(
        f"{checked['operations']} sums of 1 to {MOST_NUMBERS} numbers, {checked['sleeps']} sleeps "
        f"of rank 0: {checked['wrong']} wrong, {checked['seconds']:.0f} s"
    )
    for row in found["rows"]:
        print("{name:30} {by:14} p50 {p50_us:8.1f} µs  p95 {p95_us:8.1f} µs".format(**row))
    output = options.output or FOLDER / "results" / f"collectives-{datetime.now(UTC):%Y-%m-%d}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    if checked["wrong"]:
        sys.exit(1)


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """The results of rank 0. Raises RuntimeError if a rank failed."""
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = ["--operations", options.operations, "--rounds", options.rounds]
    arguments += ["--ranks", options.ranks, "--port", port]
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    first: dict[str, Any] = json.loads(outputs[0])
    first["checked"]["wrong"] = sum(json.loads(text)["checked"]["wrong"] for text in outputs)
    return first


def run_rank(options: argparse.Namespace) -> dict[str, Any]:
    """One rank's process."""
    import os

    from text_generation_shard.device import prepare_process

    prepare_process(os.environ, options.rank, options.ranks, "cpu")
    from text_generation_shard.config import ShardConfig
    from text_generation_shard.device.cpu.collectives import SharedMemoryCollectives
    from text_generation_shard.device.reference.collectives import GlooCollectives
    from text_generation_shard.meeting import Meeting

    config = ShardConfig(
        model_path=Path("/none"),
        rank=options.rank,
        world_size=options.ranks,
        master_port=options.port,
    )
    meeting = Meeting.join(config, "cpu", "float32")
    shared = SharedMemoryCollectives.meet(meeting, SLOT_BYTES)
    gloo = GlooCollectives.meet(meeting)
    checked = check(shared, options.operations)
    meeting.all_here("all sums were checked")
    rows = list(measure(shared, gloo, options.rounds))
    meeting.all_here("all was measured")
    meeting.close()
    return {"checked": checked, "rows": rows}


def check(shared: Any, operations: int) -> dict[str, Any]:
    """Sums whose results are known, in messages of random lengths."""
    import torch

    alike, own = random.Random(1), random.Random(2 + shared.rank)
    ramp, ranks = torch.arange(MOST_NUMBERS, dtype=torch.float32), range(shared.size)
    wrong, sleeps, done, number = 0, 0, 0, 0
    began = time.monotonic()
    while done < operations:
        number += 1
        shared.begin(number)
        for _ in range(min(alike.randint(1, 300), operations - done)):
            # Mostly small ones, as in a server.
            count = int(MOST_NUMBERS ** alike.random())
            if own.randrange(SLEEPS) == 0:
                sleeps += 1
                time.sleep(own.random() * LONGEST_SLEEP_S)
            first = done % EXACT
            total = shared.all_reduce(ramp[:count] + float(first + shared.rank))
            expected = ramp[:count] * shared.size + float(first * shared.size + sum(ranks))
            wrong += not torch.equal(total, expected)
            done += 1
    seconds = time.monotonic() - began
    return {"operations": done, "wrong": wrong, "sleeps": sleeps, "seconds": seconds}


def measure(shared: Any, gloo: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Microseconds of sums, one after another, as rank 0 sees them."""
    import torch
    from text_generation_shard.device.cpu.kernels.exchange import exchange_word

    shared.begin(1 << 30)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.zeros(shape, dtype=dtype)
            name = f"sum of {list(shape)} {str(dtype).removeprefix('torch.')}"
            ways: dict[str, Callable[[], object]] = {
                shared.name: partial(shared.all_reduce, values),
                "gloo": partial(_by_gloo, gloo, values),
            }
            for by, way in ways.items():
                yield {"name": name, "by": by, **_timed(way, rounds)}
    yield {
        "name": "nothing but the wait",
        "by": shared.name,
        **_timed(lambda: exchange_word(shared.exchange, shared.reserve(1)), rounds),
    }


def _by_gloo(gloo: Any, values: Any) -> None:
    """A sum by gloo itself, whose order of ranks is not fixed."""
    gloo._group.allreduce([values]).wait()


def _timed(way: Callable[[], object], rounds: int) -> dict[str, float]:
    times = []
    for _ in range(rounds + rounds // 10):
        began = time.perf_counter_ns()
        way()
        times.append((time.perf_counter_ns() - began) / 1000)
    times = times[-rounds:]
    return {"p50_us": statistics.median(times), "p95_us": statistics.quantiles(times, n=20)[-1]}


if __name__ == "__main__":
    main()
