"""Compares this tree with an earlier commit, in turn: throughput, memory, router, start.

Both servers run at the same time and are measured in turn, in short runs and alternating order,
because a host's speed changes within minutes. The models are the random checkpoint of 125 M
parameters and one of two such layers, where the server's own work is a larger part. Prints the
median over the rounds of the ratios of now to before. The router's figure is events per second of
its processor time (router.py), the start's is the time to a first token (start.py).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loads import LOADS, Shape
from machine import heading, write
from make_checkpoint import ensure_checkpoint
from serve import WARM_UP_TOKENS, run_load
from servers import FOLDER, WORK, Running, ours, running
from streams import Streams

import router

# Checkpoint, layers, requests per client in a run.
MODELS = {"llama-125m": (30, 1), "llama-2-layers": (2, 4)}
# Runs of each server in a round.
SLICES = 4
# Many short rounds, because the speed of a host changes within seconds.
ROUTER_SECONDS, ROUTER_ROUNDS, NEW_TOKENS = 3.0, 4, 256
PACKAGES = ("launcher", "router", "shard", "proto", "process")


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout under measurement."""

    name: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Python imports the packages of this tree."""
        return {"PYTHONPATH": os.pathsep.join(str(self.folder / name) for name in PACKAGES)}


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    trees = (_checkout(options.before), Tree("now", FOLDER.parent))
    found: dict[str, list[dict[str, float]]] = {}
    if options.loads:
        for model in options.models:
            found |= _served(trees, model, options.loads, options.rounds)
    if options.streams:
        found |= _routed(trees, options.streams, options.rounds)
    if options.starts:
        found["start: first token, s"] = _in_turn(trees, options.starts, _first_token_s)
    report = {
        **heading(),
        "before": trees[0].name,
        "now": _git("rev-parse", "--short", "HEAD"),
        "rounds": found,
    }
    print(table(found))
    write(report, options.output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--streams", type=int, nargs="*", default=[512])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def _checkout(revision: str) -> Tree:
    """The tree of a commit, without its history."""
    commit = _git("rev-parse", "--short", revision)
    folder = WORK / "revisions" / commit
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.Popen(
            ["git", "archive", commit], cwd=FOLDER.parent, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
        if archive.wait():
            raise RuntimeError(f"git archive {commit} failed")
    return Tree(commit, folder)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _in_turn(
    trees: Sequence[Tree], rounds: int, measure: Callable[[Tree], float]
) -> list[dict[str, float]]:
    """Old and new, then new and old, and so on."""
    found = []
    for number in range(rounds):
        order = trees if number % 2 == 0 else trees[::-1]
        values = {tree.name: measure(tree) for tree in order}
        found.append({"before": values[trees[0].name], "now": values["now"]})
        print(found[-1], file=sys.stderr)
    return found


def _served(
    trees: Sequence[Tree], model: str, loads: Sequence[str], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Each round restarts both servers: they keep what they find at their start, such as huge
    pages."""
    found: dict[str, list[dict[str, float]]] = {}
    seeds = iter(range(1, 100_000))
    num_layers, times = MODELS[model]
    checkpoint = WORK / model
    ensure_checkpoint(checkpoint, num_layers=num_layers)
    for number in range(rounds):
        with ExitStack() as stack:
            handles = _started(stack, trees if number % 2 == 0 else trees[::-1], checkpoint)
            for load in loads:
                values = _rates(handles, LOADS[load], times, seeds)
                both = {"before": values[trees[0].name], "now": values["now"]}
                found.setdefault(f"{model} {load}: tokens/s", []).append(both)
                print(model, load, both, file=sys.stderr)
            held = {name: handle.pss_mb() for name, handle in handles.items()}
            both = {"before": held[trees[0].name], "now": held["now"]}
            found.setdefault(f"{model}: memory of all processes, MB", []).append(both)
    return found


def _started(stack: ExitStack, trees: Sequence[Tree], checkpoint: Path) -> dict[str, Running]:
    handles = {}
    for tree in trees:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = ours(checkpoint, "--dtype", "bfloat16", name=tree.name)
        server = replace(server, environment=tuple(tree.environment.items()))
        handles[tree.name] = stack.enter_context(running(server, folder))
    return handles


def _rates(
    handles: dict[str, Running], shape: Shape, times: int, seeds: Iterator[int]
) -> dict[str, float]:
    """Tokens per second of both, over several short runs in turn."""
    warm_up = replace(shape, requests=shape.clients, new_tokens=WARM_UP_TOKENS)
    for handle in handles.values():
        run_load(handle, warm_up, next(seeds))
    short = replace(shape, requests=shape.clients * times)
    seconds = dict.fromkeys(handles, 0.0)
    for number in range(SLICES):
        seed = next(seeds)
        for name, handle in list(handles.items())[:: 1 if number % 2 == 0 else -1]:
            seconds[name] += 1 / run_load(handle, short, seed)["tokens_per_s"]
    return {name: SLICES / total for name, total in seconds.items()}


def _routed(
    trees: Sequence[Tree], streams: Sequence[int], rounds: int
) -> dict[str, list[dict[str, float]]]:
    found = {}
    cores = router.available_cores()
    os.sched_setaffinity(0, cores.others)
    with ExitStack() as stack:
        routers = {
            tree.name: stack.enter_context(
                router.running(cores, max(streams), environment=tree.environment)
            )
            for tree in trees
        }
        seeds = iter(range(100_000))
        for num in streams:

            def events_per_cpu_s(tree: Tree, num: int = num) -> float:
                load = Streams(routers[tree.name].port, "tgi", num, NEW_TOKENS, next(seeds))
                row = asyncio.run(router.measure(routers[tree.name], load, ROUTER_SECONDS))
                return float(row["events_per_cpu_s"])

            for tree in trees:
                events_per_cpu_s(tree)
            found[f"router, {num} streams: events per core and s"] = _in_turn(
                trees, ROUTER_ROUNDS * rounds, events_per_cpu_s
            )
    os.sched_setaffinity(0, cores.router | cores.others)
    return found


def _first_token_s(tree: Tree) -> float:
    return float(_run(tree, "start.py", "--starts", "1")["first_token_s"])


def _run(tree: Tree, script: str, *arguments: str) -> dict[str, Any]:
    """The report of another benchmark for a tree."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report"
        command = [sys.executable, str(FOLDER / script), *arguments, "--output", str(output)]
        environment = {**os.environ, **tree.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{tree.name}: {script} failed:\n{done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads(output.read_text())
        return report


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """The report as text."""
    lines = ["| | before | now | ratio (median of rounds) | rounds |", "| --- " * 5 + "|"]
    for name, rounds in found.items():
        before, now = (statistics.median(one[key] for one in rounds) for key in ("before", "now"))
        ratios = [one["now"] / one["before"] for one in rounds]
        told = " ".join(f"{ratio:.3f}" for ratio in ratios)
        median = statistics.median(ratios)
        lines.append(f"| {name} | {before:.4g} | {now:.4g} | {median:.3f} | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
