"""How long the embedded model takes from the command to its first token, and what it holds.

Starts `text-generation-launcher` as a newcomer would, streams one question the moment it is ready,
then asks 50 more at 8 clients, and prints the peak memory of each process. Several starts; the
median counts. With --first each of them is the first one on its machine, which compiles.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import machine
from servers import FOLDER, ours, running

QUESTION = "What does textwrap.dedent do?"


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--model-id", type=Path, default=None, help="default: the embedded model")
    parser.add_argument("--first", action="store_true", help="nothing is compiled yet")
    parser.add_argument("--output", type=Path, default=None, help="default: in results")
    options = parser.parse_args()
    starts = [measure(options.model_id, options.first) for _ in range(options.starts)]
    report = {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", "benchmarks/start.py", *sys.argv[1:]]),
        "machine": machine(),
        "ready_s": statistics.median(one["ready_s"] for one in starts),
        "first_token_s": statistics.median(one["first_token_s"] for one in starts),
        "peak_rss_mb": {
            program: max(one["peak_rss_mb"][program] for one in starts)
            for program in starts[0]["peak_rss_mb"]
        },
        "starts": starts,
    }
    print(f"ready after {report['ready_s']:.2f} s, first token {report['first_token_s']:.2f} s")
    for program, megabytes in report["peak_rss_mb"].items():
        print(f"{program:30} {megabytes:6.0f} MB at its peak")
    kind = "start-first" if options.first else "start"
    output = options.output or FOLDER / "results" / f"{kind}-{datetime.now(UTC):%Y-%m-%d}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")


def measure(model: Path | None, is_first: bool) -> dict[str, Any]:
    """One start."""
    with ExitStack() as stack:
        folder, kernels = (
            Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)
        )
        server = ours(model)
        if is_first:
            server = replace(server, environment=(("NUMBA_CACHE_DIR", str(kernels)),))
        handle = stack.enter_context(running(server, folder))
        _first_event(handle.url)
        first_token_s = time.perf_counter() - handle.started
        _ask_many(handle.url)
        return {
            "ready_s": handle.ready_s,
            "first_token_s": first_token_s,
            "peak_rss_mb": handle.peak_rss_mb(),
        }


def _ask(url: str, path: str, inputs: str) -> urllib.request.Request:
    body = json.dumps({"inputs": inputs, "parameters": {"max_new_tokens": 100}}).encode()
    return urllib.request.Request(url + path, body, {"Content-Type": "application/json"})


def _first_event(url: str) -> None:
    """Returns when the first event of a stream has come."""
    with urllib.request.urlopen(_ask(url, "/generate_stream", QUESTION), timeout=60) as answer:
        line = answer.readline()
        if b'"token"' not in line:
            raise RuntimeError(f"the first event is {line!r}")


def _ask_many(url: str) -> None:
    """A little traffic, so that the memory is that of a server at work."""

    def ask(number: int) -> None:
        with urllib.request.urlopen(
            _ask(url, "/generate", f"{QUESTION} {number}"), timeout=120
        ) as a:
            a.read()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(50)))


if __name__ == "__main__":
    main()
