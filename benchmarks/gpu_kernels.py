"""Our kernels other than products and attention: error against float64, share of the read
bandwidth.

A new kernel is an entry in `KERNELS` and a function that prepares it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gpu_attention import Pool, rotated
from gpu_timing import Bench, Figures, Model, error_of
from text_generation_process.sampling import Sampling
from text_generation_shard.device.base import Activation
from text_generation_shard.device.cuda import operators, sampler
from text_generation_shard.sampling import SamplingTable, TokenHistory, Watermark, sample
from torch import Tensor


class Case(NamedTuple):
    """One kernel, ready to launch."""

    # call(i), i < copies, uses the i-th copy of its operands.
    call: Callable[[int], object]
    copies: int
    # Bytes that must be read or written, each number once.
    nbytes: float
    # The error of the first copy against float64; called once, before the timing.
    error: Callable[[], dict[str, float]]


def add_norm(bench: Bench, model: Model, rows: int) -> Case:
    """The residual and the norm: hidden and delta are read, hidden and the result are written."""
    nbytes = 4 * rows * model.hidden * 2 + 4 * model.hidden
    copies = bench.copies(nbytes)
    hidden, delta = (bench.random(copies, rows, model.hidden) for _ in range(2))
    weight = bench.random(model.hidden, dtype=torch.float32)

    def call(copy: int) -> Tensor:
        return bench.device.add_norm(hidden[copy], delta[copy], 0.5, weight, 1e-5)

    def error() -> dict[str, float]:
        added = hidden[0].double() + 0.5 * delta[0].double()
        scale = torch.rsqrt(added.square().mean(1, keepdim=True) + 1e-5)
        return error_of(call(0), added * scale * weight.double())

    return Case(call, copies, nbytes, error)


def gate(bench: Bench, model: Model, rows: int) -> Case:
    """silu(gates) * others of a product: both are read, the result is written."""
    nbytes = 3 * rows * model.inter * 2
    copies = bench.copies(nbytes)
    both = bench.random(copies, rows, 2 * model.inter)

    def call(copy: int) -> Tensor:
        return operators.gate(Activation.SILU, both[copy])

    def error() -> dict[str, float]:
        gates, others = both[0].double().chunk(2, dim=1)
        return error_of(call(0), F.silu(gates) * others)

    return Case(call, copies, nbytes, error)


def rotate_and_store(bench: Bench, model: Model, rows: int) -> Case:
    """Rotates queries in place, stores keys and values in the cache: heads are read and written,
    angles read."""
    width = model.num_heads + 2 * model.num_kv_heads
    nbytes = rows * (2 * width * model.head_dim * 2 + model.head_dim * 4)
    copies = bench.copies(nbytes)
    pool = Pool(bench, model, copies * rows, 16, bench.dtype)
    heads = bench.random(copies, rows, width, model.head_dim)
    plans = [pool.plan(pool.batch(rows, 16, 1, copy)) for copy in range(copies)]
    keys, values = pool.cache[0]

    def call(copy: int) -> None:
        pool.attention.store(heads[copy], keys, values, True, plans[copy])

    def error() -> dict[str, float]:
        before, turned = heads[0].double(), model.num_heads + model.num_kv_heads
        angles = pool.angles.double()[plans[0].angles.rows]
        wanted = rotated(before[:, :turned], angles), before[:, turned:]
        call(0)
        slots = plans[0].slots
        found = heads[0, :, : model.num_heads], keys[slots], values[slots]
        return error_of(torch.cat(found, dim=1), torch.cat(wanted, dim=1))

    return Case(call, copies, nbytes, error)


def choose(bench: Bench, model: Model, rows: int, params: Sampling) -> Case:
    """Chooses a token for each row of scores; all scores are read. Sampling reads them several
    times and writes them. The error is that of the log-probabilities."""
    nbytes = rows * model.vocab * 4
    copies = bench.copies(nbytes)
    scores = bench.random(copies, rows, model.vocab, dtype=torch.float32, scale=4.0)
    table, places = SamplingTable(rows), np.arange(rows)
    for row in range(rows):
        table.set(row, dataclasses.replace(params, seed=row))
    columns = table.columns(places, bench.device.upload)
    lens = torch.ones(rows, dtype=torch.int64, device=bench.torch_device)

    def call(copy: int) -> Tensor:
        return sampler.choose(scores[copy], columns, lens)

    def error() -> dict[str, float]:
        ones, none = np.ones_like(places), np.empty(0, dtype=np.int64)
        known = np.zeros((rows, 2), dtype=np.int32)
        history = TokenHistory(known, places, ones, ones, 0 * ones)
        wanted = sample(scores[0].clone(), table, history, none, Watermark(0.5, 2.0))
        return error_of(call(0)[1].cpu(), torch.from_numpy(wanted.logprobs))

    return Case(call, copies, nbytes, error)


KERNELS: dict[str, Callable[[Bench, Model, int], Case]] = {
    "add_norm": add_norm,
    "gate": gate,
    "rotate_and_store": rotate_and_store,
    "best token": partial(choose, params=Sampling()),
    "draw": partial(choose, params=Sampling(do_sample=True)),
    "draw of top_p 0.9": partial(choose, params=Sampling(top_p=0.9)),
    "draw of top_k 50": partial(choose, params=Sampling(top_k=50)),
}


def kernels(bench: Bench) -> None:
    """Every kernel of the table, for decode and for a prompt."""
    for model in bench.models:
        for name, prepare in KERNELS.items():
            for rows in bench.sizes((1, 8, 32, 128, 256, 4096), (1, 2)):
                work = partial(_kernel, bench, model, prepare, rows)
                bench.measure(f"{model.name} {name}: {rows} rows", work, is_own=True)


def _kernel(
    bench: Bench, model: Model, prepare: Callable[[Bench, Model, int], Case], rows: int
) -> Figures:
    case = prepare(bench, model, rows)
    error = case.error()
    return bench.moved(bench.device_us(case.call, case.copies, 0.02), case.nbytes) | error
