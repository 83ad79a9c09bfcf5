"""Reproduces two well-known results without a server.

1. The time of 64 prompts at batch limits from 1 to 32, for `transformers.pipeline` (static batches)
   and for `LLM` (continuous batching), with the same checkpoint, prompts and tokens. Each
   measurement has its own process; the two sides take turns.
2. The number of concurrent requests in a fixed KV budget: with the whole context reserved for each,
   as without paging, and in the batch of `LLM`.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from load import prompts
from machine import heading, results, write
from make_checkpoint import ensure_checkpoint
from servers import WORK

SIDES = ("transformers.pipeline", "LLM")
LIMITS = [1, 2, 4, 8, 16, 32]
PUBLISHED = "vLLM: equal at 1, a third of the time at 32; 8 requests held reserved, 40 paged"
CONTEXT = 2048
SAMPLE_EVERY_S = 0.02


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    if options.worker is not None:
        _work(options)
        return
    ensure_checkpoint(options.checkpoint)
    report: dict[str, Any] = {
        **heading(),
        "checkpoint": f"{options.checkpoint.name} (benchmarks/make_checkpoint.py), {options.dtype}",
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
                for name in ("pytgi", "torch", "transformers")
            },
        },
        "published": PUBLISHED,
        "prompts": options.prompts,
        "new_tokens": options.new_tokens,
    }
    report["seconds"] = measure_limits(options)
    report["held"] = run_worker(options, "held", options.budget)
    print(table(report))
    write(report, options.output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=WORK / "llama-125m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--limits", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--budget", type=int, default=8 * CONTEXT, help="tokens of KV cache in the second part"
    )
    parser.add_argument("--requests", type=int, default=160, help="in the second part")
    parser.add_argument("--output", type=Path, default=results("offline"))
    parser.add_argument("--worker", choices=(*SIDES, "held"), help=argparse.SUPPRESS)
    parser.add_argument("--value", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_limits(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds by batch limit and side: the median, and all rounds."""
    found: dict[int, dict[str, list[float]]] = {
        limit: {side: [] for side in SIDES} for limit in options.limits
    }
    for number in range(options.rounds):
        for limit in options.limits:
            # Each side is first in every other round, so that slow changes affect both equally.
            for side in SIDES if number % 2 else reversed(SIDES):
                print(
                    f"round {number + 1} of {options.rounds}, at most {limit} at once: {side}",
                    file=sys.stderr,
                )
                found[limit][side].append(run_worker(options, side, limit)["seconds"])
    return {
        str(limit): {
            side: {"median": statistics.median(rounds), "rounds": rounds}
            for side, rounds in sides.items()
        }
        for limit, sides in found.items()
    }


def run_worker(options: argparse.Namespace, worker: str, value: int) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", worker]
    command += ["--value", str(value), "--checkpoint", str(options.checkpoint)]
    command += ["--dtype", options.dtype, "--prompts", str(options.prompts)]
    command += ["--new-tokens", str(options.new_tokens), "--requests", str(options.requests)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _work(options: argparse.Namespace) -> None:
    """Runs in the worker: prints one measurement as JSON."""
    with redirect_stdout(sys.stderr):
        if options.worker == "held":
            figures = hold(options)
        else:
            measure = with_llm if options.worker == "LLM" else with_pipeline
            texts = workload(options.prompts, 32, 224)
            figures = {"seconds": measure(options, texts)}
    print(json.dumps(figures))


def workload(num: int, shortest: int, longest: int) -> list[str]:
    """Prompts of different lengths, the same every time."""
    chooser = random.Random(64)
    lengths = [chooser.randint(shortest, longest) for _ in range(num)]
    return [prompts(1, length, seed)[0] for seed, length in enumerate(lengths)]


def timed(generate: Callable[[], list[int]], expected: list[int]) -> float:
    """The seconds of a call, which returns the number of tokens of each prompt."""
    started = time.perf_counter()
    counts = generate()
    elapsed = time.perf_counter() - started
    if counts != expected:
        raise RuntimeError(f"not all tokens were generated: {sum(counts)} of {sum(expected)}")
    return elapsed


def with_llm(options: argparse.Namespace, texts: list[str]) -> float:
    """Seconds for all prompts, with a limit of concurrent ones."""
    from text_generation_router import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True)
    brief = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(options.checkpoint, dtype=options.dtype, max_batch_size=options.value) as llm:
        llm.generate(workload(options.value, 8, 8), brief)

        def generate() -> list[int]:
            results = llm.generate(texts, greedy)
            return [len(result.outputs[0].token_ids) for result in results]

        return timed(generate, [options.new_tokens] * len(texts))


def with_pipeline(options: argparse.Namespace, texts: list[str]) -> float:
    """The same with transformers, as its documentation recommends."""
    import torch
    import transformers

    pipe: Any = transformers.pipeline(
        "text-generation",
        model=str(options.checkpoint),
        dtype=getattr(torch, options.dtype),
        device="cpu",
    )
    pipe.tokenizer.pad_token = pipe.tokenizer.eos_token
    pipe.tokenizer.padding_side = "left"

    def run(given: list[str], num: int) -> list[int]:
        outputs = pipe(
            given,
            batch_size=options.value,
            max_new_tokens=num,
            min_new_tokens=num,
            do_sample=False,
            return_tensors=True,
        )
        ids = [output[0]["generated_token_ids"] for output in outputs]
        lengths = [len(pipe.tokenizer(text)["input_ids"]) for text in given]
        # Padding is not part of an answer.
        padded = [_longest(lengths, place, options.value) for place in range(len(given))]
        return [len(one) - length for one, length in zip(ids, padded, strict=True)]

    run(workload(options.value, 8, 8), 4)
    return timed(lambda: run(texts, options.new_tokens), [options.new_tokens] * len(texts))


def _longest(lengths: list[int], place: int, batch_size: int) -> int:
    """The longest prompt of the batch that the one at `place` is in."""
    start = place - place % batch_size
    return max(lengths[start : start + batch_size])


def hold(options: argparse.Namespace) -> dict[str, Any]:
    """The number of requests in LLM's batch, with a KV cache of `budget` tokens."""
    from text_generation_router import LLM, SamplingParams

    chooser = random.Random(40)
    texts = workload(options.requests, 64, 384)
    params = [
        SamplingParams(temperature=0, max_tokens=chooser.randint(32, 256), ignore_eos=True)
        for _ in texts
    ]
    held: list[int] = []
    is_over = threading.Event()
    with LLM(
        options.checkpoint,
        dtype=options.dtype,
        max_batch_size=options.requests,
        max_total_tokens=CONTEXT,
        max_batch_total_tokens=options.value,
    ) as llm:

        def sample() -> None:
            while not is_over.wait(SAMPLE_EVERY_S):
                held.append(int(_value(llm.metrics(), "tgi_batch_current_size")))

        sampler = threading.Thread(target=sample)
        sampler.start()
        results = llm.generate(texts, params)
        is_over.set()
        sampler.join()
        preempted = int(_value(llm.metrics(), "tgi_request_preempted"))
    tokens = [result.num_prompt_tokens + len(result.outputs[0].token_ids) for result in results]
    # Only while requests wait: at the end the batch empties regardless of memory.
    busy = held[: max(1, len(held) * 3 // 4)]
    return {
        "kv_tokens": options.value,
        "context": CONTEXT,
        "requests": len(texts),
        "mean_tokens": statistics.fmean(tokens),
        "reserved": options.value // CONTEXT,
        "paged_peak": max(held),
        "paged_median": statistics.median(busy),
        "preempted": preempted,
    }


def _value(metrics: str, name: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    theirs, ours = SIDES
    lines = [
        f"{report['prompts']} prompts of 32 to 224 tokens, {report['new_tokens']} new ones each",
        f"| batch limit | {theirs} s | {ours} s | share of the time |",
        "|---|---|---|---|",
    ]
    for limit, sides in report["seconds"].items():
        a, b = (sides[side]["median"] for side in SIDES)
        lines.append(f"| {limit} | {a:.1f} | {b:.1f} | {b / a:.2f} |")
    held = report["held"]
    lines += [
        "",
        f"{held['requests']} requests of {held['mean_tokens']:.0f} tokens on average, KV cache of "
        f"{held['kv_tokens']} tokens",
        "| held at once | requests |",
        "|---|---|",
        f"| reserved to {held['context']} tokens | {held['reserved']} |",
        f"| paged, median while requests wait | {held['paged_median']:.0f} |",
        f"| paged, peak | {held['paged_peak']} |",
        "",
        f"published for {PUBLISHED}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
