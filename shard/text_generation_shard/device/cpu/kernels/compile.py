"""Compiling every kernel before the first request needs one."""

import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import torch
from numba import int8, int64, njit, typeof, uint8
from numba.core import config

from text_generation_shard.device.cpu.kernels import (
    are_vectors_wide,
    attention,
    bfloat12,
    cache,
    choice,
    exchange,
    layers,
    rank_steps,
)
from text_generation_shard.device.cpu.kernels.children import Children
from text_generation_shard.device.cpu.kernels.grouped_linear import multiply_grouped
from text_generation_shard.device.cpu.kernels.linear import multiply, weights_marker
from text_generation_shard.device.cpu.kernels.pointwise import NORM, normalize
from text_generation_shard.device.cpu.kernels.product import PRODUCT
from text_generation_shard.device.cpu.kernels.steps import compute_item
from text_generation_shard.device.cpu.kernels.vector import BFLOAT12, marker

logger = logging.getLogger(__name__)

# Reading what was compiled before takes less.
_COMPILED_S = 2.0
# What a process that compiles takes beside what it shares with the one that started it.
_CHILD_BYTES = 256 * 2**20
# Of more there is too little to do.
_MOST_CHILDREN = 4
# No kernel takes so long to compile, even with a tenth of a core.
_PATIENCE_S = 120.0


class Kernel(NamedTuple):
    """A function, and the arguments it is compiled for."""

    function: Any
    signatures: list[tuple[Any, ...]]

    def compile(self) -> None:
        """Or read it from the cache. OSError if it is compiled, and could not be kept."""
        failure: OSError | None = None
        for signature in self.signatures:
            try:
                self.function.compile(signature)
            except OSError as error:  # numba writes it down when it is in use already
                failure = error
        if failure is not None:
            raise failure


class Wanted(NamedTuple):
    """Which kernels a model runs."""

    # Of rows and of weights.
    dtype: torch.dtype
    quantize: str | None
    # See `layers.codes`.
    has_parts: bool = False
    has_ranks: bool = False

    @property
    def name(self) -> str:
        """Of what the cache is filled with."""
        parts = "-parts" if self.has_parts else ""
        return f"{self.dtype}-{self.quantize}{parts}{'-ranks' if self.has_ranks else ''}"


def prepare(wanted: Wanted, num_threads: int, free_bytes: int) -> None:
    """Have every kernel ready; those that the calling thread starts use so many threads, or as many
    as the process has cores if that is less. free_bytes: memory that processes may take which help
    compiling."""
    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    # Processes are copied there, which those that have threads for kernels survive as copies only.
    seconds = compile_all(wanted, num_threads, free_bytes)
    numba.set_num_threads(num_threads)
    if seconds > _COMPILED_S:
        logger.info(
            "compiled the kernels for this processor in %.0f s; they are kept for the next start",
            seconds,
        )


def compile_all(wanted: Wanted, num_processes: int, free_bytes: int) -> float:
    """Compile what models of this type run, or read it from the cache of an earlier start (numba's,
    beside the source or in NUMBA_CACHE_DIR). Returns the seconds it took.

    The first time on a machine other processes help, as many as asked for, if there is memory.
    """
    start = time.monotonic()
    kernels = list(_kernels(wanted))
    count = min(num_processes, _MOST_CHILDREN, free_bytes // _CHILD_BYTES)
    try:
        with cache.filling(wanted.name) as is_empty:
            if is_empty:
                logger.info("compiling the kernels for this processor, once")
            if is_empty and count > 1:
                _fill_cache(kernels, count)
            _compile(kernels)
    except OSError as error:
        logger.warning(
            "compiled kernels can not be kept in %s: %s; they are compiled at each start: make "
            "room there or set NUMBA_CACHE_DIR to another directory",
            *(config.CACHE_DIR, error.strerror),
        )
    return time.monotonic() - start


def _compile(kernels: list[Kernel]) -> None:
    """Raises OSError when all are compiled, if one of them could not be kept."""
    failure: OSError | None = None
    for kernel in kernels:
        try:
            kernel.compile()
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def _fill_cache(kernels: list[Kernel], count: int) -> None:
    # What numba does before it can compile anything, the children need not do again.
    njit(_nothing).compile(())
    with Children([kernel.compile for kernel in kernels], count, _PATIENCE_S) as children:
        children.wait()


def _nothing() -> None:
    pass


def _kernels(models: Wanted) -> Iterator[Kernel]:
    """What takes longest first. A function in all its forms is one kernel: numba's cache has one
    index of them, which two processes must not write at the same time."""
    yield Kernel(choice.choose_one, [choice.TAKEN])
    kind = typeof(marker(models.dtype))
    quantize = models.quantize
    forms = {"int8": int8, "int4": uint8} if are_vectors_wide() else {}
    plain = typeof(weights_marker(models.dtype))
    weight_kind = plain if quantize is None else forms.get(quantize, plain)
    # Some weights are not quantised, and of a model in 4 bits some have 8.
    weight_kinds = dict.fromkeys((weight_kind, plain, *(() if quantize is None else (int8,))))
    signatures: dict[Any, dict[tuple[Any, ...], None]] = {}
    for form in weight_kinds:
        # Others are sums in parts of few models; these compile when they are loaded.
        has_parts = models.has_parts and form == weight_kind
        own = layers.kernels(form, kind, has_parts).values()
        for function, signature in (*own, _product(form, kind)):
            signatures.setdefault(function, {})[signature] = None
    # Of what a model of several kinds of weights runs instead, all else is compiled by the passes
    # that warm it up.
    signatures[normalize] = {(kind, NORM, int64): None}
    # The head's weights are quantised to 8 bits or not at all.
    kinds = weight_kind, int8 if weight_kind == uint8 else weight_kind, kind
    yield Kernel(layers.run_layers, [layers.signature(*kinds)])
    for function, wanted in signatures.items():
        yield Kernel(function, list(wanted))
    item = layers.signature_of_item(*kinds)
    yield Kernel(compute_item, [item])
    if models.has_ranks:
        yield Kernel(rank_steps.compute_rank_item, [item])
        yield Kernel(rank_steps.write_rank_phases, [item[:2]])
        for function in (exchange.exchange_word, exchange.give_up_message):
            yield Kernel(function, [(exchange.EXCHANGES, int64)])
    if plain == typeof(BFLOAT12):
        yield Kernel(bfloat12.narrow_panels, [(bfloat12.PANELS, int64)])
        yield Kernel(bfloat12.list_exceptions, [(bfloat12.PANELS, int64)])
    yield Kernel(choice.choose_many, [(int64, choice.TAKEN[0])])
    yield Kernel(attention.plan_rows, [attention.PLANNED])


def _product(weight_kind: Any, kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What multiplies with such weights outside the layers, and what it takes."""
    if weight_kind == uint8:
        return multiply_grouped, (int64, PRODUCT)
    return multiply, (int64, weight_kind, kind, PRODUCT)
