"""The gain of speculation: one client, a text that repeats itself and one that does not.

The repeating text comes from a checkpoint that answers with one phrase again and again. The other
is the checkpoint of serve.py, whose random text hardly repeats. Servers with and without
--speculate take turns; prints the ratio of their medians.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from loads import Shape
from machine import heading, results, write
from make_checkpoint import PHRASE_TOKENS, ensure_checkpoint
from serve import run_load
from servers import WORK, ours, running

CHECKPOINTS = {"repeating": WORK / "llama-125m-repeating", "not repeating": WORK / "llama-125m"}
SHAPE = Shape(1, 4, 128, 8 * PHRASE_TOKENS)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculate", type=int, default=4, help="tokens drafted at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results("speculate"))
    options = parser.parse_args()
    for text, checkpoint in CHECKPOINTS.items():
        ensure_checkpoint(checkpoint, is_repeating=text == "repeating")
    rounds = [measure(options.speculate, number) for number in range(options.rounds)]
    report: dict[str, Any] = {
        **heading(),
        "load": str(SHAPE),
        "texts": summarise(rounds),
        "rounds": rounds,
    }
    print(table(report["texts"]))
    write(report, options.output)


def measure(num_draft_tokens: int, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by text, then by "plain" and "drafting"; the order changes every round."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for text, checkpoint in CHECKPOINTS.items():
        flags: dict[str, tuple[str, ...]] = {
            "plain": (),
            "drafting": ("--speculate", str(num_draft_tokens)),
        }
        found[text] = {}
        for kind in sorted(flags, reverse=seed % 2 == 0):
            print(f"round {seed + 1}: {text} text, {kind}", file=sys.stderr)
            server = ours(checkpoint, "--dtype", "bfloat16", *flags[kind], name=f"pytgi {kind}")
            with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
                run_load(handle, Shape(1, 1, 128, 32), 1000)
                found[text][kind] = run_load(handle, SHAPE, seed)
    return found


def summarise(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Medians of tokens per second and their ratio, by text."""
    texts: dict[str, Any] = {}
    for text in CHECKPOINTS:
        speed = {
            kind: statistics.median(one[text][kind]["tokens_per_s"] for one in rounds)
            for kind in ("plain", "drafting")
        }
        texts[text] = {**speed, "ratio": speed["drafting"] / speed["plain"]}
    return texts


def table(texts: dict[str, Any]) -> str:
    """The report as text."""
    lines = ["| text | tokens/s | with --speculate | ratio |", "|---|---|---|---|"]
    for text, one in texts.items():
        lines.append(
            f"| {text} | {one['plain']:.1f} | {one['drafting']:.1f} | {one['ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
