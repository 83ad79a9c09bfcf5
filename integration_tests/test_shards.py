"""One model over several shards: each answer is that of one shard with the same flags."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from text_generation_router import LLM, SamplingParams

from integration_tests.checkpoints import write_checkpoint
from integration_tests.conftest import Launch
from integration_tests.marks import at_night
from integration_tests.server import (
    SCRIPTS,
    LauncherHandle,
    clean_environment,
    running,
    token_ids,
)
from shard.tests.models.architectures import write_architecture

PROMPT = "def add(first, second): the cat sat on the mat and "
# Of each kind of split: models, other fields of config.json, numbers of shards.
SPLITS: Mapping[str, tuple[str, Mapping[str, Any], tuple[int, ...]]] = {
    # 2 KV heads, of which 4 shards have copies; tied.
    "llama3": ("llama3", {}, (2, 4)),
    # Biases on both sides of a split, and an embedding and a head of their own.
    "llama-bias": ("llama-bias", {}, (2,)),
    # Projections that lie in one tensor.
    "phi3": ("phi3", {}, (2,)),
    # Heads that are normalised, one KV head for each shard, of a size that is no whole number of
    # vectors; 3 shards; a vocabulary that 3 does not divide.
    "qwen3": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "vocab_size": 301},
        (3,),
    ),
    # One KV head for all.
    "mistral": ("mistral", {"num_key_value_heads": 1}, (2,)),
}
# Each asks for something else of a shard.
QUESTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "greedy": (PROMPT, {"max_new_tokens": 24, "top_n_tokens": 3, "decoder_input_details": True}),
    # Its prompt is cached by now.
    "again": (PROMPT * 2, {"max_new_tokens": 8}),
    "sampled": (
        PROMPT,
        {"do_sample": True, "seed": 7, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 24},
    ),
    "penalties": (
        "what is the time",
        {"do_sample": True, "seed": 8, "top_k": 20, "typical_p": 0.9, "repetition_penalty": 1.2}
        | {"frequency_penalty": 0.3, "watermark": True, "max_new_tokens": 16},
    ),
    "grammar": (
        "the sun ",
        {"grammar": {"type": "regex", "value": "[a-f0-9]{4,9}-[xyz]"}, "max_new_tokens": 24}
        | {"do_sample": True, "seed": 3},
    ),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15}


def ask(handle: LauncherHandle) -> dict[str, dict[str, Any]]:
    """The answers to all questions one after the other and then some at once, by question."""
    answers = {name: handle.generate(text, **own) for name, (text, own) in QUESTIONS.items()}

    def ask_one(number: int) -> dict[str, Any]:
        return handle.generate(
            f"{number} of the cats ", max_new_tokens=10 + 7 * number, do_sample=True, seed=number
        )

    with ThreadPoolExecutor(6) as pool:
        answers |= {str(number): found for number, found in enumerate(pool.map(ask_one, range(6)))}
    handle.assert_idle()
    return answers


def numbers_of(answer: Mapping[str, Any]) -> list[float]:
    """All log-probabilities of an answer; the first of a prompt has none."""
    details = answer["details"]
    chosen = [token["logprob"] for token in (*details["prefill"], *details["tokens"])]
    others = [other["logprob"] for tokens in details.get("top_tokens", []) for other in tokens]
    return [math.nan if value is None else value for value in (*chosen, *others)]


def assert_alike(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float | None
) -> None:
    """The same tokens, and log-probabilities within a tolerance; None: the same bits."""
    for name, answer in expected.items():
        assert token_ids(found[name]) == token_ids(answer), name
        ours, theirs = numbers_of(found[name]), numbers_of(answer)
        assert len(ours) == len(theirs) > 0
        near = (0.0, 0.0) if tolerance is None else (tolerance, tolerance)
        assert ours == pytest.approx(theirs, rel=near[0], abs=near[1], nan_ok=True), name


def answers_of(model: Path, counts: tuple[int, ...], *flags: str) -> list[dict[str, Any]]:
    """Of one shard, and of as many as are asked for; the servers start together."""
    with ExitStack() as stack:
        handles = []
        for count in (1, *counts):
            handles.append(
                LauncherHandle(model, "--device", "cpu", *flags, "--num-shard", str(count))
            )
            stack.callback(handles[-1].kill)
        found = []
        for handle, count in zip(handles, (1, *counts), strict=True):
            handle.wait_until_ready()
            found.append(ask(handle))
            assert handle.client.get("/info").json()["num_shard"] == count
            observed = {
                name: value
                for name, value in handle.metrics().items()
                if name.startswith("tgi_batch_shard_duration_count")
            }
            assert len(observed) == (count if count > 1 else 0)
            assert all(value > 0 for value in observed.values())
            handle.stop()
        return found


# The shard's own tests compare the ranks of each kind, and of llama3 the bits are compared below.
SERVED = ("qwen3",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SERVED else pytest.mark.nightly) for name in SPLITS],
)
def test_shards_answer_as_one(name: str, tmp_path: Path) -> None:
    family, fields, counts = SPLITS[name]
    model = write_checkpoint(family, tmp_path / name, **fields)
    expected, *found = answers_of(model, counts, "--dtype", "float32")
    for answers in found:
        assert_alike(answers, expected, TOLERANCE["float32"])


def test_shards_of_what_transformers_computes_answer_as_one(tmp_path: Path) -> None:
    model = write_architecture("gemma2", tmp_path)
    expected, found = answers_of(model, (2,), "--dtype", "float32")
    assert_alike(found, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("count", [2, *at_night(4)])
def test_deterministic_shards_have_the_same_bits(tiny_model_path: Path, count: int) -> None:
    expected, found = answers_of(
        tiny_model_path, (count,), "--dtype", "bfloat16", "--deterministic"
    )
    assert_alike(found, expected, None)


@pytest.mark.parametrize("quantize", at_night("int8", "int4"))
def test_quantised_shards_answer_as_one(tiny_model_path: Path, quantize: str) -> None:
    expected, found = answers_of(tiny_model_path, (2,), "--quantize", quantize)
    for name in ("greedy", "again"):
        # Sums of bfloat16 are rounded elsewhere: where two tokens are as likely, they may differ.
        pairs = zip(token_ids(found[name]), token_ids(expected[name]), strict=True)
        same = [a == b for a, b in pairs]
        first = same.index(False) if False in same else len(same)
        ours, theirs = (numbers_of(answers[name])[:first] for answers in (found, expected))
        assert first >= len(same) // 2
        assert ours == pytest.approx(theirs, abs=TOLERANCE["bfloat16"], nan_ok=True)


def test_draft_tokens_and_preemption(tiny_model_path: Path) -> None:
    """All shards verify drafts and recompute preempted rows in the same way."""
    flags = "--dtype", "float32", "--speculate", "3", "--max-total-tokens", "192"
    cramped = *flags, "--max-batch-total-tokens", "512", "--max-batch-prefill-tokens", "256"

    def crowd(handle: LauncherHandle) -> list[list[int]]:
        def one(number: int) -> list[int]:
            text = f"{number} 1 2 3 1 2 3 1 2 3 1 2 3"
            return token_ids(handle.generate(text, max_new_tokens=120, ignore_eos=True))

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(8)))

    with running(tiny_model_path, "--device", "cpu", *cramped, "--num-shard", "2") as handle:
        found = crowd(handle)
        assert handle.metrics()["tgi_request_preempted"] > 0
        handle.assert_idle()
    with running(tiny_model_path, "--device", "cpu", *flags) as handle:
        assert crowd(handle) == found


def test_a_count_that_can_not_be_is_refused(launch: Launch, tiny_model_path: Path) -> None:
    handle = launch(tiny_model_path, "--device", "cpu", "--num-shard", "3")
    assert handle.wait_for_exit() == 1
    last = handle.log.splitlines()[-1]
    assert "can not be split among 3 shards" in last and "use 1, 2 or 4" in last


@pytest.fixture
def environment() -> Iterator[None]:
    """What is started here sees none of the developer's variables."""
    before, clean = dict(os.environ), clean_environment()
    os.environ.clear()
    os.environ.update(clean)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
def test_python_a_file_and_the_benchmark(tiny_model_path: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0)
    with LLM(tiny_model_path, dtype="float32", num_shard=2) as llm:
        [found] = llm.generate([PROMPT], sampling)
        assert len(found.outputs[0].token_ids) == 8
    source, target = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(request) + "\n")
    shared = "--num-shard", "2", "--dtype", "float32", "--device", "cpu"
    batch = [str(SCRIPTS / "text-generation-launcher"), "batch", "--model-id", str(tiny_model_path)]
    files = "--input", str(source), "--output", str(target)
    done = subprocess.run([*batch, *files, *shared], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [result] = [json.loads(line) for line in target.read_text().splitlines()]
    assert result["response"]["body"]["choices"][0]["text"] == found.outputs[0].text
    report = tmp_path / "figures.json"
    benchmark = [sys.executable, "-m", "text_generation_benchmark.cli"]
    shape = "-b", "2", "-s", "9", "-d", "4", "-r", "2", "--output", str(report)
    told = [*benchmark, "--model-id", str(tiny_model_path), *shape, "--", *shared]
    done = subprocess.run(told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [batch_figures] = json.loads(report.read_text())["batches"]
    assert {"prefill", "decode_token", "decode_total"} <= batch_figures.keys()
