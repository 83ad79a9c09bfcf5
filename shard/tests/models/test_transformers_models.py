"""transformers' modules over our cache and in our batches give the tokens of its own `generate`, in
float32, whatever else a step computes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from text_generation_proto import pb
from text_generation_shard.engine.engine import Engine
from text_generation_shard.errors import ModelError, UnsupportedError
from text_generation_shard.models.hugging_face.config import TransformersConfig
from text_generation_shard.models.hugging_face.products import check_plan, plan_of

from integration_tests.marks import at_night
from shard.tests.driver import Driver, changed, load_engine
from shard.tests.models.architectures import (
    REFUSED,
    SERVED,
    Answer,
    answers_of,
    ragged_prompts,
    write_architecture,
)
from shard.tests.models.rarer_architectures import RARER

pytestmark = pytest.mark.slow

# Capped scores; sinks and experts with biases; norms after, of whole queries; learned positions;
# experts; latent attention; layers with a state.
ALWAYS = ("gemma2", "gpt_oss", "olmo2", "gpt2", "qwen3_moe", "deepseek_v3", "lfm2", "qwen3_5_text")
IS_OLD = Version(transformers.__version__) < Version("5.24")
SINCE_5_24 = ("codegen", "exaone", "gptj")
NEW_TOKENS = 12
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
HEADING = "| --- | --- | --- | --- | --- |"
SETTINGS = {"model_impl": "transformers"}
# What the sentence says of each: transformers' code of Jamba and Mamba can not continue a text by
# several tokens.
REFUSED_FOR = {
    "falcon": "FalconForCausalLM computes its attention in its own way",
    "bloom": "0 layers of BloomForCausalLM attend by transformers' attention interface",
    "gpt_neo": "GPTNeoForCausalLM computes its attention in its own way",
    "jamba": "JambaForCausalLM .* its scores differ .* in several",
    "mamba": "MambaForCausalLM .* its scores differ .* in several",
    "llama4_text": "Llama4ForCausalLM has layers of the kind chunked_attention",
    "recurrent_gemma": "RecurrentGemmaForCausalLM .* its scores differ .* in several",
    "t5": "no decoder for the model type t5",
    "bart": "BartForCausalLM has an encoder",
    "mpt": "MptForCausalLM can not be computed with another attention",
}


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and what transformers answers."""

    name: str
    engine: Engine
    prompts: list[list[int]]
    answers: list[Answer]

    def driver(self) -> Driver:
        """Drives the engine without requests."""
        self.engine.clear()
        return Driver(self.engine)

    def check(self, driver: Driver, numbers: Sequence[int]) -> None:
        """These requests have the answers up to a tie."""
        for number in numbers:
            answer = self.answers[number]
            certain = answer.num_certain
            assert driver.tokens[number][:certain] == answer.tokens[:certain]
            found = driver.logprobs[number][:certain]
            assert found == pytest.approx(answer.logprobs[:certain], abs=1e-4)
            if number in driver.prefill_logprobs:
                found = driver.prefill_logprobs[number][1 : len(self.prompts[number])]
                assert found == pytest.approx(answer.prompt_logprobs, abs=1e-4)


@pytest.fixture(
    scope="module",
    params=[*ALWAYS, *at_night(*(name for name in {**SERVED, **RARER} if name not in ALWAYS))],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Each architecture in turn."""
    name: str = request.param
    if name in SINCE_5_24 and IS_OLD:
        pytest.skip("this version of transformers can not compute it with another attention")
    directory = tmp_path_factory.mktemp("models") / name
    path = write_architecture(name, directory, **RARER.get(name, {}))
    prompts = ragged_prompts()
    answers = answers_of(path, prompts, NEW_TOKENS)
    engine = load_engine(path, 256, max_batch_size=16, max_total_tokens=128, **SETTINGS)
    return Served(name, engine, prompts, answers)


def test_rows_that_join_leave_and_are_cut_have_the_tokens_of_transformers(served: Served) -> None:
    driver, prompts = served.driver(), served.prompts
    options = {"max_new_tokens": NEW_TOKENS, "prefill_logprobs": True}
    requests = [driver.request(number, ids, **options) for number, ids in enumerate(prompts)]
    driver.add(requests[:4])
    driver.step()
    driver.add(requests[4:7], driver.advance({}))
    driver.step()
    # Two inputs in parts, and one that leaves and comes back, beside rows that decode.
    driver.add([driver.part(request, 7) for request in requests[8:]], driver.advance({}))
    known = driver.drop(5)
    driver.step({8: 1, 9: 30})
    driver.add([requests[7]], driver.advance({8: len(prompts[8]) - 8}))
    back = driver.request(5, known, num_prompt_tokens=len(prompts[5]), **options)
    driver.add([back], driver.advance({9: len(prompts[9]) - 37}))
    driver.run()
    served.check(driver, range(len(prompts)))
    assert sorted(driver.free) == list(range(len(driver.free)))


def test_alone_beside_others_cut_and_behind_a_cached_prefix_is_the_same(served: Served) -> None:
    """The same bits where the engine says so, else the same tokens."""
    numbers = range(len(served.prompts))
    together, alone, cut = served.driver(), served.driver(), served.driver()
    together.add([request_of(together, served, number) for number in numbers])
    together.run()
    for number in numbers:
        alone.add([request_of(alone, served, number)])
        alone.run()
    long = [number for number in numbers if len(served.prompts[number]) > 5]
    cut.add([request_of(cut, served, number, chunk_len=5) for number in long])
    cut.step({number: len(served.prompts[number]) - 5 for number in long})
    cut.run()
    cached, shared = behind_a_cached_prefix(served)
    ways = {
        "together": (together, numbers),
        "alone": (alone, numbers),
        "cut": (cut, long),
        "cached": (cached, shared),
    }
    for way, (driver, those) in ways.items():
        served.check(driver, those)
        if served.engine.is_deterministic:
            for number in those:
                assert driver.tokens[number] == together.tokens[number], way
                assert driver.logprobs[number] == together.logprobs[number], way


def request_of(driver: Driver, served: Served, number: int, **options: Any) -> pb.Request:
    """One of the prompts."""
    ids = served.prompts[number]
    return driver.request(number, ids, max_new_tokens=NEW_TOKENS, **options)


def behind_a_cached_prefix(served: Served) -> tuple[Driver, list[int]]:
    """Requests whose first blocks other ones have written, which still run. If the model keeps
    states, they begin from the states after those blocks."""
    driver, size = served.driver(), served.engine.block_size
    keeps_state = served.engine.model.state_bytes > 0
    numbers = [number for number, ids in enumerate(served.prompts) if len(ids) > size]
    leaders, followers = [], []
    for place, number in enumerate(numbers):
        ids = served.prompts[number]
        count = (len(ids) - 1) // size
        stores: dict[str, Any] = {}
        if keeps_state:
            stores = {"snapshot_positions": [count * size], "snapshot_places": [place]}
        leader = driver.request(100 + number, ids, ignore_eos_token=True, **stores)
        own = request_of(driver, served, number, snapshot=place if keeps_state else None)
        table = [*leader.block_table[:count], *own.block_table[count:]]
        leaders.append(leader)
        followers.append(changed(own, block_table=table, num_cached_tokens=count * size))
    driver.add(leaders)
    driver.add(followers, driver.advance({}))
    driver.run()
    return driver, numbers


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = write_architecture(name, tmp_path)
    with pytest.raises(ModelError, match=REFUSED_FOR[name]) as caught:
        load_engine(path, **SETTINGS)
    assert str(caught.value).count("\n") == 0


def test_a_configuration_for_which_the_code_of_transformers_fails_is_refused(
    tmp_path: Path,
) -> None:
    """Every head has its own keys in this one, whatever the configuration says."""
    settings = {**RARER["glm4_moe_lite"], "num_key_value_heads": 2}
    path = write_architecture("glm4_moe_lite", tmp_path, **settings)
    with pytest.raises(ModelError, match="Glm4MoeLiteForCausalLM can not be computed"):
        load_engine(path, **SETTINGS)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "lfm2"])
def test_same_bits_are_not_promised_where_torch_computes(name: str, tmp_path: Path) -> None:
    path = write_architecture(name, tmp_path)
    with pytest.raises(ModelError, match="--deterministic is not supported with"):
        load_engine(path, deterministic=True, **SETTINGS)


@pytest.mark.skipif(IS_OLD, reason="the table is of the newest version")
def test_the_documents_say_how_it_is_served(served: Served) -> None:
    """UPDATE_FROZEN=1 writes the row of each model into docs/models.md."""
    row = row_of(served)
    head, end = DOCUMENT.read_text("utf-8").split(f"\n{HEADING}\n"), "\n\n"
    rows, behind = head[1].partition(end)[::2]
    if os.environ.get("UPDATE_FROZEN") == "1":
        name = row.split("|")[1]
        others = [line for line in rows.splitlines() if line.split("|")[1] != name]
        rows = "\n".join(sorted([*others, row], key=str.lower))
        DOCUMENT.write_text(f"{head[0]}\n{HEADING}\n{rows}{end}{behind}", "utf-8")
    assert row in rows.splitlines()


def row_of(served: Served) -> str:
    """What the table of models says of it."""
    engine, model = served.engine, served.engine.model
    config = model.config
    assert isinstance(config, TransformersConfig)
    kind = "kernels" if model.attention.name == "packed" else "torch"
    try:
        check_plan(plan_of(config.text, config.model_class), config.architecture)
        ranks = "yes"
    except UnsupportedError:
        ranks = "no"
    bits = "yes" if engine.is_deterministic else "no"
    state = "state per request, no draft tokens" if model.state_bytes else ""
    return f"| {config.architecture} | {kind} | {bits} | {ranks} | {state} |"
