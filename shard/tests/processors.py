"""Processors that this one is not, and how to run and compile the kernels as on them.

`python -m shard.tests.processors` (`make processors`) runs all tests of the shard as on those whose
code runs here, and compiles every kernel for the others.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from text_generation_shard.device.cpu.kernels import processor

ROOT = Path(__file__).parents[2]
_WIDE = "+avx2,+fma,+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl"


class Processor(NamedTuple):
    """One that numba is told of."""

    name: str
    """As LLVM knows it, which adds what belongs to the name."""
    features: str
    """All that our code asks for, and what must be here for its code to run here."""
    triple: str = "x86_64-unknown-linux-gnu"
    """What kind of machine it is of."""

    @property
    def is_like_this_one(self) -> bool:
        """Whether its code runs here."""
        wanted = {feature[1:] for feature in self.features.split(",")}
        return self.triple == processor.target()[0] and processor.features() >= wanted

    def environment(self, cache: Path) -> Mapping[str, str]:
        """For a process that is to compile for it; cache: where to."""
        told = {"NUMBA_CPU_NAME": self.name, "NUMBA_CPU_FEATURES": self.features}
        return {**os.environ, **told, "NUMBA_CACHE_DIR": str(cache)}


HASWELL = Processor("haswell", "+avx2,+fma")
SKYLAKE = Processor("skylake-avx512", _WIDE)
SAPPHIRE_RAPIDS = Processor("sapphirerapids", f"{_WIDE},+avx512vbmi,+avx512bf16")
# The plainest of those that are in use: without instructions for exchanging words.
ARM = Processor("cortex-a72", "+neon,+fp-armv8", "aarch64-unknown-linux-gnu")


def run_tests(told: Processor, cache: Path, arguments: Sequence[str]) -> str:
    """What pytest says at its end, if all tests pass or are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    return _run([*command, *arguments], told, cache)


def write_code(told: Processor, folder: Path, dtype: str, names: Sequence[str]) -> str:
    """See `shard.tests.written_code`, which writes to an empty folder."""
    command = [sys.executable, "-m", "shard.tests.written_code", told.triple, str(folder)]
    # What is read from a cache has no text.
    return _run([*command, dtype, *names], told, folder / "cache")


def _run(command: Sequence[str], told: Processor, cache: Path) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=told.environment(cache), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{told.name}: {done.stdout[-9000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def main() -> None:
    """Everything, one processor after the other."""
    for told in (HASWELL, SKYLAKE):
        if not told.is_like_this_one:
            print(f"{told.name}: its code does not run here", flush=True)
            continue
        with tempfile.TemporaryDirectory() as cache:
            arguments = ["shard/tests", "--ignore=shard/tests/test_processors.py"]
            said = run_tests(told, Path(cache), arguments)
        print(f"{told.name}: {said.splitlines()[-1]}", flush=True)
    for told in (HASWELL, SKYLAKE, SAPPHIRE_RAPIDS, ARM):
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                said = write_code(told, Path(folder), dtype, [])
            print(f"{told.name}, {dtype}: {said.strip()} functions compiled", flush=True)


if __name__ == "__main__":
    main()
