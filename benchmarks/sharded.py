"""Compares one shard of two threads with two shards of one thread, in turn.

Both servers run at the same time and are measured in turn, in short runs and alternating order,
because a host's speed changes within minutes. The same for one shard with and without
--deterministic, which sums in parts. Prints the median over the rounds of the ratios of the second
server's tokens per second to the first one's.

Also prints the two shards' seconds in steps (/metrics) and the part in which they waited for each
other (their logs at the end).
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import loads
from machine import machine
from make_checkpoint import Shape, write_checkpoint
from serve import WARM_UP_TOKENS, run_load
from servers import FOLDER, WORK, Running, Server, ours, running

# Heads and KV heads that two, and four, shards can share.
MODELS = {
    "llama-125m-12-heads": Shape(768, 2_048, 16, 12, 4, 64),
    "llama-1b": Shape(2_048, 8_192, 16, 32, 8, 64),
    "llama-tiny": Shape(128, 256, 2, 4, 2, 32),
}
LOADS = ("c1", "c8", "c32")
# Runs of each server in a round.
SLICES = 2
# Seconds of warm-up in turn: a server that was idle while another one started is slow at first.
SETTLING_S = 40.0
_WAITED = re.compile(r"shard (\d+) has waited ([0-9.]+) s")
_STEPS = re.compile(r'^tgi_batch_shard_duration_sum\{rank="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers to compare."""

    name: str
    first: tuple[str, tuple[str, ...]]
    """Name and flags."""
    second: tuple[str, tuple[str, ...]]


PAIRS = {
    "shards": Pair("shards", ("one shard", ("--num-shard", "1")), ("two", ("--num-shard", "2"))),
    "deterministic": Pair(
        "deterministic", ("as usual", ()), ("deterministic", ("--deterministic",))
    ),
}


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    found: dict[str, list[dict[str, float]]] = {}
    for model in options.models:
        for name in options.pairs:
            for number in range(options.rounds):
                for key, values in _round(PAIRS[name], model, options, number).items():
                    found.setdefault(f"{model}, {key}", []).append(values)
                    print(model, key, values, file=sys.stderr)
                # After every round, so that an interrupted run keeps its figures.
                _write(options.output, found)
    print(table(found))
    print(f"written to {options.output}", file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["llama-125m-12-heads", "llama-1b"],
    )
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=[*PAIRS])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    # Even, so that each server starts first equally often.
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--output",
        type=Path,
        default=FOLDER / "results" / f"sharded-{datetime.now(UTC):%Y-%m-%d}.json",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _write(path: Path, found: dict[str, list[dict[str, float]]]) -> None:
    report: dict[str, Any] = {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", "benchmarks/sharded.py", *sys.argv[1:]]),
        "machine": machine(),
        "rounds": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def _round(
    pair: Pair, model: str, options: argparse.Namespace, number: int
) -> dict[str, dict[str, float]]:
    """Restarts both servers: they keep what they find at their start, such as huge pages."""
    checkpoint = WORK / model
    if not (checkpoint / "config.json").exists():
        write_checkpoint(checkpoint, shape=MODELS[model])
    servers = [
        ours(checkpoint, "--dtype", "bfloat16", *flags, name=name)
        for name, flags in (pair.first, pair.second)
    ]
    found: dict[str, dict[str, float]] = {}
    seeds = iter(range(1000 * number + 1, 1000 * (number + 1)))
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as stack:
            handles = _started(stack, servers if number % 2 == 0 else servers[::-1], Path(folder))
            _settle(handles, replace(loads.LOADS["c1"], new_tokens=options.new_tokens), seeds)
            for load in options.loads:
                shape = replace(loads.LOADS[load], new_tokens=options.new_tokens)
                found[f"{pair.name} {load}: tokens/s"] = _rates(handles, shape, seeds)
            shares = {name: _step_seconds(handle) for name, handle in handles.items()}
        # A shard logs at its end how long it has waited.
        for name, handle in handles.items():
            if shares[name]:
                found[f"{name}: seconds"] = _where_time_went(handle, shares[name])
    return found


def _started(stack: ExitStack, servers: Sequence[Server], folder: Path) -> dict[str, Running]:
    return {
        server.name: stack.enter_context(running(server, folder / server.name.replace(" ", "-")))
        for server in servers
    }


def _settle(handles: dict[str, Running], shape: loads.Shape, seeds: Iterator[int]) -> None:
    """Sends requests to both in turn, without measuring."""
    end = time.monotonic() + SETTLING_S
    while time.monotonic() < end:
        for handle in handles.values():
            run_load(handle, replace(shape, requests=1), next(seeds))


def _rates(
    handles: dict[str, Running], shape: loads.Shape, seeds: Iterator[int]
) -> dict[str, float]:
    """Tokens per second of both, over several short runs in turn."""
    warm_up = replace(shape, requests=shape.clients, new_tokens=WARM_UP_TOKENS)
    for handle in handles.values():
        run_load(handle, warm_up, next(seeds))
    short = replace(shape, requests=shape.clients)
    seconds = dict.fromkeys(handles, 0.0)
    for number in range(SLICES):
        seed = next(seeds)
        for name, handle in list(handles.items())[:: 1 if number % 2 == 0 else -1]:
            seconds[name] += 1 / run_load(handle, short, seed)["tokens_per_s"]
    return {name: SLICES / total for name, total in seconds.items()}


def _step_seconds(handle: Running) -> dict[str, float]:
    """The time of steps so far by rank; empty with one shard."""
    with urllib.request.urlopen(f"{handle.url}/metrics", timeout=10) as answer:
        return {rank: float(value) for rank, value in _STEPS.findall(answer.read().decode())}


def _where_time_went(handle: Running, steps: dict[str, float]) -> dict[str, float]:
    """By rank: seconds in steps, and seconds of waiting for other ranks."""
    waited = dict(_WAITED.findall(handle.log.read_text(errors="replace")))
    return {
        f"shard {rank} {what}": float(value)
        for rank, total in steps.items()
        for what, value in (("in steps", total), ("waited", waited[rank]))
    }


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """The report as text."""
    lines = ["| | figures (median of rounds) | ratio | rounds |", "| --- " * 4 + "|"]
    for name, rounds in found.items():
        names = sorted(rounds[0]) if "seconds" in name else _in_order(rounds[0])
        medians = [statistics.median(one[key] for one in rounds) for key in names]
        told = ", ".join(f"{key} {value:.4g}" for key, value in zip(names, medians, strict=True))
        ratios = [] if "seconds" in name else [one[names[1]] / one[names[0]] for one in rounds]
        median = f"{statistics.median(ratios):.3f}" if ratios else ""
        lines.append(f"| {name} | {told} | {median} | {' '.join(f'{it:.3f}' for it in ratios)} |")
    return "\n".join(lines)


def _in_order(values: dict[str, float]) -> list[str]:
    """The first server of a pair, then the second, in any order of start."""
    order = [server[0] for pair in PAIRS.values() for server in (pair.first, pair.second)]
    return sorted(values, key=order.index)


if __name__ == "__main__":
    main()
