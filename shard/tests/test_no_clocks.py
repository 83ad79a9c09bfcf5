"""Decisions that several ranks must make alike depend on no clock and no free memory."""

import ast
from collections.abc import Iterator
from pathlib import Path

import text_generation_shard

ROOT = Path(text_generation_shard.__file__).parent
# Functions that return times or free memory.
TELLING = {
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("process_time", "thread_time", "clock_gettime", "sleep", "now_ns", "cpu_s", "now"),
    *("free_bytes", "mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved"),
    *("virtual_memory", "sysconf", "getrusage"),
}
# Where messages are carried out.
IN_STEPS = (
    *("service.py", "translate.py", "messages.py", "message_order.py", "parallel.py", "engine"),
    *("sampling", "models", "layers", "grammars", "device"),
)
REPORTED = "how long the step took is reported"
LIMITED = "one rank follows grammars, and broadcasts the results"
LOADING = "before the first message"
WAITING = "the deadline for another rank: after it the step fails"
ROOM = "in warm-up: all ranks use the least, and the rest is only logged"
# By file and function; or the whole file.
ALL = "*"
ALLOWED = {
    "engine/engine.py": {
        "Engine.launch": REPORTED,
        "Engine._complete": REPORTED,
        "Engine._finish_in_parts": "a rank that is not alone does not compute steps in parts",
        "Engine._room": ROOM,
    },
    "device/reference/runner.py": {"TorchRunner.launch": REPORTED},
    "device/cpu/runner.py": {"CpuRunner.launch": REPORTED},
    "device/cuda/runner.py": {"StreamStep.result": REPORTED},
    "device/cpu/kernels/exchange.py": {"await_rank": WAITING},
    "device/cpu/device.py": {
        "CpuDevice.free_bytes": ROOM,
        "CpuDevice.left_bytes": ROOM,
        "KernelDevice.__init__": LOADING,
        "_milliseconds": LOADING,
    },
    "device/cuda/gpu.py": {
        "CudaDevice.free_bytes": ROOM,
        "CudaDevice._free_and_total": ROOM,
        "CudaDevice.check_room": LOADING,
    },
    "device/cpu/collectives.py": {"_create": LOADING},
    "device/cpu/kernels/cache.py": {ALL: LOADING},
    "device/cpu/kernels/compile.py": {ALL: LOADING},
    "device/cuda/staging.py": {ALL: LOADING},
    "grammars/guard.py": {ALL: LIMITED},
    "grammars/trial.py": {ALL: LIMITED},
    "grammars/trial_server.py": {ALL: LIMITED},
}


def tells(path: Path) -> Iterator[str]:
    """The functions of a file that read a clock or free memory."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            own = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = (*names, child.name)
            if isinstance(child, ast.Call):
                called = child.func
                name = called.attr if isinstance(called, ast.Attribute) else None
                name = called.id if isinstance(called, ast.Name) else name
                if name in TELLING:
                    yield ".".join(names)
            yield from walk(child, own)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), ())


def test_nothing_in_a_step_is_a_matter_of_time_or_memory() -> None:
    paths = [path for name in IN_STEPS for path in (ROOT / name).rglob("*.py")]
    paths += [ROOT / name for name in IN_STEPS if name.endswith(".py")]
    assert len(paths) > 80
    found = {str(path.relative_to(ROOT)): set(tells(path)) for path in paths}
    for name, reasons in ALLOWED.items():
        functions = found.pop(name)
        assert functions == reasons.keys() or (functions and ALL in reasons), (name, functions)
    assert not {name: functions for name, functions in found.items() if functions}
