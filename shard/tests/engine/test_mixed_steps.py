"""Chunked prompts beside rows that decode and draft: the same tokens as each request alone."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from text_generation_proto import pb
from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.errors import BatchError

from shard.tests.driver import Driver, load_engine, step_of

DRAWN = {"do_sample": True, "temperature": 1.4, "top_p": 0.95}
PENALISED = {**DRAWN, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_k": 40}
NEEDS_WIDE = pytest.mark.skipif(
    not are_vectors_wide(), reason="quantised weights are multiplied by our kernels with AVX-512"
)
KINDS: list[dict[str, Any]] = [
    {},
    {"sampling": DRAWN},
    {"sampling": PENALISED},
    {"top_n_tokens": 3, "min_new_tokens": 6},
    {"prefill_logprobs": True, "ignore_eos_token": True},
    # Almost no other tokens, so that draft tokens are right.
    {"sampling": {"logit_bias": ((7, 30.0), (8, 30.0))}, "ignore_eos_token": True},
    {"sampling": {"watermark": True, "typical_p": 0.9}, "ignore_eos_token": True},
]


@dataclass
class Wanted:
    """The tokens of a request alone."""

    ids: list[int]
    options: dict[str, Any]
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    prefill_logprobs: Sequence[float] = ()
    reason: int = 0


def make_wanted(driver: Driver, draw: random.Random, count: int) -> list[Wanted]:
    """Requests of all kinds, and the tokens of each alone, unchunked and without draft tokens."""
    requests = []
    for number in range(count):
        # Half of the prompts repeat themselves.
        ids = [draw.randrange(3, 300) for _ in range(draw.randrange(1, 70))]
        ids = ids if draw.random() < 0.5 else (ids[:9] * 9)[: len(ids) + 1]
        options = {**KINDS[number % len(KINDS)], "max_new_tokens": draw.randrange(1, 30)}
        options["sampling"] = {**options.get("sampling", {}), "seed": number}
        wanted = Wanted(ids, options)
        driver.add([driver.request(number, ids, **options)])
        driver.run()
        wanted.tokens, wanted.logprobs = driver.tokens[number], driver.logprobs[number]
        wanted.prefill_logprobs = driver.prefill_logprobs.get(number, [])
        wanted.reason = driver.reasons[number]
        requests.append(wanted)
    return requests


def run_mixed(driver: Driver, requests: list[Wanted], draw: random.Random) -> None:
    """Requests arrive at random times, in chunks of random sizes; some rest, some are preempted."""
    waiting = [
        driver.request(number, wanted.ids, **wanted.options)
        for number, wanted in enumerate(requests)
    ]
    while waiting or driver.running:
        speculate = draw.choice([0, 0, 1, 3, 6])
        unfinished = {item: left for item in driver.running if (left := driver.left[item])}
        chunks = {
            item: draw.randint(1, left) for item, left in unfinished.items() if draw.random() < 0.7
        }
        arriving = [waiting.pop() for _ in range(min(len(waiting), draw.choice([0, 0, 1, 3])))]
        arriving = [in_parts(driver, request, draw) for request in arriving]
        if arriving and (not driver.running or draw.random() < 0.2):
            driver.add(arriving)
        elif arriving:
            driver.add(arriving, driver.advance(chunks, speculate))
        elif chunks or len(unfinished) < len(driver.running):
            driver.step(chunks, speculate)
        if draw.random() < 0.1:
            driver.settle()
            if not driver.running:
                continue
            back = draw.choice(driver.running)
            known = driver.drop(back)
            wanted = requests[back]
            waiting.append(
                driver.request(back, known, num_prompt_tokens=len(wanted.ids), **wanted.options)
            )


def in_parts(driver: Driver, request: pb.Request, draw: random.Random) -> pb.Request:
    length = len(request.input_ids)
    return driver.part(request, draw.choice([0, draw.randint(1, length)]))


BITS = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("family", "device", "max_prefill_tokens", "form"),
    [
        ("llama3", "cpu", 23, None),
        ("llama3", "stream", 23, None),
        ("mistral", "cpu", 4096, None),
        ("llama-dynamic", "cpu", 64, None),
        ("llama-dynamic", "stream", 64, None),
        # Inputs and outputs on both sides of the 64 tokens at which a row is recomputed.
        ("phi3-longrope", "cpu", 4096, None),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, *marks])
            for *case, marks in (
                ("qwen3", "cpu", 4096, {"dtype": "float32"}, ()),
                ("qwen3", "stream", 4096, BITS, ()),
                ("qwen3", "cpu", 4096, {**BITS, "quantize": "int8"}, [NEEDS_WIDE]),
                ("qwen3", "cpu", 4096, {**BITS, "quantize": "int4"}, [NEEDS_WIDE]),
                # Scaled residuals and scores, biases, gates with a bias.
                ("granite", "stream", 4096, {"dtype": "float32"}, ()),
                ("granite", "cpu", 4096, BITS, ()),
                ("qwen2", "cpu", 4096, BITS, ()),
                ("llama-bias", "cpu", 4096, BITS, ()),
            )
        ),
    ],
)
def test_the_same_tokens_whatever_a_step_mixes(
    family: str,
    device: str,
    max_prefill_tokens: int,
    form: dict[str, Any] | None,
    checkpoint: Callable[[str], Path],
) -> None:
    """With a `form`, to the last bit: log-probabilities show any difference in a hidden state."""
    engine = load_engine(checkpoint(family), max_prefill_tokens, device, **(form or {}))
    assert form is None or engine.is_deterministic
    draw = random.Random(1)
    requests = make_wanted(Driver(engine), draw, 28 if form else 14)
    driver = Driver(engine)
    run_mixed(driver, requests, draw)
    for number, wanted in enumerate(requests):
        assert driver.tokens[number] == wanted.tokens
        assert driver.reasons[number] == wanted.reason
        # Rounding may include or exclude a token at the limit of top_p.
        near = 0 if form else 1e-2
        assert driver.logprobs[number] == pytest.approx(wanted.logprobs, abs=near, rel=0)
        if wanted.prefill_logprobs and family != "phi3-longrope":
            served = driver.prefill_logprobs[number][1 : len(wanted.ids)]
            near = 0 if form else 2e-4
            assert served == pytest.approx(wanted.prefill_logprobs[1:], abs=near, rel=0)
    assert engine.num_rows_taken == 0 and not engine._table.prompt_outputs
    assert sorted(driver.free) == list(range(len(driver.free)))


def test_a_part_that_can_not_be_is_refused(driver: Driver) -> None:
    ids = list(range(3, 53))
    request = driver.request(0, ids)
    with pytest.raises(BatchError, match="51 more tokens can not be computed of an input of 50"):
        driver.add([driver.part(request, 51)])
    driver.add([driver.part(request, 20)])
    for chunks, sentence in [
        ({0: 31}, "31 more tokens can not be computed of an input of 50 tokens, 20 of"),
        ({0: 0}, "0 more tokens"),
        ({9: 3}, r"requests \[9\] are not running"),
        ({}, "rests"),
    ]:
        with pytest.raises(BatchError, match=sentence):
            driver.engine.step(*step_of(driver.engine, chunks=chunks))
    for columns, sentence in [
        ({"request_ids": [0, 0], "counts": [3, 3]}, "named twice"),
        ({"request_ids": [0], "counts": [3, 3]}, "2 counts were given for 1 requests"),
    ]:
        with pytest.raises(BatchError, match=sentence):
            driver.engine.step(pb.Step(**columns))
    driver.step({0: 30})
    driver.run()


def test_a_failed_prefill_leaves_those_that_advance_where_they_were(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(3, 53))
    driver.add([driver.request(0, ids, max_new_tokens=30, ignore_eos_token=True)])
    driver.run()
    options = {"max_new_tokens": 30, "ignore_eos_token": True, "prefill_logprobs": True}
    driver.add([driver.request(1, ids, **options)])
    driver.add([driver.request(2, ids, chunk_len=11, **options)])

    def fail(*_: Any) -> None:
        raise RuntimeError("the device says no")

    for place in ("engine.step.StepRunner.choose", "engine.engine.verify"):
        with monkeypatch.context() as patch:
            patch.setattr(f"text_generation_shard.{place}", fail)
            with pytest.raises(RuntimeError, match="says no"):
                driver.add([driver.request(3, [5] * 40)], driver.advance({2: 39}, 4))
    assert driver.engine.num_rows_taken == 2
    driver.step({2: 39})
    driver.run()
    assert driver.tokens[1] == driver.tokens[2] == driver.tokens[0]
    assert driver.prefill_logprobs[1] == pytest.approx(driver.prefill_logprobs[2], nan_ok=True)


@pytest.mark.parametrize("device", ["cpu", "stream"])
def test_the_best_tokens_in_place_of_those_of_a_prompt(
    device: str, checkpoint: Callable[[str], Path]
) -> None:
    """Unchunked and chunked; with all tokens requested, the prompt's own is at its rank."""
    engine = load_engine(checkpoint("llama3"), device=device)
    num_tokens = engine.model.config.vocab_size
    driver, ids = Driver(engine), [random.Random(2).randrange(3, 300) for _ in range(50)]
    options = {"prefill_logprobs": True, "max_new_tokens": 2}
    driver.add([driver.request(0, ids, top_n_tokens=num_tokens, **options)])
    driver.add(
        [driver.request(1, ids, top_n_tokens=3, chunk_len=21, **options)], driver.advance({})
    )
    driver.step({1: 29})
    driver.add([driver.request(2, ids, **options)], driver.advance({}))
    driver.run()
    everything = driver.prefill_top_tokens[0]
    best = [everything[at : at + num_tokens] for at in range(0, len(everything), num_tokens)]
    assert len(best) == len(ids) - 1 and 2 not in driver.prefill_top_tokens
    for place, (ranked, token_id) in enumerate(zip(best, ids[1:], strict=True), start=1):
        values = [value for _, value in ranked]
        assert values == sorted(values, reverse=True)
        assert dict(ranked)[token_id] == driver.prefill_logprobs[0][place]
        assert values[driver.prefill_ranks[0][place - 1] - 1] == dict(ranked)[token_id]
    assert len(driver.prefill_ranks[1]) == len(driver.prefill_ranks[2]) == len(ids) - 1
    few = driver.prefill_top_tokens[1]
    for place, ranked in enumerate(best):
        three = few[3 * place : 3 * place + 3]
        assert [value for _, value in three] == pytest.approx([v for _, v in ranked[:3]], abs=1e-4)
    assert driver.prefill_logprobs[2][1:] == pytest.approx(driver.prefill_logprobs[0][1:], abs=1e-4)
