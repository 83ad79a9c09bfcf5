"""The number of operators of a step, and that the host waits for none of them: on `meta` tensors,
which have shapes but no values, so that reading one fails."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.weights import Parameters
from text_generation_shard.device.base import CacheShape, DeviceOptions
from text_generation_shard.device.cuda import attention, matrices, operators, sampler
from text_generation_shard.device.cuda.runner import Stream
from text_generation_shard.device.cuda.staging import pinned_upload
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.planner import Plan
from text_generation_shard.engine.step import StepRunner
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.parallel import World
from text_generation_shard.sampling import Watermark
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shard.tests.device.test_attention import make_batch, to_device
from shard.tests.driver import new_request, step_of

LAYER = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
}
NUM_LAYERS = {"8B": 32, "1B": 16}
# Operators that only create views.
VIEWS = {
    *("view", "slice", "expand", "t", "transpose", "unsqueeze", "select", "split", "permute"),
    *("as_strided", "detach", "alias", "unbind", "_unsafe_view", "chunk", "squeeze", "narrow"),
    *("split_with_sizes", "empty", "new_empty", "empty_like", "flatten", "reshape"),
}


class Operators(TorchDispatchMode):
    """Counts the operators of torch and our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        tensors = [item for item in tree_leaves((args, found)) if isinstance(item, torch.Tensor)]
        if name not in VIEWS and any(item.is_meta for item in tensors):
            self.counts[name] += 1
        return found


@pytest.fixture(params=list(LAYER))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LlamaModel:
    """A model with Llama 3's architecture, without weights."""
    return make_model(request.param, tmp_path)


def make_model(size: str, tmp_path: Path, quantize: str | None = None) -> LlamaModel:
    given = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": NUM_LAYERS[size],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "eos_token_id": 1,
        **LAYER[size],
    }
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = LlamaConfig.from_hf(tmp_path)
    options = DeviceOptions("bfloat16", "bfloat16", quantize)
    device = operators.TritonDevice(torch.device("meta"), torch.bfloat16, options)
    device.capability = 90
    device.upload = pinned_upload(device.torch_device)
    parameters = Parameters(device, quantize)
    found = LlamaModel(parameters, World(), config)
    with device.weight_copies() as copies:
        for stack in parameters._stacks:
            made = {name: stored(stack.shape_of(name)) for name in stack.sections}
            parameters._fill(stack, made, copies)
    for action in parameters._after_load:
        action()
    shape = CacheShape(config.num_layers, 8, config.head_dim, 16, torch.bfloat16)
    found.attention.allocate(shape, 4096)
    found.angle_table(4096)
    return found


def stored(shape: tuple[int, ...]) -> Any:
    """Stands for a tensor of a checkpoint."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return SimpleNamespace(path=Path("model.safetensors"), read=lambda: tensor)


def count(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, contexts: list[int], lengths: list[int]
) -> Counter[str]:
    """The operators of a pass, from its inputs to its scores."""
    is_decode = set(lengths) == {1}
    batch = to_device(make_batch(contexts, lengths, is_decode), "meta")
    seen = Operators()
    count_launches(seen, monkeypatch)
    with seen, torch.inference_mode(False):
        model.logits(model.forward(batch))
    return seen.counts


def count_launches(seen: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count our kernels too, without launching them."""

    def launch(kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        seen.counts[kernel.__name__] += 1

    for module in (attention, matrices, operators, sampler):
        monkeypatch.setattr(module, "launch", launch)


def test_a_decode_step_takes_few_operators(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        count(model, monkeypatch, [1000 + row for row in range(rows)], [1] * rows)
        for rows in (1, 8, 64)
    ]
    assert found[0] == found[1] == found[2]
    beside = 8
    assert sum(found[0].values()) <= 10 * model.config.num_layers + beside, found[0]


def test_prompts_take_no_more_however_many_they_are(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First parts of prompts, later parts, and parts together with decoding rows."""
    one = count(model, monkeypatch, [300], [300])
    many = count(model, monkeypatch, [300, 900, 20, 700], [300, 100, 20, 1])
    assert one == many
    assert sum(one.values()) <= 10 * model.config.num_layers + 8, one
    mixed = [
        count(model, monkeypatch, contexts, lengths)
        for contexts, lengths in (([40, 300], [1, 300]), ([9, 9, 300, 900], [1, 1, 300, 20]))
    ]
    assert mixed[0] == mixed[1]
    # Both kinds of attention, and one operator that concatenates their results.
    assert sum(mixed[0].values()) <= 13 * model.config.num_layers + 8, mixed[0]


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_weights_of_few_bits_take_no_more(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for three operators of an int8 lookup, and one that quantizes the rows of an fp8
    product."""
    # A part of a weight takes as many operators as the whole.
    monkeypatch.setattr(matrices, "_FITTED_NUMBERS", 2**40)
    own = make_model("1B", tmp_path, quantize)
    for contexts, lengths in (([1000, 1001, 1002], [1, 1, 1]), ([300], [300])):
        found = count(own, monkeypatch, contexts, lengths)
        each = 14 if quantize == "fp8" else 10
        assert sum(found.values()) <= each * own.config.num_layers + 11, found
        assert found["multiply"] + found["_scaled_mm"] == 4 * own.config.num_layers + 1


class Fetched(Stream):
    """See `Stream`. Only tokens are copied to the host."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def fetch(self, found: Tensor) -> Tensor:
        self.shapes.append(tuple(found.shape))
        return torch.zeros(found.shape, dtype=found.dtype)


class AllowsAll:
    """See `sampling.Allowed`."""

    def __init__(self, plan: Plan, vocab_size: int) -> None:
        self.places = np.arange(len(plan.samples.rows))
        self._words = -(-vocab_size // 32)

    def masks(self) -> Tensor:
        return torch.full((len(self.places), self._words), -1, dtype=torch.int32)

    def settle(self, choice: Any) -> Any:
        """Replaces no token."""
        return choice

    def failures(self) -> dict[int, str]:
        return {}

    def driven(self) -> list[int]:
        return []


DRAWN = {"do_sample": True, "temperature": 0.7, "seed": 3}
EVERYTHING = [
    {},
    {**DRAWN, "top_k": 5, "top_p": 0.9, "typical_p": 0.9},
    {**DRAWN, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.2},
    {"logit_bias": ((5, 1.0), (7, -1.0))},
]


def test_a_whole_step_waits_for_nothing_but_its_tokens(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of choice, for decoding rows and a prompt; steps launched ahead."""
    device: Any = model._norm._device
    device.stream = stream = Fetched()
    engine = Engine(device, model, 0, Watermark(0.5, 2.0))
    engine.use_table(16, max_total_tokens=4096, num_blocks=4000, max_prefill_tokens=4096)
    # A mask for each row, not made by a grammar.
    vocab_size, choose_plain = model.config.vocab_size, StepRunner.choose

    def choose(steps: StepRunner, plan: Plan, scores: Any) -> Any:
        plan.grammars = AllowsAll(plan, vocab_size)  # type: ignore[assignment]
        return choose_plain(steps, plan, scores)

    monkeypatch.setattr(StepRunner, "choose", choose)
    requests = [
        new_request(
            row,
            range(100),
            range(10 * row, 10 * row + 10),
            sampling,  # type: ignore[arg-type]
            max_new_tokens=50,
            min_new_tokens=20,
        )
        for row, sampling in enumerate(EVERYTHING)
    ]
    counted = []
    for new in (requests[:3], [], requests[3:]):
        seen, step = Operators(), step_of(engine, new)
        count_launches(seen, monkeypatch)
        with seen, torch.inference_mode(False):
            handle = engine.launch(*step)
        counted.append(seen.counts)
    handle.result()
    layers = model.config.num_layers
    prompts, decode, mixed = (sum(item.values()) for item in counted)
    # Outside the layers: inputs, tables, the head, and every kind of choice.
    assert prompts <= 10 * layers + 45 and mixed <= 13 * layers + 45, counted
    assert decode <= 10 * layers + 35, counted[1]
    # All that is copied back: ids, log-probabilities and best scores.
    assert stream.shapes == [(3, 3), (3, 3), (3, 4)]
