"""The time of an engine's step against its floor, and the share in which no kernel runs."""

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_caller import NewRequest
from gpu_engine import Sizes, known_requests, load, models_of, write_files
from gpu_timing import Bench, Figures
from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from text_generation_shard.engine.engine import Engine, StepHandle
from text_generation_shard.engine.warmup import warm_up
from torch.profiler import ProfilerActivity, profile

ROWS, TINY_ROWS = (1, 8, 32, 128, 256), (1, 2)
CONTEXT, TINY_CONTEXT = 1024, 20
# Steps for one figure: before the measured ones (graphs are captured then), and measured.
_FIRST, _COUNTED = 8, 32
# Spare tokens of a row: the last steps are launched but not measured.
_SPARE = 8
# Cases without graphs, to show the gain of graphs.
_EAGER_ROWS = (1, 32)
_PROMPTS, _LENGTH = 8, 2048
# Profiled steps: before the measured ones, while the profiler starts, and measured.
_UNSEEN, _SEEN = 2, 10
_GAPS_ROWS = 32


def steps(bench: Bench) -> None:
    """Decode steps and prompts of both models, with graphs; then some decode steps without."""
    for sizes in models_of(bench):
        rows = bench.sizes(ROWS, TINY_ROWS)
        _measure_all(bench, sizes, rows, rows)
    for sizes in models_of(bench):
        if bench.left_s() > 0:
            _measure_all(bench, sizes, bench.sizes(_EAGER_ROWS, (1,)), ())


def _measure_all(
    bench: Bench, sizes: Sizes, all_rows: Sequence[int], graphs: Sequence[int]
) -> None:
    """Measures with one engine, which is freed at the end. graphs: the recorded steps."""
    name, kind = sizes.model.name, "" if graphs else ", eager"
    engine = bench.prepare(f"{name} engine{kind}", partial(warm, bench, sizes, graphs))
    if engine is None:
        return bench.release()
    context = bench.size(CONTEXT, TINY_CONTEXT)
    for rows in all_rows:
        work = partial(_decode, bench, sizes, engine, rows, context)
        bench.measure(f"{name} {rows} x {context}{kind}", work, is_own=True)
    if graphs:
        prompts, length = bench.size(_PROMPTS, 2), bench.size(_LENGTH, 24)
        work = partial(_prefill, bench, sizes, engine, prompts, length)
        bench.measure(f"{name} prefill {prompts} x {length}", work, is_own=True)
    del engine, work
    bench.release()


def warm(bench: Bench, sizes: Sizes, graphs: Sequence[int]) -> Engine:
    """An engine with enough rows and blocks for all cases."""
    rows, context = max(bench.sizes(ROWS, TINY_ROWS)), bench.size(CONTEXT, TINY_CONTEXT)
    prompts, length = bench.size(_PROMPTS, 2), bench.size(_LENGTH, 24)
    longest = context + _FIRST + _COUNTED + _SPARE
    with tempfile.TemporaryDirectory() as folder:
        write_files(sizes, Path(folder))
        engine = load(bench, sizes, Path(folder), graphs)
    size = engine.block_size
    num_blocks = max(rows * -(-longest // size), prompts * -(-(length + 1) // size))
    most = max(longest, length + 1)
    limits = pb.WarmupRequest(
        max_prefill_tokens=prompts * length,
        max_batch_size=rows,
        max_total_tokens=most,
        max_batch_total_tokens=num_blocks * size,
    )
    warm_up(engine, limits)
    return engine


def first_step(requests: Sequence[NewRequest]) -> pb.Step:
    """The step that computes all their inputs."""
    counts = {item.id: len(item.input_ids) - item.num_cached_tokens for item in requests}
    return pb.Step(request_ids=counts, counts=counts.values())


class Decoding:
    """Decoding rows with two steps in flight, as in the service. Owns these steps."""

    def __init__(self, engine: Engine, requests: Sequence[NewRequest]) -> None:
        self._engine = engine
        # A failed measurement may have left some.
        engine.clear()
        engine.step(first_step(requests), [request.message() for request in requests])
        self._ids = [request.id for request in requests]
        self._under_way: deque[StepHandle] = deque()
        for _ in range(2):
            self._launch()

    def _launch(self) -> None:
        step = pb.Step(request_ids=self._ids, is_ahead=bool(self._under_way))
        self._under_way.append(self._engine.launch(step))

    def advance(self) -> None:
        """Collect the oldest step and launch another."""
        self._under_way.popleft().result()
        self._launch()

    def end(self) -> None:
        """End the rows."""
        self._engine.clear()


def _decode(bench: Bench, sizes: Sizes, engine: Engine, rows: int, context: int) -> Figures:
    first, counted = bench.size(_FIRST, 5), bench.size(_COUNTED, 2)
    decoding = Decoding(engine, known_requests(engine, rows, context, first + counted + _SPARE))
    times: list[float] = []
    for _ in range(first + counted):
        begun = time.perf_counter()
        decoding.advance()
        times.append(time.perf_counter() - begun)
    decoding.end()
    us = statistics.median(times[first:]) * 1e6
    # Context length at the middle step.
    seen = context + first + counted // 2
    if not all(bench.limits):
        return {"ms": us / 1e3}
    floor = sizes.floor_us(rows, seen, bench.limits)
    return {"ms": us / 1e3, "share": floor / us, "floor_ms": floor / 1e3}


def _prefill(bench: Bench, sizes: Sizes, engine: Engine, prompts: int, length: int) -> Figures:
    width = -(-(length + 1) // engine.block_size)
    requests = [
        NewRequest(
            id=row,
            input_ids=[1 + (row + at * 7) % 300 for at in range(length)],
            num_prompt_tokens=length,
            block_table=range(row * width, (row + 1) * width),
            sampling=Sampling(),
            max_new_tokens=1,
        )
        for row in range(prompts)
    ]
    engine.clear()
    times = []
    for _ in range(bench.size(4, 1)):
        step, messages = first_step(requests), [request.message() for request in requests]
        begun = time.perf_counter()
        engine.step(step, messages)
        times.append(time.perf_counter() - begun)
    us = min(times) * 1e6
    found = bench.computed(us, sizes.prefill_flop(prompts, length))
    del found["us"]
    return found | {"ms": us / 1e3, "tokens_s": prompts * length / us * 1e6}


def gaps(bench: Bench) -> None:
    """Of the large model, with graphs."""
    sizes, rows = models_of(bench)[0], bench.size(_GAPS_ROWS, 2)
    context = bench.size(CONTEXT, TINY_CONTEXT)
    name = f"{sizes.model.name} {rows} x {context}"
    engine = bench.prepare(f"{name} engine", partial(warm, bench, sizes, (rows,)))
    if engine is not None:
        bench.measure(name, partial(_gaps, bench, engine, rows, context))


def _gaps(bench: Bench, engine: Engine, rows: int, context: int) -> Figures:
    first, unseen, seen = bench.size(_FIRST, 5), bench.size(_UNSEEN, 1), bench.size(_SEEN, 1)
    new = first + unseen + seen + _SPARE
    decoding = Decoding(engine, known_requests(engine, rows, context, new))
    for _ in range(first):
        decoding.advance()
    activity = ProfilerActivity.CPU if bench.is_dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiled:
        for _ in range(unseen + seen):
            decoding.advance()
        bench.wait()
    decoding.end()
    found = sorted(_kernels(profiled, "CPU" if bench.is_dry else "CUDA"))
    # Each step has the same kernels.
    counted = found[len(found) * unseen // (unseen + seen) :]
    busy, longest = busy_share(counted)
    return {
        "busy": busy,
        "gaps": 1.0 - busy,
        "longest_us": longest,
        "kernels_a_step": len(counted) / seen,
    }


def _kernels(profiled: Any, device: str) -> Iterable[tuple[float, float]]:
    """First and last µs of each kernel; on the processor, of each operator."""
    for event in profiled.events():
        is_copy = event.name.startswith(("Memcpy", "Memset"))
        is_marked = getattr(event, "is_user_annotation", False)
        if event.device_type.name == device and not is_copy and not is_marked:
            yield event.time_range.start, event.time_range.end


def busy_share(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of sorted spans in µs: the covered share of the time from first to last, and the longest gap.
    Raises ValueError if there are none."""
    if not spans:
        raise ValueError("no kernel was seen; the profiler needs CUPTI of this driver")
    begun, end = spans[0]
    idle = longest = 0.0
    for first, last in spans:
        gap = max(0.0, first - end)
        idle, longest, end = idle + gap, max(longest, gap), max(end, last)
    return 1.0 - idle / (end - begun), longest
