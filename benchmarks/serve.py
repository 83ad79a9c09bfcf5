"""Serving speed of this project beside transformers serve: one command, one table, one JSON file.

Both servers load the same random checkpoint of 125 M parameters in bfloat16. They take turns,
alone on the machine, each round with a fresh start; greedy, end-of-sequence ignored, streamed, a
closed loop of c clients. What is printed is the median over the rounds.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from make_checkpoint import write_checkpoint
from servers import (
    FOLDER,
    PEER_PYTHON,
    WORK,
    Running,
    Server,
    install_peer,
    ours,
    running,
    transformers_serve,
)

COLUMNS = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
Figures = dict[str, float]


def main() -> None:
    """Installs what is missing, measures, prints, writes."""
    options = _parse()
    checkpoint: Path = options.checkpoint
    if not (checkpoint / "config.json").exists():
        write_checkpoint(checkpoint)
    install_peer()
    contestants = [ours(checkpoint, "--dtype", "bfloat16"), transformers_serve(checkpoint)]
    rounds: dict[str, list[dict[str, Any]]] = {server.name: [] for server in contestants}
    for number in range(options.rounds):
        for server in contestants:
            print(f"round {number + 1} of {options.rounds}: {server.name}", file=sys.stderr)
            rounds[server.name].append(measure(server, options.clients, options.requests, number))
    report = summarise(rounds, options)
    print(table(report))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {options.output}", file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=WORK / "llama-125m")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[4, 16, 64], help="one number per --clients"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--output",
        type=Path,
        default=FOLDER / "results" / f"serve-{datetime.now(UTC):%Y-%m-%d}.json",
    )
    options = parser.parse_args()
    if len(options.requests) != len(options.clients):
        parser.error("--requests needs as many numbers as --clients")
    return options


def measure(server: Server, clients: list[int], requests: list[int], seed: int) -> dict[str, Any]:
    """One start of one server with every load, each after a short warm-up of the same width."""
    busy_percent = psutil.cpu_percent(interval=2)
    if busy_percent > 10:
        print(
            f"others use {busy_percent:.0f} % of this machine: do not trust this", file=sys.stderr
        )
    with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
        first = load(handle, clients=1, requests=1, new_tokens=1, seed=seed)
        found: dict[str, Any] = {
            "busy_percent_before": busy_percent,
            "ready_s": handle.ready_s,
            "first_answer_s": handle.ready_s + first["elapsed_s"],
            "loads": {},
        }
        for width, count in zip(clients, requests, strict=True):
            load(handle, clients=width, requests=width, new_tokens=4, seed=1000 + width)
            found["loads"][str(width)] = load(
                handle, clients=width, requests=count, new_tokens=64, seed=seed
            )
        found["peak_rss_mb"] = handle.peak_rss_mb()
    return found


def load(handle: Running, *, clients: int, requests: int, new_tokens: int, seed: int) -> Figures:
    """Runs the load generator in its own process."""
    command = [sys.executable, str(FOLDER / "load.py"), "--url", handle.url]
    command += ["--api", handle.server.api, "--model", handle.server.model]
    command += ["--clients", str(clients), "--requests", str(requests)]
    command += ["--prompt-tokens", "128", "--new-tokens", str(new_tokens), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{done.stderr}\n{handle.log.read_text()}")
    figures: Figures = json.loads(done.stdout)
    return figures


def summarise(
    rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the rounds, ratios, and what it takes to run it again."""
    servers: dict[str, Any] = {}
    for name, found in rounds.items():
        servers[name] = {
            "ready_s": statistics.median(one["ready_s"] for one in found),
            "first_answer_s": statistics.median(one["first_answer_s"] for one in found),
            "peak_rss_mb": max(sum(one["peak_rss_mb"].values()) for one in found),
            "loads": {
                str(width): {
                    column: statistics.median(one["loads"][str(width)][column] for one in found)
                    for column in COLUMNS
                }
                for width in options.clients
            },
        }
    mine, peer = (servers[name]["loads"] for name in rounds)
    return {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", "benchmarks/serve.py", *sys.argv[1:]]),
        "checkpoint": "benchmarks/make_checkpoint.py: Llama, 125 M parameters, random, bfloat16",
        "load": "128 tokens in, 64 out, greedy, end-of-sequence ignored, streamed, closed loop",
        "requests": dict(zip(map(str, options.clients), options.requests, strict=True)),
        "machine": machine(),
        "versions": versions(),
        "servers": servers,
        "ratio": {
            width: mine[width]["tokens_per_s"] / peer[width]["tokens_per_s"] for width in mine
        },
        "rounds": rounds,
    }


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{memory:.0f} GiB",
        "system": platform.platform(),
        "load_average": " ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of both sides."""
    names = ("pytgi", "torch")
    found = {name: importlib.metadata.version(name) for name in names}
    code = "import importlib.metadata as m; print(m.version('transformers'), m.version('torch'))"
    peer = subprocess.run(
        [str(PEER_PYTHON), "-c", code], capture_output=True, text=True, check=True
    )
    transformers, torch = peer.stdout.split()
    return {
        **found,
        "python": platform.python_version(),
        "transformers (peer)": transformers,
        "torch (peer)": torch,
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        "| server | clients | tokens/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, server in report["servers"].items():
        for width, one in server["loads"].items():
            rate, *times = (one[column] for column in COLUMNS)
            a, b, c, d = (f"{1000 * value:.1f}" for value in times)
            ratio = f"{report['ratio'][width]:.1f}" if name == next(iter(report["servers"])) else ""
            lines.append(f"| {name} | {width} | {rate:.1f} | {a} / {b} | {c} / {d} | {ratio} |")
    lines += ["", "| server | ready s | first answer s | peak RSS MB |", "|---|---|---|---|"]
    for name, server in report["servers"].items():
        ready, first = f"{server['ready_s']:.1f}", f"{server['first_answer_s']:.1f}"
        lines.append(f"| {name} | {ready} | {first} | {server['peak_rss_mb']:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
