"""This tree beside an earlier commit, in turn: tokens served, the router by itself, the start.

Both servers are up at the same time, on the random checkpoint of 125 M parameters. Each round asks
both, one after the other; the order changes from round to round. A round's ratio is now to before;
the median of the ratios is printed. router.py measures the router (events per second of its
processor time), start.py the start, in turn as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loads import LOADS
from machine import machine
from make_checkpoint import write_checkpoint
from serve import WARM_UP_TOKENS, run_load
from servers import FOLDER, WORK, Running, ours, running

PACKAGES = ("launcher", "router", "shard", "proto", "process")


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout under measurement."""

    name: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What makes Python take the packages of this tree."""
        return {"PYTHONPATH": os.pathsep.join(str(self.folder / name) for name in PACKAGES)}


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    trees = (_checkout(options.before), Tree("now", FOLDER.parent))
    found: dict[str, list[dict[str, float]]] = {}
    if options.loads:
        found |= _served(trees, options.loads, options.rounds)
    if options.streams:
        found |= _routed(trees, options.streams, options.rounds)
    if options.starts:
        found["start: first token, s"] = _in_turn(trees, options.starts, _first_token_s)
    report = {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", "benchmarks/revisions.py", *sys.argv[1:]]),
        "machine": machine(),
        "before": trees[0].name,
        "now": _git("rev-parse", "--short", "HEAD"),
        "rounds": found,
    }
    print(table(found))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {options.output}", file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=["c1", "c32"])
    parser.add_argument("--streams", type=int, nargs="*", default=[512])
    parser.add_argument("--starts", type=int, default=5)
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / f"revisions-{day}.json")
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
    trees: Sequence[Tree], loads: Sequence[str], rounds: int
) -> dict[str, list[dict[str, float]]]:
    checkpoint = WORK / "llama-125m"
    if not (checkpoint / "config.json").exists():
        write_checkpoint(checkpoint)
    with ExitStack() as stack:
        handles: dict[str, Running] = {}
        for tree in trees:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = ours(checkpoint, "--dtype", "bfloat16", name=tree.name)
            server = replace(server, environment=tuple(tree.environment.items()))
            handles[tree.name] = stack.enter_context(running(server, folder))
        seeds = iter(range(1, 100_000))
        found = {}
        for name in loads:
            shape = LOADS[name]
            warm_up = replace(shape, requests=shape.clients, new_tokens=WARM_UP_TOKENS)
            for handle in handles.values():
                run_load(handle, warm_up, next(seeds))

            def tokens_per_s(tree: Tree, load: str = name) -> float:
                return run_load(handles[tree.name], LOADS[load], next(seeds))["tokens_per_s"]

            found[f"{name}: tokens/s"] = _in_turn(trees, rounds, tokens_per_s)
        return found


def _routed(
    trees: Sequence[Tree], streams: Sequence[int], rounds: int
) -> dict[str, list[dict[str, float]]]:
    found = {}
    for num in streams:

        def events_per_cpu_s(tree: Tree, num: int = num) -> float:
            arguments = ["router.py", "--streams", str(num), "--seconds", "10"]
            [row] = _run(tree, *arguments)["rows"]
            return float(row["events_per_cpu_s"])

        found[f"router, {num} streams: events per core and s"] = _in_turn(
            trees, rounds, events_per_cpu_s
        )
    return found


def _first_token_s(tree: Tree) -> float:
    return float(_run(tree, "start.py", "--starts", "1")["first_token_s"])


def _run(tree: Tree, script: str, *arguments: str) -> dict[str, Any]:
    """What one of the other benchmarks finds out about a tree."""
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
    """The report for people."""
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
