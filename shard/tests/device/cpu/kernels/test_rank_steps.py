"""Compiled passes of several ranks: the same results as with one rank, bit for bit if sums have
fixed parts; and a failing rank."""

from typing import Any

import pytest
from text_generation_shard.device.cpu.kernels import are_vectors_wide
from text_generation_shard.device.cpu.kernels.tile import num_parts

from integration_tests.checkpoints import write_checkpoint
from shard.tests.rank_passes import Case, Found, key, run_cases

pytestmark = pytest.mark.slow

DETERMINISTIC = {"deterministic": True}
FORMS: list[dict[str, Any]] = [
    {"dtype": "bfloat16", **DETERMINISTIC},
    {"dtype": "float32", **DETERMINISTIC},
    {"dtype": "bfloat16"},
]
QUANTIZED: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "quantize": kind, **DETERMINISTIC} for kind in ("int8", "int4")
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("ranks")
    # A feed-forward size that is not a whole number of parts, two KV heads, a vocabulary that is
    # not a multiple of 8.
    eight = {"num_attention_heads": 8, "head_dim": 16, "vocab_size": 301, "mlp_bias": False}
    small = str(write_checkpoint("llama3", folder / "llama3", **eight))
    # Biases of `out`, multipliers, normalized heads; slots of a few rows.
    granite = str(write_checkpoint("granite", folder / "granite", mlp_bias=False))
    cases = [
        Case(small, FORMS[0], [1, 2, 4, 8]),
        Case(small, FORMS[1], [1, 2, 4], num_threads=2),
        Case(granite, FORMS[1], [1, 2], slot_bytes=2**12),
        Case(granite, FORMS[2], [1, 2], num_threads=2),
        Case(small, FORMS[2], [2], num_threads=2, fails=True),
    ]
    if are_vectors_wide():
        sizes = {"intermediate_size": 256, "hidden_size": 128, "head_dim": 64, "mlp_bias": False}
        wide = str(write_checkpoint("llama3", folder / "wide", **sizes))
        cases += [Case(wide, form, [1, 2]) for form in QUANTIZED]
    return cases


@pytest.fixture(scope="module")
def found(cases: list[Case]) -> Found:
    return run_cases(cases)


def test_ranks_give_what_one_gives(cases: list[Case], found: Found) -> None:
    for number, case in enumerate(cases):
        if case.fails:
            continue
        one = found[key(1, number)][0]
        assert one["is_fused"]
        for size in case.sizes[1:]:
            ranks = found[key(size, number)]
            assert all(rank["is_fused"] and rank["tokens"] == one["tokens"] for rank in ranks)
            same = one["prompt"], one["logprobs"]
            if "deterministic" in case.form:
                assert (ranks[0]["prompt"], ranks[0]["logprobs"]) == same
            assert ranks[0]["prompt"] == pytest.approx(one["prompt"], abs=0.1)


def test_a_rank_that_gives_up_or_does_not_come_is_named(cases: list[Case], found: Found) -> None:
    number = next(number for number, case in enumerate(cases) if case.fails)
    first, other = found[key(2, number)]
    assert first["given_up"] == "shard 1 has aborted message 2 False"
    # The aborted message is computed again with the same result.
    assert first["tokens"] == other["tokens"] and len(first["tokens"]) == 4
    assert first["late"].startswith("shard 1 did not come within") and first["late"].endswith(
        "True"
    )
    assert 0.9 < first["seconds"] < 10


def test_ranks_have_fixed_parts_of_a_sum() -> None:
    assert [num_parts(1536 // size, 192, 8) for size in (1, 2, 4, 8)] == [8, 4, 2, 1]
    # Parts are doubled until they are a multiple of the unit.
    assert [num_parts(768 // size, 96, 64) for size in (1, 2, 4, 8)] == [4, 2, 1, 1]
    # No whole parts, or a number of parts that is no branch of a tree.
    assert num_parts(200, 192, 1) == num_parts(576, 192, 1) == num_parts(576, None, 1) == 1
