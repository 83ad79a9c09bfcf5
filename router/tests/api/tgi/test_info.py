"""What is on, what is off and why; and what is said of settings that do nothing."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.api.tgi.info import features
from text_generation_router.client.ranks import WarmupResult
from text_generation_router.services import assemble

from router.tests.serving import assemble_scripted


def features_of(directory: Path, info: dict[str, Any], **options: Any) -> dict[str, str]:
    """Of a router with these flags on a shard with these properties."""
    services = assemble_scripted(directory, **options)
    return features(replace(services, info=replace(services.info, **info)))


@pytest.mark.parametrize(
    ("name", "info", "options", "said"),
    [
        ("prefix_caching", {}, {"disable_prefix_caching": True}, "off: --disable-prefix-caching "),
        ("prefix_caching", {"recompute_at": 4096}, {}, "on: but not for .* at most 4096 tokens"),
        ("prefix_caching", {"prompt_scaled_at": 512}, {}, "on: but prompts of more than 512 tok"),
        ("prefill_chunking", {}, {"disable_prefill_chunking": True}, "off: --disable-prefill-ch"),
        ("speculation", {}, {"speculate": 3}, "on: up to 3 draft tokens"),
        ("speculation", {"keeps_state": True}, {"speculate": 3}, "off: this model keeps a state"),
        ("async_scheduling", {}, {}, "off: the model computes on every core"),
        ("async_scheduling", {"spares_core": True}, {}, "on$"),
        ("async_scheduling", {"spares_core": True}, {"speculate": 3}, "on$"),
        ("quantization", {"quantize": "int8"}, {}, "on: int8"),
        ("deterministic", {}, {}, "off: this device's operators round"),
        ("deterministic", {"deterministic": True}, {}, "on$"),
        ("grammars", {}, {"disable_grammar_support": True}, "off: --disable-grammar-support "),
        ("cuda_graphs", {"device_type": "cuda"}, {}, "off: --cuda-graphs 0 was given, or"),
        ("cuda_graphs", {"device_type": "cuda", "records_steps": True}, {}, "on$"),
    ],
)
async def test_each_feature_says_why_it_is_off(
    tmp_path: Path, name: str, info: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    assert re.match(said, features_of(tmp_path, info, **options)[name])


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({}, False),
        # What the launcher passes on without a choice.
        ({"waiting_served_ratio": 0.3}, False),
        ({"waiting_served_ratio": 2.0}, True),
        ({"max_waiting_tokens": 3}, True),
        ({"max_waiting_tokens": 3, "disable_prefill_chunking": True}, False),
    ],
)
async def test_settings_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_warned: bool
) -> None:
    assemble_scripted(tmp_path, **options)
    assert ("have no effect with prefill chunking" in caplog.text) is is_warned


@pytest.mark.parametrize(("num_snapshots", "said"), [(0, "off: there is no mem"), (5, "on: behi")])
async def test_a_model_with_states_drafts_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_snapshots: int, said: str
) -> None:
    plain = assemble_scripted(tmp_path, speculate=3)
    assert plain.scheduler_limits.num_snapshots is None and not caplog.messages
    services = assemble(
        plain.config,
        plain.shards,
        plain.tokenizer,
        replace(plain.info, keeps_state=True),
        WarmupResult(1024, 100, 200, 0, 0, num_snapshots=num_snapshots),
        plain.templates,
    )
    limits = services.scheduler_limits
    assert (limits.num_snapshots, limits.speculate) == (num_snapshots, 0)
    assert "--speculate 3 has no effect: this model keeps a state per request" in caplog.text
    assert features(services)["prefix_caching"].startswith(said)


async def test_costs_of_steps_are_those_of_the_warmup(tmp_path: Path) -> None:
    services = assemble_scripted(tmp_path)
    costs = assemble(
        services.config,
        services.shards,
        services.tokenizer,
        services.info,
        WarmupResult(1024, 100, 200, 0, 0, 10_000_000, 100_000),
        services.templates,
    ).scheduler_limits.costs
    assert (costs.decode_step_ns, costs.num_rows, costs.prefill_token_ns) == (10**7, 32, 10**5)
