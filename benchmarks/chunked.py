"""What a long prompt costs running streams: 8 clients decode, a prompt of 6,000 tokens arrives.

Prints the times between tokens of the 8 clients, before the prompt and during its prefill, with and
without prefill chunking. The clients run in this process.
"""

import argparse
import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from load import APIS, answer, prompts, quantile
from machine import heading, results, write
from make_checkpoint import ensure_checkpoint
from servers import WORK, ours, running
from text_generation_benchmark.streams import Stream

CLIENTS = 8
CLIENT_TOKENS = 64
STEADY_S = 5.0
KINDS: dict[str, tuple[str, ...]] = {"chunked": (), "whole": ("--disable-prefill-chunking",)}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3, help="prompts that arrive, one by one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--output", type=Path, default=results("chunked"))
    options = parser.parse_args()
    checkpoint = WORK / "llama-125m"
    ensure_checkpoint(checkpoint)
    report: dict[str, Any] = {
        **heading(),
        "load": f"{CLIENTS} clients decode, a prompt of {options.prompt_tokens} tokens arrives",
        "kinds": {},
    }
    for kind in options.kinds:
        server = ours(checkpoint, "--dtype", options.dtype, *KINDS[kind], name=f"pytgi {kind}")
        with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
            found = asyncio.run(measure(handle.url, options.prompt_tokens, options.rounds))
        report["kinds"][kind] = found
    print(table(report["kinds"]))
    write(report, options.output)


async def measure(url: str, prompt_tokens: int, rounds: int) -> dict[str, Any]:
    """The clients' times between tokens before and during the prompts, and the prompts' times."""
    streams = [Stream(APIS["tgi"].read) for _ in range(CLIENTS)]
    # Long enough for the whole run; the clients are cancelled at its end.
    length = 8192 - CLIENT_TOKENS - 1
    waiting = prompts(CLIENTS, CLIENT_TOKENS, seed=0)
    clients = [
        asyncio.create_task(_answer(url, prompt, length, stream))
        for prompt, stream in zip(waiting, streams, strict=True)
    ]
    try:
        while not all(stream.times for stream in streams):
            await asyncio.sleep(0.05)
            _raise_failures(clients)
        windows = []
        for prompt in prompts(rounds, prompt_tokens, seed=1):
            steady = time.perf_counter()
            await asyncio.sleep(STEADY_S)
            started = time.perf_counter()
            await _answer(url, prompt, 1, Stream(APIS["tgi"].read))
            windows.append((steady, started, time.perf_counter()))
            _raise_failures(clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    before = _gaps(streams, [(steady, started) for steady, started, _ in windows])
    during = _gaps(streams, [(started, ended) for _, started, ended in windows])
    return {
        "before": {"p50_s": quantile(before, 0.5), "p99_s": quantile(before, 0.99)},
        "during": {"p50_s": quantile(during, 0.5), "p99_s": quantile(during, 0.99)},
        "all": {
            "p50_s": quantile(before + during, 0.5),
            "p99_s": quantile(before + during, 0.99),
            "max_s": max(before + during),
        },
        "gaps": len(before) + len(during),
        "prompt_ttft_s": [ended - started for _, started, ended in windows],
    }


async def _answer(url: str, prompt: str, new_tokens: int, stream: Stream) -> None:
    await answer(url, "tgi", APIS["tgi"].body(prompt, new_tokens, "", True), stream)


def _raise_failures(clients: list[asyncio.Task[None]]) -> None:
    for client in clients:
        if client.done():
            client.result()
            raise RuntimeError(
                "a client's answer ended before the prompts had come: fewer --rounds"
            )


def _gaps(streams: list[Stream], windows: list[tuple[float, float]]) -> list[float]:
    """The times between tokens that touch one of the windows."""
    return [
        later - sooner
        for stream in streams
        for sooner, later in pairwise(stream.times)
        if any(sooner < end and later > start for start, end in windows)
    ]


def table(kinds: dict[str, Any]) -> str:
    """One line a kind; milliseconds."""
    lines = [
        "                 before        while it comes   both                          its first",
        "                 p50    p99    p50    p99       p50    p99    max  p99/p50    token",
    ]
    for kind, found in kinds.items():
        before, during, both = (found[part] for part in ("before", "during", "all"))
        figures = [before["p50_s"], before["p99_s"], during["p50_s"], during["p99_s"]]
        figures += [both["p50_s"], both["p99_s"], both["max_s"]]
        first, second, third, fourth, fifth, sixth, last = (f"{1e3 * one:6.1f}" for one in figures)
        ratio = both["p99_s"] / both["p50_s"]
        slowest = max(found["prompt_ttft_s"])
        lines.append(
            f"{kind:14}{first} {second} {third} {fourth}    {fifth} {sixth} {last} {ratio:7.2f}x"
            f"   {slowest:8.2f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
