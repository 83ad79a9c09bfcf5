"""The five loads of every server, and the machine's upper bound for them."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """One load: greedy, end-of-sequence ignored, streamed."""

    clients: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    """The number of first prompt tokens that all requests share, also the warm-up's."""

    def __str__(self) -> str:
        own = self.prompt_tokens - self.shared_tokens
        asked = f"{self.shared_tokens} shared + {own} own" if self.shared_tokens else str(own)
        who = "1 client" if self.clients == 1 else f"{self.clients} clients"
        return f"{who}, {asked} tokens in, {self.new_tokens} out"


LOADS = {
    "c1": Shape(1, 8, 128, 64),
    "c8": Shape(8, 32, 128, 64),
    "c32": Shape(32, 96, 128, 64),
    "shared": Shape(16, 64, 576, 32, 512),
    "long": Shape(4, 8, 2048, 16),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's limits; machine.py measures them."""

    read_gb_s: float
    bfloat16_gflop_s: float

    def best_of(self, other: "Rates") -> "Rates":
        """The higher value of two measurements; the lower one was disturbed."""
        return Rates(
            max(self.read_gb_s, other.read_gb_s),
            max(self.bfloat16_gflop_s, other.bfloat16_gflop_s),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """The least arithmetic and memory traffic of a dense decoder in bfloat16."""

    layers: int
    attention_width: int
    linear_weights: int
    head_weights: int

    @classmethod
    def of(cls, checkpoint: Path) -> "Work":
        """Reads the config of a Llama."""
        config = json.loads((checkpoint / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
        layer = 2 * hidden * (queries + keys) + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(layers, queries, layers * layer, hidden * config["vocab_size"])

    def prefill_flop(self, shape: Shape) -> float:
        """The operations of one prompt: shared tokens are cached, the head computes one row."""
        first, last = shape.shared_tokens, shape.prompt_tokens
        keys_read = (last * (last + 1) - first * (first + 1)) / 2
        attention = 4 * self.layers * self.attention_width * keys_read
        return 2 * self.linear_weights * (last - first) + attention + 2 * self.head_weights

    def step_s(self, rows: int, rates: Rates) -> float:
        """One decode step: every 16-bit weight is read once and multiplied with each row."""
        weights = self.linear_weights + self.head_weights
        reading = 2 * weights / (1e9 * rates.read_gb_s)
        return max(reading, 2 * weights * rows / (1e9 * rates.bfloat16_gflop_s))

    def limit(self, shape: Shape, rates: Rates) -> float:
        """Tokens per second, prompts and decode steps one after the other.

        An upper bound: it ignores attention in decode steps, norms, sampling and the server.
        """
        prefill = shape.clients * self.prefill_flop(shape) / (1e9 * rates.bfloat16_gflop_s)
        decode = (shape.new_tokens - 1) * self.step_s(shape.clients, rates)
        return shape.clients * shape.new_tokens / (prefill + decode)
