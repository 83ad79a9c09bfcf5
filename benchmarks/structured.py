"""What grammars cost other requests: 16 clients, half of them with grammars, half measured.

Each round measures three times on one server: the other eight clients request free text, JSON of
one schema, or JSON of a new schema each time. Prints the throughput of the eight measured clients,
which never use a grammar.

The first answers have different lengths, so that requests begin at different times. Otherwise all
clients of free text would begin and end in the same steps and share one prefill, and those of JSON,
whose grammars are compiled first, could not.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load import APIS, answer, prompts
from machine import heading, results, write
from make_checkpoint import ensure_checkpoint
from servers import WORK, Running, ours, running
from text_generation_benchmark.streams import Stream

MEASURED = 8
OTHERS = 8
NEW_TOKENS = 64
KINDS = ("free", "known", "constrained")


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=WORK / "llama-125m")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=8, help="of each measured client")
    parser.add_argument("--output", type=Path, default=results("structured"))
    options = parser.parse_args()
    ensure_checkpoint(options.checkpoint)
    server = ours(options.checkpoint, "--dtype", "bfloat16")
    schemas: dict[str, Iterator[dict[str, Any] | None]] = {
        "free": itertools.repeat(None),
        "known": itertools.repeat(schema(0)),
        "constrained": map(schema, itertools.count(1)),
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
        # One round is not counted: a new server writes memory for the first time.
        for kind in KINDS:
            asyncio.run(measure(handle, options.requests, schemas[kind]))
        for number in range(options.rounds):
            # The order alternates, so that slow changes affect all kinds equally.
            for kind in KINDS if number % 2 else reversed(KINDS):
                print(f"round {number + 1} of {options.rounds}: {kind}", file=sys.stderr)
                run = measure(handle, options.requests, schemas[kind])
                found[kind].append(asyncio.run(run))
    report = summarise(found)
    print(table(report))
    write(report, options.output)


def schema(number: int) -> dict[str, Any]:
    """A different schema for each number; its strings are as long as the answer."""
    text = {"type": "string", "minLength": 20, "maxLength": 400}
    item = {
        "type": "object",
        "properties": {"id": {"type": "integer"}, f"kind{number}": {"enum": ["a", "b", "c"]}},
        "required": ["id", f"kind{number}"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {f"name{number}": text, "items": {"type": "array", "items": item}},
        "required": [f"name{number}"],
        "additionalProperties": False,
    }


async def measure(
    handle: Running, requests: int, schemas: Iterator[dict[str, Any] | None]
) -> dict[str, float]:
    """Tokens per second of both halves, from the first to the last measured request."""
    waiting = prompts((MEASURED + OTHERS) * 64, 128, seed=7)
    streams: tuple[list[Stream], list[Stream]] = ([], [])
    is_over = asyncio.Event()

    async def ask(
        half: int, grammar: dict[str, Any] | None, num_tokens_asked: int = NEW_TOKENS
    ) -> None:
        parameters: dict[str, Any] = {"max_new_tokens": num_tokens_asked, "details": True}
        if grammar is None:
            parameters["ignore_eos_token"] = True
        else:
            parameters["grammar"] = {"type": "json", "value": grammar}
        streams[half].append(Stream(APIS["tgi"].read))
        body = {"inputs": waiting.pop(), "parameters": parameters}
        await answer(handle.url, "tgi", body, streams[half][-1])

    async def measured(number: int) -> None:
        await ask(0, None, first_length(2 * number))
        for _ in range(requests):
            await ask(0, None)

    async def other(number: int) -> None:
        await ask(1, None, first_length(2 * number + 1))
        while not is_over.is_set():
            await ask(1, next(schemas))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(other(number)) for number in range(OTHERS)]
        await asyncio.gather(*map(measured, range(MEASURED)))
        elapsed = time.perf_counter() - started
        counts = [sum(len(stream.times) for stream in half) for half in streams]
        is_over.set()
        await asyncio.gather(*others)
    return {"measured": counts[0] / elapsed, "others": counts[1] / elapsed, "elapsed_s": elapsed}


def first_length(number: int) -> int:
    """Tokens of the first answer of a client."""
    return NEW_TOKENS * (number + 1) // (MEASURED + OTHERS)


def summarise(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, the median of the rounds' ratios, and the parameters."""
    medians = {
        kind: {half: statistics.median(one[half] for one in rounds) for half in rounds[0]}
        for kind, rounds in found.items()
    }
    return {
        **heading(),
        "tokens_per_s": medians,
        "ratio": ratio(found, "constrained"),
        "ratio_known": ratio(found, "known"),
        "rounds": found,
    }


def ratio(found: dict[str, list[dict[str, float]]], kind: str) -> float:
    """The ratio of the throughput next to one kind to that next to free text: the median."""
    pairs = zip(found["free"], found[kind], strict=True)
    return statistics.median(one["measured"] / free["measured"] for free, one in pairs)


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        "| the other 8 clients ask for | the measured 8, tokens/s | the others, tokens/s |",
        "|---|---|---|",
    ]
    for kind, one in report["tokens_per_s"].items():
        lines.append(f"| {kind} text | {one['measured']:.1f} | {one['others']:.1f} |")
    ratios = f"ratio {report['ratio']:.3f}, with one schema {report['ratio_known']:.3f}"
    return "\n".join([*lines, ratios])


if __name__ == "__main__":
    main()
