"""The cost of a process's first launches: with an empty cache of Triton, with a full one, and with
a full one but no C compiler.

Run as a script, it launches each kernel once and prints its seconds as one JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpu_timing import MODELS, TINY_MODELS, Bench, Figures, Limits

_SECONDS = 60


def compile_seconds(bench: Bench) -> None:
    """Each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        first = {"TRITON_CACHE_DIR": folder}
        ways = (
            ("cold: an empty cache", first),
            ("warm: what the process before left", first),
            ("warm, without a C compiler on the PATH", first | {"PATH": "/nowhere"}),
        )
        for name, changed in ways:
            bench.measure(name, partial(_process, bench, changed))


def _process(bench: Bench, changed: dict[str, str]) -> Figures:
    if bench.is_dry:
        raise RuntimeError("the interpreter compiles nothing")
    command = [sys.executable, str(Path(__file__).resolve())]
    # The packages of this process.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **changed}
    if "CC" in environment and "PATH" in changed:
        del environment["CC"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr[-250:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_launches(bench: Bench) -> dict[str, float]:
    """Seconds of the first launch of each kernel, and of all."""
    from gpu_attention import Pool
    from gpu_kernels import KERNELS

    model = (TINY_MODELS if bench.is_dry else MODELS)[0]
    calls: dict[str, Callable[[], object]] = {}
    for name, prepare in KERNELS.items():
        case = prepare(bench, model, 1)
        calls[name] = partial(case.call, 0)
    pool = Pool(bench, model, 16, 64, bench.dtype)
    for name, length in (("decode", 1), ("prefill", 20)):
        heads, plan = pool.heads(length), pool.plan(pool.batch(1, 33, length, 0))
        calls[name] = partial(pool.attend, heads, plan)
    bench.wait()
    found = {}
    for name, call in calls.items():
        begun = time.perf_counter()
        call()
        bench.wait()
        found[name] = time.perf_counter() - begun
    return {"all_s": sum(found.values())} | {f"{name}_s": found[name] for name in found}


if __name__ == "__main__":
    print(json.dumps(first_launches(Bench("TRITON_INTERPRET" in os.environ, Limits()))))
