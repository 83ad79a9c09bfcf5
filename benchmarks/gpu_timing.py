"""How the GPU benchmark measures: sizes, times on the device and on the host, one record a figure.

Runs in the child process of gpu.py, which alone imports torch.
"""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from text_generation_shard.device.base import DeviceOptions
from text_generation_shard.device.cuda.operators import TritonDevice
from torch import Tensor

# What the parent reads; every other line of a child's output is somebody else's.
MARK = "@gpu "
# Relative error that a result in bfloat16 may have.
ERROR_BOUND = 1e-2
# This number of bytes is walked through before the same ones come again: several times the cache of
# an H100 (50 MB), so that reads come from memory.
_WALKED_BYTES = 300e6
_MOST_COPIES = 64
# A CUDA graph that is timed computes at least so long.
_GRAPH_US = 1000.0
Figures = Mapping[str, float | str]
Made = TypeVar("Made")


class Model(NamedTuple):
    """Sizes of a model of Llama's shape."""

    name: str
    hidden: int
    inter: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def token_bytes(self) -> int:
        """Key and value of one token in one layer, in bfloat16."""
        return 2 * 2 * self.num_kv_heads * self.head_dim


class Limits(NamedTuple):
    """What the GPU was seen to reach: GB/s read; GB/s copied, reads and writes counted; TFLOP/s of
    a product in bfloat16. 0: not measured."""

    read_gb_s: float = 0.0
    copy_gb_s: float = 0.0
    matrix_tflop_s: float = 0.0


MODELS = (
    Model("8B", 4096, 14336, 32, 8, 128, 128256),
    Model("1B", 2048, 8192, 32, 8, 64, 128256),
)
TINY_MODELS = (Model("tiny", 64, 96, 4, 2, 16, 320),)


class DeviceLostError(BaseException):
    """The device answers nothing any more. No Exception: a measurement must not take it for its
    own refusal."""


class Bench:
    """One run in one process. Owns the device, what is known of its limits, the time that is left
    to the present section, and how figures are said to the parent."""

    def __init__(self, is_dry: bool, limits: Limits) -> None:
        self.is_dry, self.limits = is_dry, limits
        self.dtype = torch.bfloat16
        self.models = TINY_MODELS if is_dry else MODELS
        self.section, self._until = "", math.inf
        torch.manual_seed(0)
        options = DeviceOptions("bfloat16", "bfloat16")
        if is_dry:
            # Threads wait for each other, where others compute beside them.
            torch.set_num_threads(1)
            self.device = TritonDevice(torch.device("cpu"), self.dtype, options)
        else:
            from text_generation_shard.device.cuda.gpu import CudaDevice

            self.device = CudaDevice(torch.device("cuda"), self.dtype, options)
        self.torch_device = self.device.torch_device

    def begin(self, section: str, seconds: float) -> None:
        """Say that a section begins; it may take so long."""
        self.section, self._until = section, time.monotonic() + seconds
        self.say({"begins": section, "seconds": seconds})

    def end(self) -> None:
        """Say that the section is done, and give its memory back."""
        self._wait_or_die()
        self.release()
        self.say({"ended": self.section})

    def left_s(self) -> float:
        """Seconds that the section still has."""
        return self._until - time.monotonic()

    def release(self) -> None:
        """Give the device back the memory that is not used any more."""
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def say(self, message: Mapping[str, object]) -> None:
        """One line for the parent."""
        print(MARK + json.dumps(message), flush=True)

    def measure(self, name: str, work: Callable[[], Figures], is_own: bool = False) -> None:
        """Record what `work` answers, or what it raises: its refusal. is_own: one of our own
        kernels is measured, whose refusal is a failure."""
        if self.left_s() < 0:
            self.leave_out(name, "the section had no time left for it")
        elif (figures := self._attempt(name, work, is_own)) is not None:
            self.note(name, figures)

    def prepare(self, name: str, make: Callable[[], Made]) -> Made | None:
        """What several measurements of our own kernels need; None: recorded as refused."""
        return self._attempt(name, make, True)

    def _attempt(self, name: str, work: Callable[[], Made], is_own: bool) -> Made | None:
        try:
            made = work()
            self.wait()
            return made
        except Exception as error:
            sentence = _shortened(" ".join(f"{type(error).__name__}: {error}".split()))
        self.note(name, {"refused": sentence} | ({"is_own": "yes"} if is_own else {}))
        self._wait_or_die()
        return None

    def note(self, name: str, figures: Figures) -> None:
        """Record figures."""
        written = {key: _written(value) for key, value in figures.items()}
        self.say({"record": {"section": self.section, "name": name, **written}})

    def leave_out(self, name: str, reason: str) -> None:
        """Record why something is not measured."""
        self.note(name, {"left_out": reason})

    def wait(self) -> None:
        """Until all that was launched is computed."""
        self.device.stream.mark().synchronize()

    def _wait_or_die(self) -> None:
        try:
            self.wait()
        except Exception as error:
            raise DeviceLostError(f"the device is unusable: {error}") from error

    def size(self, full: int, tiny: int) -> int:
        """A size on a GPU, and in a dry run."""
        return tiny if self.is_dry else full

    def sizes(self, full: Sequence[int], tiny: Sequence[int]) -> Sequence[int]:
        """Sizes on a GPU, and in a dry run."""
        return tiny if self.is_dry else full

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normally distributed numbers, made where they lie."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.torch_device)
        return out.normal_().mul_(scale)

    def copies(self, nbytes: float) -> int:
        """How many copies of an operand of `nbytes` the cache of the GPU does not hold."""
        return self.size(max(1, min(_MOST_COPIES, math.ceil(_WALKED_BYTES / nbytes))), 2)

    def free_bytes(self) -> int:
        """Memory of the device that is free, when torch has given back what it keeps."""
        if self.is_dry:
            return 2**24
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def device_us(
        self, call: Callable[[int], object], copies: int = 1, budget_s: float = 0.05
    ) -> float:
        """Median µs of call(i), i < copies, one after another in a CUDA graph: nothing of the host
        is in it. On a CPU the time of one call."""
        if self.is_dry:
            return _seconds(lambda: call(0)) * 1e6
        for number in range(3):
            call(number % copies)
        self.wait()
        begun = time.perf_counter()
        call(0)
        self.wait()
        one_us = (time.perf_counter() - begun) * 1e6
        num_calls = max(copies, min(100, math.ceil(_GRAPH_US / one_us)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(num_calls):
                call(number % copies)
        return self.event_us(graph.replay, budget_s) / num_calls

    def event_us(self, call: Callable[[], object], budget_s: float = 0.05) -> float:
        """Median µs between two events around a call, behind a call of the same."""
        if self.is_dry:
            return _seconds(call) * 1e6
        call()
        self.wait()
        make_event: Any = torch.cuda.Event
        times: list[float] = []
        until = time.perf_counter() + budget_s
        while len(times) < 3 or (time.perf_counter() < until and len(times) < 100):
            first, last = make_event(enable_timing=True), make_event(enable_timing=True)
            call()
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3)
        return statistics.median(times)

    def host_us(self, call: Callable[[], object], times: int = 500) -> float:
        """µs of the host for each of many calls that are not waited for."""
        call()
        self.wait()
        times = self.size(times, 2)
        took = _seconds(lambda: [call() for _ in range(times)])
        self.wait()
        return took / times * 1e6

    def moved(self, us: float, nbytes: float) -> dict[str, float]:
        """Figures of a kernel that `nbytes` must pass: its share of the read bandwidth."""
        rate = nbytes / us / 1e3
        found = {"us": us, "gb_s": rate}
        if self.limits.read_gb_s:
            found["share"] = rate / self.limits.read_gb_s
        if self.limits.copy_gb_s:
            found["of_copy"] = rate / self.limits.copy_gb_s
        return found

    def computed(self, us: float, flop: float) -> dict[str, float]:
        """Figures of a kernel of `flop` operations: its share of the matrix rate."""
        rate = flop / us / 1e6
        found = {"us": us, "tflop_s": rate}
        if self.limits.matrix_tflop_s:
            found["share"] = rate / self.limits.matrix_tflop_s
        return found


def error_of(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Norm of the difference to `wanted` (float64) beside the norm of that, and its bound."""
    wanted = wanted.double()
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    return {"error": error, "bound": ERROR_BOUND}


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _shortened(sentence: str) -> str:
    """Its beginning and its end: what a server said last is why it ended."""
    return sentence if len(sentence) <= 300 else f"{sentence[:120]} … {sentence[-180:]}"


def _written(value: float | str) -> float | str:
    """As JSON can hold it."""
    return value if isinstance(value, str) or math.isfinite(value) else str(value)
