"""The limits of the GPU: bandwidth, matrix rate, cost of a launch, products of cuBLAS."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from gpu_read import sum_tiles
from gpu_timing import Bench, Figures, Limits, Model
from text_generation_shard.device.cuda import attention
from text_generation_shard.device.cuda.kernels import launch, layers
from torch import Tensor

_TILE, _TILES = 4096, 16
# The names of a tile's numbers.
_KINDS = tuple(
    f"{name} ({', '.join(kind._fields)})"
    for name, kind in (("decode", attention.DecodeTile), ("prefill", attention.PrefillTile))
)


def limits(bench: Bench) -> None:
    """Bandwidth of reads and copies, and the rate of products: the base of all shares."""
    found = {"read_gb_s": 0.0, "copy_gb_s": 0.0, "matrix_tflop_s": 0.0}
    _bandwidth(bench, found)
    bench.measure("product in bfloat16", partial(_matrix_rate, bench, found))
    bench.limits = Limits(**found)
    bench.say({"limits": found})


def _bandwidth(bench: Bench, found: dict[str, float]) -> None:
    """Measures one limit; the best of its kind is kept in `found`."""
    values = bench.random(bench.size(2**31, 2**17))
    sums = torch.empty(len(values) // (_TILE * _TILES), dtype=torch.float32, device=values.device)
    half = values.view(2, -1)

    def read(_: int) -> None:
        options = {"TILE": _TILE, "TILES": _TILES, "num_warps": 8}
        launch(sum_tiles, (len(sums),), (values, sums), **options)

    ways: tuple[tuple[str, str, Callable[[int], object]], ...] = (
        ("read, a sum in Triton", "read_gb_s", read),
        ("read, torch's sum", "read_gb_s", lambda _: values.sum(dtype=torch.float32)),
        ("copy, reads and writes counted", "copy_gb_s", lambda _: half[1].copy_(half[0])),
        ("write, torch's fill", "", lambda _: values.fill_(1.5)),
    )

    def one(call: Callable[[int], object], kind: str) -> Figures:
        us = bench.device_us(call)
        rate = values.nbytes / us / 1e3
        if kind:
            found[kind] = max(found[kind], rate)
        return {"us": us, "gb_s": rate}

    for name, kind, call in ways:
        bench.measure(name, partial(one, call, kind))


def _matrix_rate(bench: Bench, found: dict[str, float]) -> Figures:
    size = bench.size(8192, 32)
    left, right = bench.random(size, size), bench.random(size, size)
    us = bench.device_us(lambda _: left @ right, budget_s=0.3)
    found["matrix_tflop_s"] = 2 * size**3 / us / 1e6
    return {"us": us, "tflop_s": found["matrix_tflop_s"], "size": size}


def table(bench: Bench) -> None:
    """Records the static table of tiles, by architecture and features of a head."""
    for capability in sorted({80, 89, 90, bench.device.capability}):
        for head_dim in (64, 128, 256):
            prefill = attention.prefill_tile(capability, head_dim, bench.dtype)
            own = attention.decode_tile(capability, head_dim), prefill
            said = {kind: str(tuple(tile)) for kind, tile in zip(_KINDS, own, strict=True)}
            bench.note(f"sm_{capability}, heads of {head_dim}", said)


def launches(bench: Bench) -> None:
    """The cost of a launch on the host, and of a kernel in a CUDA graph on the device."""
    one = torch.zeros(16, 16, dtype=bench.dtype, device=bench.torch_device)
    weight, out = one[0].float(), torch.empty_like(one)
    padded = triton.next_power_of_2(one.shape[1])

    def start(_: int = 0) -> None:
        options = {"SIZE": 16, "SIZE_PAD": padded, "EPS": 1e-5, "num_warps": 4}
        launch(layers.add_norm, (1,), (one, None, weight, out, 1.0), **options)

    calls: dict[str, Callable[[], object]] = {
        "Triton launch": start,
        "add_norm of the device": lambda: bench.device.add_norm(one, None, 1.0, weight, 1e-5),
        "torch operator": lambda: one.add_(1),
        "F.linear": lambda: F.linear(one, one),
    }
    for name, call in calls.items():
        bench.measure(name, partial(_host, bench, call))
    for num_kernels in (1, 100):
        name = f"graph with kernels: {num_kernels}"
        bench.measure(name, partial(_graph, bench, start, num_kernels))
    bench.measure("event recorded and waited for", partial(_event, bench, one))


def _host(bench: Bench, call: Callable[[], object]) -> Figures:
    return {"host_us": bench.host_us(call)}


def _graph(bench: Bench, start: Callable[[], None], count: int) -> Figures:
    """A graph of `count` kernels: host time of a replay, with and without waiting; device time."""
    if bench.is_dry:
        raise RuntimeError("there are no CUDA graphs on a CPU")
    start()
    bench.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            start()

    def replay_and_wait() -> None:
        graph.replay()
        bench.wait()

    return {
        "host_us": bench.host_us(graph.replay, 20),
        "with_wait_us": bench.host_us(replay_and_wait, 50),
        "us": bench.event_us(graph.replay) / count,
    }


def _event(bench: Bench, one: Tensor) -> Figures:
    if bench.is_dry:
        raise RuntimeError("there are no CUDA events on a CPU")
    make_event: Any = torch.cuda.Event
    event = make_event()

    def begin_and_wait() -> None:
        one.add_(1)
        event.record()
        event.synchronize()

    return {"host_us": bench.host_us(begin_and_wait, 300)}


def products(bench: Bench) -> None:
    """F.linear of a layer's weights for few rows, which is limited by reading the weights."""
    for model in bench.models:
        for name, (outputs, inputs) in weights_of(model).items():
            for rows in bench.sizes((1, 8, 32), (1, 2)):
                label = f"{model.name} {name}: {rows} x {inputs} x {outputs}"
                bench.measure(label, partial(_product, bench, rows, inputs, outputs))


def weights_of(model: Model) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each product of a layer, and of the head."""
    attended = model.num_heads * model.head_dim
    stacked = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return {
        "qkv": (stacked, model.hidden),
        "out": (model.hidden, attended),
        "gate_up": (2 * model.inter, model.hidden),
        "down": (model.hidden, model.inter),
        "head": (model.vocab, model.hidden),
    }


def _product(bench: Bench, rows: int, inputs: int, outputs: int) -> Figures:
    copies = bench.copies(outputs * inputs * 2)
    weights = [bench.random(outputs, inputs, scale=0.02) for _ in range(copies)]
    given = bench.random(rows, inputs)
    us = bench.device_us(lambda number: F.linear(given, weights[number]), copies, 0.02)
    return bench.moved(us, 2 * (outputs * inputs + rows * inputs + rows * outputs))
