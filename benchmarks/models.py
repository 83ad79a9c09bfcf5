"""Our implementations of a model beside transformers' own continuous batching: 1, 8, 32 clients.

Three models: SmolLM2-135M (its weights, from a package), a hybrid of Qwen3.5's kind and a mixture
of 32 experts of Qwen3's kind (random weights). All have the benchmarks' tokenizer, so that prompts
have exact lengths. Contestants take turns alone on the machine, with a new start in each round.
Prints the medians over the rounds.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from loads import LOADS, Shape
from machine import heading, results, write
from make_checkpoint import VOCAB_SIZE, write_tokenizer
from serve import WARM_UP_TOKENS, run_load
from servers import FOLDER, WORK, ours, running

SMOLLM2 = ".venv-weights/smollm2"
TIMEOUT_S = 1200.0
NATIVE, FALLBACK, TRANSFORMERS = "native", "fallback", "transformers"
LEAST = {TRANSFORMERS: 1.3, NATIVE: 0.65}
"""What the fallback's tokens per second are at least, as parts of the others'."""

_QWEN: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
RANDOM: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "hybrid": (
        "qwen3_5_text",
        {
            **_QWEN,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 4,
            "head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "experts": (
        "qwen3_moe",
        {
            **_QWEN,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 8,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
}
CONTESTANTS = {
    "smollm2": (NATIVE, FALLBACK, TRANSFORMERS),
    "hybrid": (FALLBACK, TRANSFORMERS),
    "experts": (FALLBACK, TRANSFORMERS),
}


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    shapes = {
        name: replace(LOADS[name], requests=LOADS[name].clients, new_tokens=8)
        if options.quick
        else LOADS[name]
        for name in options.loads
    }
    checkpoints = {model: ensure_checkpoint(model) for model in options.models}
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        rounds.append({})
        for model, checkpoint in checkpoints.items():
            found = rounds[-1][model] = {}
            # The order changes, so that slow changes of the machine affect all equally.
            for name in CONTESTANTS[model][:: -1 if number % 2 else 1]:
                if name in options.contestants:
                    print(f"round {number + 1}: {model}, {name}", file=sys.stderr)
                    found[name] = measure(name, checkpoint, options.dtype, shapes, number)
        # After every round, so that an interrupted run keeps its figures.
        report = {
            **heading(),
            "dtype": options.dtype,
            "loads": {name: str(shape) for name, shape in shapes.items()},
            "least": LEAST,
            "models": summarise(rounds),
            "rounds": rounds,
        }
        write(report, options.output)
    print(table(report["models"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    every = CONTESTANTS["smollm2"]
    parser.add_argument("--contestants", nargs="+", choices=every, default=[*every])
    parser.add_argument(
        "--loads", nargs="+", choices=("c1", "c8", "c32"), default=["c1", "c8", "c32"]
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="a request of 8 tokens per client: only tries it out"
    )
    parser.add_argument("--output", type=Path, default=results("models"))
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def ensure_checkpoint(model: str) -> Path:
    """Where the model is; it is written unless it is there. Raises RuntimeError."""
    directory = WORK / model
    if (directory / "tokenizer.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    if model == "smollm2":
        source = FOLDER.parent / SMOLLM2 / "checkpoint"
        if not source.exists():
            raise RuntimeError(f"SmolLM2 is missing: run `make {SMOLLM2}/.installed`")
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(source / name, directory / name)
    else:
        _write_random(model, directory)
    write_tokenizer(directory)
    return directory


def _write_random(model: str, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = RANDOM[model]
    torch.manual_seed(20_26)
    make: Any = AutoModelForCausalLM.from_config
    made = make(AutoConfig.for_model(model_type, **fields), dtype=torch.bfloat16)
    print(f"{model}: {made.num_parameters() / 1e6:.0f} M parameters", file=sys.stderr)
    made.save_pretrained(directory)


def measure(
    name: str, checkpoint: Path, dtype: str, shapes: Mapping[str, Shape], seed: int
) -> dict[str, dict[str, Any]]:
    """Figures of one contestant by load; what fails is said in them."""
    try:
        if name == TRANSFORMERS:
            return {
                load: by_transformers(checkpoint, dtype, shape, seed)
                for load, shape in shapes.items()
            }
        return by_us(name, checkpoint, dtype, shapes, seed)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {"failed": {"reason": str(error)}}


def by_us(
    name: str, checkpoint: Path, dtype: str, shapes: Mapping[str, Shape], seed: int
) -> dict[str, dict[str, Any]]:
    """A launched server under the loads, each after a warm-up of the same size."""
    implementation = {NATIVE: "native", FALLBACK: "transformers"}[name]
    server = ours(checkpoint, "--dtype", dtype, "--model-impl", implementation, name=name)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, running(server, Path(folder)) as handle:
        for load, shape in shapes.items():
            warm_up = replace(shape, requests=shape.clients, new_tokens=WARM_UP_TOKENS)
            run_load(handle, warm_up, 1000 + shape.clients)
            found[load] = run_load(handle, shape, seed)
    return found


def by_transformers(checkpoint: Path, dtype: str, shape: Shape, seed: int) -> dict[str, Any]:
    """transformers in a process of its own, with as many threads as cores. Raises RuntimeError."""
    asked = {
        "checkpoint": str(checkpoint),
        "dtype": dtype,
        "threads": len(os.sched_getaffinity(0)),
        "seed": seed,
        **asdict(shape),
    }
    command = [sys.executable, str(FOLDER / "models_transformers.py"), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-8:])
        raise RuntimeError(f"transformers, {shape}: {tail}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of tokens per second by model, load and contestant, and the fallback's parts."""
    models: dict[str, Any] = {}
    for model, first in rounds[0].items():
        loads = dict.fromkeys(load for one in first.values() for load in one if load != "failed")
        for load in loads:
            speed = {
                name: statistics.median(one[model][name][load]["tokens_per_s"] for one in rounds)
                for name in first
                if all(load in one[model][name] for one in rounds)
            }
            parts = {
                other: speed[FALLBACK] / speed[other]
                for other in LEAST
                if FALLBACK in speed and other in speed
            }
            how = first.get(TRANSFORMERS, {}).get(load, {}).get("how", "")
            models.setdefault(model, {})[load] = {"tokens_per_s": speed, "parts": parts, "how": how}
    return models


def table(models: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        "| model | load | native | fallback | transformers | fallback / transformers | / native |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, loads in models.items():
        for load, one in loads.items():
            cells = [
                f"{one['tokens_per_s'][name]:.1f}" if name in one["tokens_per_s"] else "-"
                for name in (NATIVE, FALLBACK, TRANSFORMERS)
            ]
            cells[-1] += f" ({one['how']})" if one["how"] else ""
            for other, least in LEAST.items():
                part = one["parts"].get(other)
                missed = "" if part is None or part >= least else f", less than {least}"
                cells.append("-" if part is None else f"{part:.2f}{missed}")
            lines.append(f"| {model} | {load} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
