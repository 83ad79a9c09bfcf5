"""A complete device in few lines: only what `device.base` requires, in plain torch."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from text_generation_shard.device.base import ALL, Form, MemoryBudget
from text_generation_shard.device.reference.runner import EagerForward, TorchRunner


class Weight:
    kind = "float32"

    def __init__(self, weight: Any, gate: Any = None) -> None:
        self.weight, self.gate, self.nbytes = weight.float(), gate, 4 * weight.numel()
        self.lookup, self.as_matrix = self.weight.__getitem__, lambda: (self, 0)

    def __call__(self, hidden: Any, bias: Any = None) -> Any:
        out = F.linear(hidden, self.weight, bias)
        return getattr(F, self.gate)(out.chunk(2, 1)[0]) * out.chunk(2, 1)[1] if self.gate else out


class Attention:
    name, block_size, is_deterministic, heaviest_keys = "small", 16, False, None
    workspace_bytes, plan = (lambda self, shape: 0), (lambda self, *batch_angles: batch_angles)

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self.kinds, self.scale = (num_heads, num_kv_heads, num_kv_heads), scale

    def allocate(self, of: Any, num_blocks: int) -> int:
        self.cache = torch.zeros(of.num_layers, num_blocks * 16, 2 * of.num_kv_heads, of.head_dim)
        return self.cache.nbytes

    def forward(self, heads: Any, layer: int, window: Any, is_rotated: bool, both: Any) -> Any:
        (plan, angles), out = both, []
        if is_rotated:
            cos, sin = angles.table[angles.rows][:, :, None].unbind(1)
            first, second = heads[:, : -self.kinds[1], : 2 * cos.shape[2]].chunk(2, 2)
            first[:], second[:] = first * cos - second * sin, second * cos + first * sin
        query, self.cache[layer, plan.slots] = heads.tensor_split(self.kinds[:1], 1)
        for row, end in enumerate(plan.host_context_lens):
            own, seen = slice(*plan.cu_seqlens_q[row : row + 2]), torch.arange(end)
            slots = plan.block_tables[row, seen // 16] * 16 + seen % 16
            mask = torch.ones(end, end).tril().triu(1 - (window or end))[own.start - own.stop :]
            qkv = query[own].transpose(0, 1), *self.cache[layer, slots].transpose(0, 1).chunk(2)
            got = F.scaled_dot_product_attention(*qkv, mask > 0, scale=self.scale, enable_gqa=True)
            out.append(got.transpose(0, 1).flatten(1))
        return torch.cat(out)


class SmallDevice:
    name, torch_device, dtype, matrix_dtype = "small", torch.device("cpu"), torch.float32, None
    cache_dtype, is_deterministic, runs_behind, spares_core, sums_in_parts = dtype, *[False] * 4
    matrix = staticmethod(lambda weight, _, columns=ALL, part=None: Weight(weight[:, columns]))
    gated_matrix = staticmethod(lambda weight, quantize, gate, has_bias: Weight(weight, gate))
    embedding, attention, copy = matrix, Attention, staticmethod(torch.Tensor.copy_)
    upload, num_spare_blocks = staticmethod(lambda arrays: [*map(torch.from_numpy, arrays)]), 0
    check_room = serve = release_memory = staticmethod(lambda *_: 0)
    weight_copies, quantized_form = (lambda it: nullcontext(it)), (lambda *_: Form(None, ""))
    free_bytes, then = (lambda _, n, run: MemoryBudget(2**26, n)), (lambda _, action: action())

    def runner(self, model: Any) -> TorchRunner:
        return TorchRunner(EagerForward(model), self.upload, model.length_rule)

    def add_norm(self, hidden: Any, delta: Any, scale: float, weight: Any, eps: float) -> Any:
        added = hidden.add_(0 if delta is None else delta * scale)
        return F.rms_norm(added, hidden.shape[1:], weight, eps)


def open_device(options: Any) -> SmallDevice:
    return SmallDevice()
