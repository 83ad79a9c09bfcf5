"""Compiles all kernels before the first request."""

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numba
import torch
from numba import int8, int64, njit, typeof, uint8
from numba.core import config

from text_generation_shard.device.cpu.kernels import (
    are_vectors_wide,
    bfloat12,
    cache,
    choice,
    exchange,
    layers,
)
from text_generation_shard.device.cpu.kernels.multiply import multiply, sum_inputs
from text_generation_shard.device.cpu.kernels.pointwise import Norm
from text_generation_shard.device.cpu.kernels.steps import compute_item
from text_generation_shard.device.cpu.kernels.thread_pool import (
    all_signature,
    compute_all,
    item_signature,
)
from text_generation_shard.device.cpu.kernels.tile import PRODUCT
from text_generation_shard.device.cpu.kernels.vector import BFLOAT12, marker, weights_marker

logger = logging.getLogger(__name__)


def do_in_children(jobs: Sequence[Callable[[], object]], count: int, patience_s: float) -> None:
    """Do at most 256 jobs in `count` child processes: each job once, in order, while the children
    live. Returns after `patience_s` at the latest; then no child is left. A job is not done if its
    child fails, is killed or hangs. Call it while no other thread of this process computes."""
    todo, into_todo = os.pipe()
    os.write(into_todo, bytes(range(len(jobs))))
    os.close(into_todo)
    fork = multiprocessing.get_context("fork")
    children, deadline = [], time.monotonic() + patience_s
    try:
        # With too little memory or too many processes, fewer children do all jobs.
        with suppress(OSError), warnings.catch_warnings():
            # Python warns about forking with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(count):
                child = fork.Process(target=_do_jobs, args=(jobs, todo, os.getpid()))
                child.start()
                children.append(child)
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
    finally:
        os.close(todo)
        for child in children:
            child.kill()
            child.join()


def _do_jobs(jobs: Sequence[Callable[[], object]], todo: int, parent: int) -> None:
    """Do jobs until none is left. Ends if the parent is killed. An error is raised again when the
    parent does the job."""
    with suppress(Exception):
        while os.getppid() == parent and (number := os.read(todo, 1)):
            jobs[number[0]]()


# Loading cached kernels takes less.
_COMPILED_S = 2.0
# Memory of a compiling child process that it does not share with its parent.
_CHILD_BYTES = 256 * 2**20
# More child processes have too few jobs.
_MOST_CHILDREN = 4
# Longer than the kernels take to compile on a slow machine.
_PATIENCE_S = 300.0


Kernels = dict[Any, list[tuple[Any, ...]]]
"""By function: the signatures to compile it for. A function with all its signatures is one job:
numba's cache has one index per function, which two processes must not write at the same time."""


class Wanted(NamedTuple):
    """The kernels that a model needs."""

    # Dtype of rows, and quantization of weights.
    dtype: torch.dtype
    quantize: str | None
    # See `layers.codes`.
    has_ranks: bool = False

    @property
    def name(self) -> str:
        """The content name for `cache.filling`."""
        return f"{self.dtype}-{self.quantize}{'-ranks' if self.has_ranks else ''}"


def prepare(wanted: Wanted, num_threads: int, free_bytes: int) -> None:
    """Compile all kernels, or load them from the cache; then set the number of threads for kernels
    that this thread runs: `num_threads`, at most numba's thread count.

    If the cache is empty, as many child processes help, as far as `free_bytes` of memory allow.
    """
    start, num_threads = time.monotonic(), min(num_threads, config.NUMBA_NUM_THREADS)
    kernels = _kernels(wanted)
    count = min(num_threads, _MOST_CHILDREN, free_bytes // _CHILD_BYTES)
    try:
        with cache.filling(wanted.name) as is_empty:
            if is_empty:
                logger.info("compiling the kernels for this processor (first start only)")
            if is_empty and count > 1:
                _fill_cache(kernels, count)
            _compile(kernels)
    except OSError as error:
        logger.warning(
            "compiled kernels can not be cached in %s: %s; every start compiles them again: make "
            "room there or set NUMBA_CACHE_DIR to another directory",
            config.CACHE_DIR,
            error.strerror,
        )
    # Last, because children of a process with kernel threads can not run kernels.
    numba.set_num_threads(num_threads)
    if (seconds := time.monotonic() - start) > _COMPILED_S:
        logger.info(
            "compiled the kernels for this processor in %.0f s; they are cached for the next start",
            seconds,
        )


def _compile(kernels: Kernels) -> None:
    """Raises OSError after compiling all kernels, if one could not be cached."""
    failure: OSError | None = None
    for function, signatures in kernels.items():
        for signature in signatures:
            try:
                function.compile(signature)
            except OSError as error:  # numba saves the code after it is ready for use
                failure = error
    if failure is not None:
        raise failure


def _fill_cache(kernels: Kernels, count: int) -> None:
    # Initialize numba's compiler once, so that the children share it.
    njit(_nothing).compile(())
    jobs = [partial(_compile, {function: kernels[function]}) for function in kernels]
    do_in_children(jobs, count, _PATIENCE_S)


def _nothing() -> None:
    pass


def _kernels(models: Wanted) -> Kernels:
    """Slowest to compile first."""
    kind = typeof(marker(models.dtype))
    quantize = models.quantize
    forms = {"int8": int8, "int4": uint8} if are_vectors_wide() else {}
    plain = typeof(weights_marker(models.dtype))
    weight_kind = plain if quantize is None else forms.get(quantize, plain)
    # The head is int8 or not quantized.
    kinds = weight_kind, int8 if weight_kind == uint8 else weight_kind, kind
    item = layers.signature_of_item(*kinds)
    found: Kernels = {
        choice.choose_one: [choice.TAKEN],
        layers.run_layers: [layers.signature(*kinds)],
    }
    # Some weights are not quantized, and an int4 model has some int8 weights.
    for form in dict.fromkeys((weight_kind, plain, *(() if quantize is None else (int8,)))):
        product = multiply, (int64, form, kind, PRODUCT)
        for function, signature in (*layers.kernels(form, kind).values(), product):
            known = found.setdefault(function, [])
            if signature not in known:
                known.append(signature)
    # For a model with several kinds of weights; the warm-up passes compile its other kernels.
    taken = [choice.TAKEN[0], item_signature(Norm, kind)[0]]
    if models.has_ranks:
        for function in (exchange.exchange_word, exchange.abort_message):
            found[function] = [(exchange.EXCHANGES, int64)]
    if plain == typeof(BFLOAT12):
        for function in (bfloat12.narrow_panel, bfloat12.list_exceptions):
            found[function] = [(bfloat12.PANELS, int64)]
        taken.append(bfloat12.PANELS)
    if weight_kind == uint8:
        found[sum_inputs] = [(PRODUCT,)]
    found |= {compute_item: [item], compute_all: [all_signature(given) for given in taken]}
    found[layers.plan_rows] = [layers.PLANNED]
    return found
