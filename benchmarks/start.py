"""The time from the command to the first token with the embedded model, and its memory.

Starts `text-generation-launcher` with its defaults, streams one question as soon as it is ready,
sends 50 more from 8 clients, and prints the peak memory of each process. Prints medians of several
starts. With --first each start is a machine's first one, which compiles.

With --beside it starts the 1 B checkpoint instead, in bfloat16 with its file in the page cache, in
turn with another server with the same weights, and measures both to the first token.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from contestants import CONTESTANTS, OURS
from load import APIS, answer
from machine import heading, results, write
from make_checkpoint import Shape, ensure_checkpoint
from servers import WORK, Server, ours, running
from text_generation_benchmark.streams import Stream

QUESTION = "What does textwrap.dedent do?"
BESIDE = "llama-1b"
BESIDE_SHAPE = Shape(2_048, 8_192, 16, 32, 8, 64)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--model-id", type=Path, default=None, help="default: the embedded model")
    parser.add_argument("--first", action="store_true", help="nothing is compiled yet")
    parser.add_argument("--output", type=Path, default=None, help="default: in results")
    parser.add_argument("--beside", choices=CONTESTANTS, help="another server, in turn with ours")
    options = parser.parse_args()
    if options.beside is not None:
        compare(options)
        return
    starts = [measure(options.model_id, options.first) for _ in range(options.starts)]
    report = {
        **heading(),
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
    write(report, options.output or results(kind))


def compare(options: argparse.Namespace) -> None:
    """Starts of both servers in turn; the medians are printed."""
    checkpoint = options.model_id or WORK / BESIDE
    ensure_checkpoint(checkpoint, shape=BESIDE_SHAPE)
    names = (OURS, options.beside)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name in names:
        CONTESTANTS[name].prepare(checkpoint)
        first_token(CONTESTANTS[name].server(checkpoint))  # fills the page cache, and compiles
    for _ in range(options.starts):
        for name in names:
            found[name].append(first_token(CONTESTANTS[name].server(checkpoint)))
    report = {
        **heading(),
        "versions": {name: CONTESTANTS[name].versions() for name in names},
        "medians": {
            name: {kind: statistics.median(one[kind] for one in starts) for kind in starts[0]}
            for name, starts in found.items()
        },
        "starts": found,
    }
    print(json.dumps(report["medians"], indent=2))
    write(report, options.output or results("start-1b"))


def first_token(server: Server) -> dict[str, float]:
    """Seconds from the start of a server until it is ready, and until the first token."""

    async def ask(url: str) -> float:
        api = APIS[server.api]
        stream = Stream(api.read)
        await answer(url, server.api, api.body("abc", 8, server.model, True), stream)
        if not stream.times:
            raise RuntimeError(f"{server.name} has answered without a token")
        return stream.times[0]

    with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
        arrived = asyncio.run(ask(handle.url))
        return {"ready_s": handle.ready_s, "first_token_s": arrived - handle.started}


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
    """Returns at the first event of a stream."""
    with urllib.request.urlopen(_ask(url, "/generate_stream", QUESTION), timeout=60) as answer:
        line = answer.readline()
        if b'"token"' not in line:
            raise RuntimeError(f"the first event is {line!r}")


def _ask_many(url: str) -> None:
    """Some traffic, so that the memory is that of a working server."""

    def ask(number: int) -> None:
        with urllib.request.urlopen(
            _ask(url, "/generate", f"{QUESTION} {number}"), timeout=120
        ) as a:
            a.read()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(50)))


if __name__ == "__main__":
    main()
