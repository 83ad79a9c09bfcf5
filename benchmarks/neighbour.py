"""Tokens per second while other processes use the same cores.

Busy loops share the cores with server and client. A fair result is the share of the cores that the
scheduler leaves to the server. Without precautions a step can take many times as long, because all
its threads wait for the slowest one.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loads import Shape
from machine import heading, results, write
from make_checkpoint import ensure_checkpoint
from serve import run_load
from servers import WORK, ours, running

CHECKPOINT = WORK / "llama-125m"
SHAPES = {"c1": Shape(1, 2, 128, 64), "c8": Shape(8, 2, 128, 64)}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results("neighbour"))
    options = parser.parse_args()
    ensure_checkpoint(CHECKPOINT)
    server = ours(CHECKPOINT, "--dtype", "bfloat16")
    found: dict[str, dict[int, list[float]]] = {
        load: {count: [] for count in options.neighbours} for load in SHAPES
    }
    with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
        run_load(handle, Shape(1, 1, 128, 32), 1000)
        for number in range(options.rounds):
            for count in options.neighbours:
                with busy(count):
                    for load, shape in SHAPES.items():
                        print(f"round {number + 1}: {load}, {count} neighbours", file=sys.stderr)
                        figures = run_load(handle, shape, number)
                        found[load][count].append(figures["tokens_per_s"])
    report: dict[str, Any] = {
        **heading(),
        "tokens_per_s": {
            load: {str(count): statistics.median(speeds) for count, speeds in by_count.items()}
            for load, by_count in found.items()
        },
        "rounds": {load: {str(n): s for n, s in by.items()} for load, by in found.items()},
    }
    print(table(report["tokens_per_s"]))
    write(report, options.output)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that never sleep, during the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def table(speeds: dict[str, dict[str, float]]) -> str:
    """Tokens per second by load and number of neighbours, and what is left of the first."""
    lines = ["| load | neighbours | tokens/s | of alone |", "|---|---|---|---|"]
    for load, by_count in speeds.items():
        alone = next(iter(by_count.values()))
        lines += [
            f"| {load} | {count} | {speed:.1f} | {speed / alone:.2f} |"
            for count, speed in by_count.items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
