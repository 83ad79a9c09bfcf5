"""Compares the serving speed with vLLM, llama.cpp and transformers, at five loads.

All servers load the same random checkpoint of 125 M parameters, in bfloat16 unless the name says
otherwise, and get the same prompts from the same client. They take turns alone on the machine, with
a new start in each round. Prints the medians over the rounds and the machine's upper bound.
Failures to install, to start or to finish a load are reported.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from contestants import CONTESTANTS, Contestant
from loads import LOADS, Rates, Shape
from machine import measured_rates, results, write
from make_checkpoint import ensure_checkpoint
from report import summarise, table
from servers import FOLDER, WORK, Running, running

LOAD_TIMEOUT_S = 300.0
WARM_UP_TOKENS = 4


def main() -> None:
    """Installs what is missing, measures, prints, writes."""
    options = _parse()
    checkpoint: Path = options.checkpoint
    ensure_checkpoint(checkpoint)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.servers}
    missing = _prepare(options.servers, checkpoint)
    for name, reason in missing.items():
        rounds[name].append({"failed": reason})
    best = Rates(0.0, 0.0)
    shapes = {name: _shape(name, options.quick) for name in options.loads}
    for number in range(options.rounds):
        best = best.best_of(measured_rates())
        for name in options.servers:
            if name not in missing:
                print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
                found = measure(CONTESTANTS[name], checkpoint, shapes, number)
                rounds[name].append(found)
        # After every round, so that an interrupted run keeps its figures.
        report = summarise(rounds, shapes, best, checkpoint)
        write(report, options.output)
    print(table(report))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=WORK / "llama-125m")
    parser.add_argument("--servers", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="a request of 8 tokens per client: only tries it out"
    )
    parser.add_argument("--output", type=Path, default=results("serve"))
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _shape(name: str, is_quick: bool) -> Shape:
    shape = LOADS[name]
    return replace(shape, requests=shape.clients, new_tokens=8) if is_quick else shape


def _prepare(names: list[str], checkpoint: Path) -> dict[str, str]:
    """The servers that can not take part, with the reasons."""
    missing: dict[str, str] = {}
    for name in names:
        try:
            CONTESTANTS[name].prepare(checkpoint)
        except RuntimeError as error:
            missing[name] = str(error)
            print(f"{name} can not take part: {error}", file=sys.stderr)
    return missing


def measure(
    contestant: Contestant, checkpoint: Path, shapes: dict[str, Shape], seed: int
) -> dict[str, Any]:
    """One start of one server with all its loads, up to the first that fails."""
    busy_percent = psutil.cpu_percent(interval=2)
    if busy_percent > 10:
        print(f"others keep {busy_percent:.0f} % of the cores busy: no fair run", file=sys.stderr)
    loads: dict[str, dict[str, float]] = {}
    found: dict[str, Any] = {"busy_percent_before": busy_percent, "loads": loads}
    server = contestant.server(checkpoint)
    try:
        with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
            first = run_load(handle, Shape(1, 1, 128, 1), seed)
            found["ready_s"] = handle.ready_s
            found["first_answer_s"] = handle.ready_s + first["elapsed_s"]
            for name, shape in shapes.items():
                if name in contestant.loads:
                    loads[name] = _warm_and_run(handle, name, shape, seed)
                    _note_memory(found, handle)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        found["failed"] = str(error)
    return found


def _warm_and_run(handle: Running, name: str, shape: Shape, seed: int) -> dict[str, float]:
    """Warms up with other prompts of the same size; only shared tokens are the same."""
    warm_up = replace(shape, requests=shape.clients, new_tokens=WARM_UP_TOKENS)
    run_load(handle, warm_up, 1000 + shape.clients)
    figures = run_load(handle, shape, seed)
    print(f"  {name}: {figures['tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    return figures


def _note_memory(found: dict[str, Any], handle: Running) -> None:
    """Reads PSS between loads, because it walks every page of the server."""
    found["peak_rss_mb"] = handle.peak_rss_mb()
    found["pss_mb"] = max(found.get("pss_mb", 0.0), handle.pss_mb())


def run_load(handle: Running, shape: Shape, seed: int) -> dict[str, float]:
    """Runs the load generator in its own process."""
    options = {
        "--url": handle.url,
        "--api": handle.server.api,
        "--model": handle.server.model,
        "--clients": shape.clients,
        "--requests": shape.requests,
        "--prompt-tokens": shape.prompt_tokens,
        "--shared-tokens": shape.shared_tokens,
        "--new-tokens": shape.new_tokens,
        "--seed": seed,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, str(FOLDER / "load.py"), *words]
    what = f"{handle.server.name}, {shape}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{what}: not done after {LOAD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-8:])
        raise RuntimeError(f"{what}: {tail}\n{handle.tail_of_log()}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


if __name__ == "__main__":
    main()
