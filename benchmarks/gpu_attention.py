"""Our own attention over the paged cache: error against float64, share of the GPU's limits."""

from collections.abc import Sequence
from functools import partial

import torch
from gpu_timing import Bench, Figures, Model, error_of
from text_generation_shard.device.base import Angles, CacheShape, ForwardBatch
from text_generation_shard.device.cuda.attention import TritonAttention, TritonPlan
from text_generation_shard.device.cuda.device import FIRST_WITH_CACHE
from torch import Tensor

# The largest share of the free memory for a cache.
_CACHE_SHARE = 0.6
# Keys or values that are generated at once.
_FILLED = 1 << 16
# This number of queries of a row is checked, in the first, the middle and the last row.
_CHECKED = 8


class Pool:
    """The cache of one layer, full of random keys and values. Blocks are allocated in a random
    order; rows share blocks if there are too few."""

    def __init__(
        self, bench: Bench, model: Model, num_blocks: int, context: int, kept: torch.dtype
    ) -> None:
        """context: the longest row; kept: the type of keys and values."""
        own = bench.device.attention(
            model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim**-0.5
        )
        assert isinstance(own, TritonAttention)
        self.attention, self._bench, self._model = own, bench, model
        size = own.block_size
        shape = CacheShape(1, model.num_kv_heads, model.head_dim, size, kept)
        self.token_bytes = shape.block_bytes // size
        """Key and value of one token."""
        room = int(_CACHE_SHARE * bench.free_bytes()) // shape.block_bytes
        num_blocks = max(-(-context // size), min(num_blocks, room))
        own.allocate(shape, num_blocks)
        assert own.cache is not None
        self.cache = own.cache
        for part in torch.split(self.cache.flatten(0, 2), _FILLED):
            part.copy_(bench.random(*part.shape))
        self._order = torch.randperm(num_blocks, device=bench.torch_device)
        half = torch.arange(model.head_dim // 2, device=bench.torch_device) * (-2 / model.head_dim)
        turn = torch.arange(context, device=bench.torch_device)[:, None] * 500000.0**half
        self.angles = torch.stack((turn.cos(), turn.sin()), dim=1)
        """[context, 2, head_dim / 2], float32."""

    def num_copies(self, rows: int, context: int) -> int:
        """How many disjoint batches of that size fit, so that the GPU's cache holds none of them;
        at least one."""
        width = -(-context // self.attention.block_size)
        wanted = self._bench.copies(rows * context * self.token_bytes)
        return max(1, min(wanted, len(self._order) // (rows * width)))

    def sharing(self, rows: int, context: int) -> float:
        """The average number of rows per block; 1: no block is shared."""
        width = -(-context // self.attention.block_size)
        return max(1.0, rows * width / len(self._order))

    def batch(self, rows: int, context: int, length: int, copy: int) -> ForwardBatch:
        """Rows of `context` tokens, of which the last `length` are computed."""
        size, device = self.attention.block_size, self._bench.torch_device
        width = -(-context // size)
        taken = torch.arange(rows * width, device=device) + copy * rows * width
        tables = self._order[taken % len(self._order)].view(rows, width)
        position = torch.arange(context - length, context, device=device)
        return ForwardBatch(
            input_ids=torch.zeros(rows * length, dtype=torch.int64, device=device),
            positions=position.repeat(rows),
            rope_lens=None,
            slots=(tables[:, position // size] * size + position % size).flatten(),
            block_tables=tables,
            context_lens=torch.full((rows,), context, device=device),
            cu_seqlens_q=tuple(range(0, rows * length + 1, length)),
            host_context_lens=(context,) * rows,
            logits_indices=None,
            is_decode=length == 1,
        )

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """The attention's own view of a batch."""
        return self.attention.plan(batch, Angles(self.angles, batch.positions))

    def attend(self, heads: Tensor, plan: TritonPlan) -> Tensor:
        """The work of a layer: rotate and store heads, then attend."""
        return self.attention.forward(heads, 0, None, True, plan)

    def heads(self, tokens: int) -> Tensor:
        """Random queries, keys and values of tokens."""
        own = self._model
        return self._bench.random(tokens, own.num_heads + 2 * own.num_kv_heads, own.head_dim)

    def error(self, rows: int, context: int, length: int) -> dict[str, float]:
        """The error of one pass against float64, in some rows, queries and heads."""
        batch, own = self.batch(rows, context, length, 0), self._model
        heads = self.heads(rows * length)
        before = heads.clone()
        found = self.attend(heads, self.plan(batch)).view(rows, length, own.num_heads, own.head_dim)
        offsets = torch.linspace(0, length - 1, min(length, _CHECKED)).long().to(found.device)
        group = own.num_heads // own.num_kv_heads
        answers, wanted = [], []
        for row in sorted({0, rows // 2, rows - 1}):
            for kv_head in sorted({0, own.num_kv_heads - 1}):
                some = slice(kv_head * group, (kv_head + 1) * group)
                query = before.view(rows, length, *before.shape[1:])[row, offsets, some]
                at = context - length + offsets
                wanted.append(self._definition(query, at, batch.block_tables[row], kv_head))
                answers.append(found[row, offsets, some])
        return error_of(torch.cat(answers), torch.cat(wanted))

    def _definition(self, query: Tensor, at: Tensor, table: Tensor, kv_head: int) -> Tensor:
        """Queries [Q, G, head_dim], not rotated yet, at positions `at` [Q], over one KV head of a
        row, in float64."""
        size, last = self.attention.block_size, int(at.max())
        token = torch.arange(last + 1, device=at.device)
        slots = table[token // size] * size + token % size
        kept = self.cache[0].view(torch.uint8)[:, slots, kv_head]
        keys, values = kept.view(self.cache.dtype).double()
        turned = rotated(query.double(), self.angles.double()[at])
        scores = torch.einsum("qgd,kd->qgk", turned, keys) * self._model.head_dim**-0.5
        hidden = token[None, :] > at[:, None]
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(2)
        return torch.einsum("qgk,kd->qgd", weights, values)


def rotated(values: Tensor, angles: Tensor) -> Tensor:
    """values [T, heads, head_dim] by angles [T, 2, head_dim / 2]."""
    cosine, sine = angles[:, None, 0], angles[:, None, 1]
    left, right = values.chunk(2, dim=2)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=2)


def decode(bench: Bench) -> None:
    """One token a row: every key and value is read once."""
    all_rows = bench.sizes((1, 8, 32, 128, 256), (1, 2))
    contexts = bench.sizes((512, 4096, 32768), (20, 70))
    for model in bench.models:
        _decode_all(bench, model, model.name, all_rows, contexts, bench.dtype)
        for name, kept in cache_dtypes(bench).items():
            some = bench.sizes((1, 32, 128), (2,)), bench.sizes((4096, 32768), (70,))
            _decode_all(bench, model, f"{model.name} {name}", *some, kept)


def cache_dtypes(bench: Bench) -> dict[str, torch.dtype]:
    """The types of --kv-cache-dtype other than 16 bits that the GPU supports."""
    return {
        name: kept
        for name, kept in bench.device.cache_dtypes.items()
        if bench.is_dry or FIRST_WITH_CACHE[name] <= bench.device.capability
    }


def _decode_all(
    bench: Bench,
    model: Model,
    name: str,
    all_rows: Sequence[int],
    contexts: Sequence[int],
    kept: torch.dtype,
) -> None:
    """Measures with one cache, which is freed at the end."""
    blocks = max(all_rows) * max(contexts) // 16 + 1
    make = partial(Pool, bench, model, blocks, max(contexts), kept)
    pool = bench.prepare(f"{name} cache", make)
    if pool is None:
        return
    for context in contexts:
        for rows in all_rows:
            work = partial(_decode, bench, pool, rows, context)
            bench.measure(f"{name} {rows} x {context}", work, is_own=True)


def _decode(bench: Bench, pool: Pool, rows: int, context: int) -> Figures:
    error = pool.error(rows, context, 1)
    copies = pool.num_copies(rows, context)
    plans = [pool.plan(pool.batch(rows, context, 1, copy)) for copy in range(copies)]
    heads = pool.heads(rows)
    us = bench.device_us(lambda copy: pool.attend(heads, plans[copy]), copies)
    found = bench.moved(us, rows * context * pool.token_bytes) | error
    sharing = pool.sharing(rows, context)
    return found | ({"rows_share_blocks": sharing} if sharing > 1 else {})


def prefill(bench: Bench) -> None:
    """Several tokens per row: half of the products of a causal square, and its context."""
    cases = ((1, 512, 512), (1, 4096, 4096), (1, 32768, 32768), (8, 4096, 4096), (1, 8704, 512))
    for model in bench.models:
        for rows, context, length in ((1, 24, 24), (2, 40, 5)) if bench.is_dry else cases:
            behind = f" behind {context - length}" if length < context else ""
            work = partial(_prefill, bench, model, rows, context, length, bench.dtype)
            bench.measure(f"{model.name} {rows} x {length}{behind}", work, is_own=True)
        for name, kept in cache_dtypes(bench).items():
            rows, length = bench.size(8, 1), bench.size(4096, 24)
            work = partial(_prefill, bench, model, rows, length, length, kept)
            bench.measure(f"{model.name} {name} {rows} x {length}", work, is_own=True)


def _prefill(
    bench: Bench, model: Model, rows: int, context: int, length: int, kept: torch.dtype
) -> Figures:
    pool = Pool(bench, model, rows * -(-context // 16), context, kept)
    error = pool.error(rows, context, length)
    plan, heads = pool.plan(pool.batch(rows, context, length, 0)), pool.heads(rows * length)
    us = bench.device_us(lambda _: pool.attend(heads, plan), budget_s=0.2)
    return bench.computed(us, causal_flop(model, rows, context, length)) | error


def causal_flop(model: Model, rows: int, context: int, length: int) -> float:
    """The operations of the visible scores and of their values."""
    seen = length * (context - length) + length * length / 2
    return 4.0 * rows * model.num_heads * model.head_dim * seen
