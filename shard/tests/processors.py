"""Other processors, and how to run or compile the kernels as on them.

`python -m shard.tests.processors` (`make processors`) runs all tests of the shard as on each
processor whose code runs here, and compiles every kernel for the others.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from text_generation_shard.device.cpu import kernels

ROOT = Path(__file__).parents[2]
_WIDE = "+avx2,+fma,+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl"


class Processor(NamedTuple):
    """A target processor for numba."""

    name: str
    """LLVM's name, which implies features."""
    features: str
    """All features that our code queries; this machine must have them to run the code."""
    triple: str = "x86_64-unknown-linux-gnu"
    """Target triple."""

    @property
    def is_like_this_one(self) -> bool:
        """Whether its code runs on this machine."""
        wanted = {feature[1:] for feature in self.features.split(",")}
        return self.triple == kernels.target()[0] and kernels.features() >= wanted

    def environment(self, cache: Path) -> Mapping[str, str]:
        """Environment of a process that compiles for it; cache: NUMBA_CACHE_DIR."""
        told = {"NUMBA_CPU_NAME": self.name, "NUMBA_CPU_FEATURES": self.features}
        return {**os.environ, **told, "NUMBA_CACHE_DIR": str(cache)}


HASWELL = Processor("haswell", "+avx2,+fma")
SKYLAKE = Processor("skylake-avx512", _WIDE)
SAPPHIRE_RAPIDS = Processor("sapphirerapids", f"{_WIDE},+avx512vbmi,+avx512bf16")
# A basic one in use, without atomic instructions.
ARM = Processor("cortex-a72", "+neon,+fp-armv8", "aarch64-unknown-linux-gnu")


def run_tests(told: Processor, cache: Path, arguments: Sequence[str]) -> str:
    """Run tests; returns pytest's summary if all pass or are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    return _run([*command, *arguments], told, cache)


def write_code(told: Processor, folder: Path, dtype: str, names: Sequence[str]) -> str:
    """See `shard.tests.written_code`, which writes to an empty folder."""
    command = [sys.executable, "-m", "shard.tests.written_code", told.triple, str(folder)]
    # Code loaded from a cache has no text.
    return _run([*command, dtype, *names], told, folder / "cache")


def _run(command: Sequence[str], told: Processor, cache: Path) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=told.environment(cache), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{told.name}: {done.stdout[-9000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def main() -> None:
    """Run everything, one processor after another."""
    for told in (HASWELL, SKYLAKE):
        if not told.is_like_this_one:
            print(f"{told.name}: its code does not run here", flush=True)
            continue
        with tempfile.TemporaryDirectory() as cache:
            arguments = ["shard/tests", "--ignore=shard/tests/device/cpu/kernels/test_processor.py"]
            said = run_tests(told, Path(cache), arguments)
        print(f"{told.name}: {said.splitlines()[-1]}", flush=True)
    for told in (HASWELL, SKYLAKE, SAPPHIRE_RAPIDS, ARM):
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                said = write_code(told, Path(folder), dtype, [])
            print(f"{told.name}, {dtype}: {said.strip()} functions compiled", flush=True)


if __name__ == "__main__":
    main()
