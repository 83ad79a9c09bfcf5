"""torch's own attention: which backends support a call, their time and memory. An unsupported call
is recorded as refused, with torch's own message."""

import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_attention import causal_flop
from gpu_timing import Bench, Figures, Model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "torch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Case(NamedTuple):
    """Rows of `context` tokens, the last `length` of which attend."""

    rows: int
    length: int
    context: int


CASES = (Case(4, 2048, 2048), Case(1, 8192, 8192), Case(1, 512, 8704), Case(32, 1, 4096))
TINY_CASES = (Case(2, 20, 20), Case(1, 5, 20), Case(2, 1, 20))
# Where in torch's source a warning comes from.
_PLACE = re.compile(r"\(Triggered internally at .*\)")
# How keys and values of fewer heads are passed.
_GIVEN = {"grouped": True, "repeated": False}


def torch_attention(bench: Bench) -> None:
    """Every backend with every case, and the attention over ragged rows."""
    for model in bench.models:
        for case in TINY_CASES if bench.is_dry else CASES:
            behind = f" behind {case.context - case.length}" if case.length < case.context else ""
            name = f"{model.name} {case.rows} x {case.length}{behind}"
            for backend in BACKENDS:
                for given, is_grouped in _GIVEN.items():
                    work = partial(_backend, bench, model, case, backend, is_grouped)
                    bench.measure(f"{name}, {backend}, {given}", work)
            bench.measure(f"{name}, varlen_attn", partial(_varlen, bench, model, case))


def _backend(bench: Bench, model: Model, case: Case, backend: str, is_grouped: bool) -> Figures:
    kind = BACKENDS[backend]
    chosen: AbstractContextManager[Any] = nullcontext() if kind is None else sdpa_kernel(kind)
    with chosen, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return _figures(bench, model, case, _call(bench, model, case, is_grouped))
        except RuntimeError as error:
            # torch says why in warnings.
            reasons = dict.fromkeys(_PLACE.sub("", str(one.message)).strip() for one in said)
            raise RuntimeError(" ".join(reasons) or str(error)) from error


def _call(bench: Bench, model: Model, case: Case, is_grouped: bool) -> Callable[[], Tensor]:
    sizes = (case.rows, model.num_kv_heads, case.context, model.head_dim)
    query = bench.random(case.rows, model.num_heads, case.length, model.head_dim)
    key, value = bench.random(*sizes), bench.random(*sizes)
    if not is_grouped:
        group = model.num_heads // model.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    # One token sees all tokens, and a whole prompt is causal: neither needs a mask.
    mask, is_whole = None, case.length == case.context
    if not is_whole and case.length > 1:
        at = torch.arange(case.context, device=query.device)
        mask = at[None, :] <= at[-case.length :, None]

    def call() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_whole, enable_gqa=is_grouped
        )

    return call


def _varlen(bench: Bench, model: Model, case: Case) -> Figures:
    from torch.nn.attention.varlen import varlen_attn

    # Its options differ from one version of torch to the next.
    ask: Any = varlen_attn
    taken, options = inspect.signature(ask).parameters, dict[str, object]()
    if "enable_gqa" in taken:
        options["enable_gqa"] = True
    if "window_size" in taken:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    query = bench.random(case.rows * case.length, model.num_heads, model.head_dim)
    sizes = (case.rows * case.context, model.num_kv_heads, model.head_dim)
    key, value = bench.random(*sizes), bench.random(*sizes)
    rows = torch.arange(case.rows + 1, dtype=torch.int32, device=query.device)
    starts = rows * case.length, rows * case.context

    def call() -> Tensor:
        out: Tensor = ask(query, key, value, *starts, case.length, case.context, **options)
        return out

    return _figures(bench, model, case, call)


def _figures(bench: Bench, model: Model, case: Case, call: Callable[[], Tensor]) -> Figures:
    """The times, and the call's memory in addition to its operands."""
    taken: dict[str, float] = {}
    if not bench.is_dry:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        bench.wait()
        taken["more_mb"] = (torch.cuda.max_memory_allocated() - held) / 1e6
    us = bench.event_us(call, 0.02)
    if case.length == 1:
        return bench.moved(us, case.rows * case.context * model.token_bytes) | taken
    return bench.computed(us, causal_flop(model, case.rows, case.context, case.length)) | taken
