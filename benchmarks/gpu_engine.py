"""Engines with random weights for the part `engine`.

Weights are generated on the device, without a file, so that a model of 8 B is ready in seconds.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_attention import causal_flop
from gpu_caller import NewRequest
from gpu_limits import weights_of
from gpu_timing import MODELS, TINY_MODELS, Bench, Limits, Model
from make_checkpoint import Shape, config_of, write_tokenizer
from text_generation_process.sampling import Sampling
from text_generation_shard.checkpoint.config import LlamaConfig
from text_generation_shard.checkpoint.weights import Parameters, Stack, StoredTensor
from text_generation_shard.device import open_device
from text_generation_shard.device.base import DeviceOptions, WeightCopies
from text_generation_shard.device.reference.device import Device
from text_generation_shard.engine.engine import Engine
from text_generation_shard.grammars.grammar import (
    Grammar,
    compile_tried,
    load_tokenizer,
    try_text,
)
from text_generation_shard.models.llama import LlamaModel
from text_generation_shard.parallel import World
from text_generation_shard.sampling import Watermark
from torch import Tensor

# Standard deviation of the weights, the initialisation of large models.
_WEIGHT_STD = 0.02
GRAMMARS = {
    "digits": "start: /[0-9]{1,12}/",
    "choice": 'start: "yes" | "no" | "not known"',
    "object": json.dumps(
        {
            "grammars": [
                {
                    "json_schema": {
                        "type": "object",
                        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 999}},
                        "required": ["age"],
                        "additionalProperties": False,
                        "x-guidance": {"whitespace_flexible": False},
                    }
                }
            ]
        }
    ),
}
"""As the router sends them; the shortest text of each has fewer than 20 tokens."""
# Of the tokenizer that compiles grammars; the model's vocabulary may be larger.
_MOST_PIECES = 32_768


class Sizes(NamedTuple):
    """A model of Llama's shape, with all of its layers."""

    model: Model
    num_layers: int
    is_tied: bool

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        products = weights_of(self.model)
        outputs, inputs = products.pop("head")
        assert outputs == self.model.vocab and inputs == self.model.hidden
        return self.num_layers * sum(rows * columns for rows, columns in products.values())

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.model.vocab * self.model.hidden

    def floor_us(self, rows: int, context: int, limits: Limits) -> float:
        """The least µs of a step: every 16-bit weight and every key and value is read once; or the
        products, if they take longer."""
        model, weights = self.model, self.layer_weights + self.head_weights
        nbytes = 2 * weights + rows * context * model.token_bytes * self.num_layers
        attention = 4 * model.num_heads * model.head_dim * context * self.num_layers
        flop = rows * (2 * weights + attention)
        return max(nbytes / limits.read_gb_s / 1e3, flop / limits.matrix_tflop_s / 1e6)

    def prefill_flop(self, rows: int, length: int) -> float:
        """The operations of prefilling `rows`; only the last token of each has scores."""
        attention = self.num_layers * causal_flop(self.model, rows, length, length)
        return 2.0 * rows * (self.layer_weights * length + self.head_weights) + attention

    def shape(self) -> Shape:
        """The content of config.json."""
        _, hidden, inter, num_heads, num_kv_heads, head_dim, vocab = self.model
        return Shape(
            hidden, inter, self.num_layers, num_heads, num_kv_heads, head_dim, vocab, self.is_tied
        )


LARGE, SMALL = Sizes(MODELS[0], 32, False), Sizes(MODELS[1], 16, True)
# In a dry run, instead of both.
TINY = Sizes(TINY_MODELS[0], 2, True)


def models_of(bench: Bench) -> Sequence[Sizes]:
    """The large one and the small one; the tiny one in a dry run."""
    return (TINY,) if bench.is_dry else (LARGE, SMALL)


class RandomParameters(Parameters):
    """See `Parameters`. Norms are ones, other weights normally distributed with a fixed seed."""

    def load(self, directory: Path) -> None:
        """Reads no file."""
        where = self.device.torch_device
        generator = torch.Generator(where).manual_seed(0)

        def values(stack: Stack, name: str) -> Tensor:
            found = torch.ones(stack.shape_of(name), dtype=self.device.dtype, device=where)
            if stack.receive is not None:
                found.normal_(0.0, _WEIGHT_STD, generator=generator)
            return found

        for stack in self._stacks:
            made = {
                name: StoredTensor(directory, _Made(values(stack, name)), name)
                for name in stack.sections
            }
            self._fill(stack, made, WeightCopies())
        self._stacks.clear()
        for action in self._after_load:
            action()
        self._after_load.clear()


class _Made(NamedTuple):
    """Stands for an open file that holds one tensor."""

    tensor: Tensor

    def get_tensor(self, name: str) -> Tensor:
        """Whatever its name is."""
        return self.tensor


def open_for(bench: Bench, dtype: str, graphs: Sequence[int] | None) -> Device:
    """A device that computes in `dtype` and records passes of these numbers of tokens (None: its
    default). In a dry run: a GPU's runner over the reference."""
    options = DeviceOptions(dtype, dtype, cuda_graphs=None if graphs is None else tuple(graphs))
    if bench.is_dry:
        made: Device = import_module("shard.tests.stream_device").open_device(options)
        return made
    return open_device("cuda", options)


def write_files(sizes: Sizes, directory: Path) -> None:
    """Writes the files besides weights: config.json and tokenizer.json."""
    (directory / "config.json").write_text(json.dumps(config_of(sizes.shape())))
    write_tokenizer(directory, min(_MOST_PIECES, sizes.model.vocab))


def load(
    bench: Bench,
    sizes: Sizes,
    directory: Path,
    graphs: Sequence[int] | None,
    dtype: str = "bfloat16",
) -> Engine:
    """An engine that is not warm yet; `write_files` has been called with the directory. graphs: see
    `open_for`."""
    device = open_for(bench, dtype, graphs)
    config = LlamaConfig.from_hf(directory)
    parameters = RandomParameters(device)
    model = LlamaModel(parameters, World(), config)
    parameters.load(directory)
    return Engine(device, model, parameters.nbytes, Watermark(0.5, 2.0))


def known_requests(engine: Engine, rows: int, context: int, new: int) -> list[NewRequest]:
    """Requests of `context` tokens that count as cached except the last one. Each has its own
    blocks, also for `new` more tokens."""
    width = -(-(context + new) // engine.block_size)
    return [
        NewRequest(
            id=row,
            input_ids=[1 + row] * context,
            num_prompt_tokens=context,
            num_cached_tokens=context - 1,
            block_table=range(row * width, (row + 1) * width),
            sampling=Sampling(),
            max_new_tokens=new,
        )
        for row in range(rows)
    ]


def grammars_of(engine: Engine, directory: Path) -> dict[str, Grammar]:
    """GRAMMARS, compiled. Raises RuntimeError."""
    config = engine.model.config
    path = directory / "tokenizer.json"
    own = load_tokenizer(path, config.vocab_size, config.eos_token_ids)
    found = {name: compile_tried(own, try_text(own, text)) for name, text in GRAMMARS.items()}
    for name, grammar in found.items():
        if grammar.error or grammar.min_tokens > 20:
            raise RuntimeError(f"the grammar {name} can not be used: {grammar.error}")
    return found
