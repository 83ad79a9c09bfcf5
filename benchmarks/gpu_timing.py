"""The measurements of the GPU benchmark: sizes, times on device and host, one record per figure.

Runs in the child process of gpu.py; only the child imports torch.
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

# The prefix of lines for the parent; libraries may print other lines.
MARK = "@gpu "
# The largest relative error of a result in bfloat16.
ERROR_BOUND = 1e-2
# Bytes between two reads of the same data: several times the cache of an H100 (50 MB), so that
# reads come from memory.
_WALKED_BYTES = 300e6
_MOST_COPIES = 64
# The least duration of a timed CUDA graph.
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
    """The measured limits: GB/s of reads; GB/s of copies, both directions; TFLOP/s of a product in
    bfloat16. 0: not measured."""

    read_gb_s: float = 0.0
    copy_gb_s: float = 0.0
    matrix_tflop_s: float = 0.0


MODELS = (
    Model("8B", 4096, 14336, 32, 8, 128, 128256),
    Model("1B", 2048, 8192, 32, 8, 64, 128256),
)
TINY_MODELS = (Model("tiny", 64, 96, 4, 2, 16, 320),)


class DeviceLostError(BaseException):
    """The device does not respond any more. Not an Exception, so that no measurement takes it for a
    refused call."""


class Bench:
    """One run in one process. Owns the device, its measured limits, the deadline of the section and
    the output to the parent."""

    def __init__(self, is_dry: bool, limits: Limits) -> None:
        self.is_dry, self.limits = is_dry, limits
        self.dtype = torch.bfloat16
        self.models = TINY_MODELS if is_dry else MODELS
        self.section, self._until = "", math.inf
        torch.manual_seed(0)
        options = DeviceOptions("bfloat16", "bfloat16")
        if is_dry:
            # More threads would wait for each other on a busy machine.
            torch.set_num_threads(1)
            self.device = TritonDevice(torch.device("cpu"), self.dtype, options)
        else:
            from text_generation_shard.device.cuda.operators import CudaDevice

            self.device = CudaDevice(torch.device("cuda"), self.dtype, options)
        self.torch_device = self.device.torch_device

    def begin(self, section: str, seconds: float) -> None:
        """Report the start of a section with this time limit."""
        self.section, self._until = section, time.monotonic() + seconds
        self.say({"begins": section, "seconds": seconds})

    def end(self) -> None:
        """Report the end of the section, and free its memory."""
        self._wait_or_die()
        self.release()
        self.say({"ended": self.section})

    def left_s(self) -> float:
        """Seconds until the section's deadline."""
        return self._until - time.monotonic()

    def release(self) -> None:
        """Free unused memory of the device."""
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def say(self, message: Mapping[str, object]) -> None:
        """Write one line for the parent."""
        print(MARK + json.dumps(message), flush=True)

    def measure(self, name: str, work: Callable[[], Figures], is_own: bool = False) -> None:
        """Record the result of `work`, or its exception as a refusal. is_own: it is our own kernel,
        whose refusal is a failure."""
        if self.left_s() < 0:
            self.leave_out(name, "the section had no time left for it")
        elif (figures := self._attempt(name, work, is_own)) is not None:
            self.note(name, figures)

    def prepare(self, name: str, make: Callable[[], Made]) -> Made | None:
        """The result of a preparation for several measurements; None: recorded as refused."""
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
        """Wait until all launched work has ended."""
        self.device.stream.mark()()

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
        """Normally distributed numbers, generated on the device."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.torch_device)
        return out.normal_().mul_(scale)

    def copies(self, nbytes: float) -> int:
        """The number of copies of an operand that exceeds the GPU's cache."""
        return self.size(max(1, min(_MOST_COPIES, math.ceil(_WALKED_BYTES / nbytes))), 2)

    def free_bytes(self) -> int:
        """Free memory of the device, after torch has released its cache."""
        if self.is_dry:
            return 2**24
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def device_us(
        self, call: Callable[[int], object], copies: int = 1, budget_s: float = 0.05
    ) -> float:
        """Median µs of call(i), i < copies, one after the other in a CUDA graph, without host time.
        On a CPU the time of one call."""
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
        """Median µs between two events around a call that follows another one."""
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
        """Host µs per call, without waiting for the device."""
        call()
        self.wait()
        times = self.size(times, 2)
        took = _seconds(lambda: [call() for _ in range(times)])
        self.wait()
        return took / times * 1e6

    def moved(self, us: float, nbytes: float) -> dict[str, float]:
        """Figures of a kernel that moves `nbytes`: its share of the read bandwidth."""
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
    """The relative error to `wanted` (float64), by norms, and its bound."""
    wanted = wanted.double()
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    return {"error": error, "bound": ERROR_BOUND}


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _shortened(sentence: str) -> str:
    """The start and the end of a sentence: the last words of a server say why it ended."""
    return sentence if len(sentence) <= 300 else f"{sentence[:120]} … {sentence[-180:]}"


def _written(value: float | str) -> float | str:
    """The value in a form that JSON supports."""
    return value if isinstance(value, str) or math.isfinite(value) else str(value)
