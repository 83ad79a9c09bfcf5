"""Measures an NVIDIA GPU, our kernels and a whole server on it: `make gpu-bench ARGS=engine`.

    python3 benchmarks/gpu.py [PART ...] [--sections NAME ...] [--seconds N]
    python3 benchmarks/gpu.py --dry        without a GPU: tiny sizes, on the processor

A part consists of sections, measured in a child process. If a section hangs or loses the device,
the next ones get a new process. A refused call is recorded, and the next one is measured. The
report is written to $OUT, or to benchmarks/results. The status is not 0 if an error bound or
another promise was broken, or if a section or one of our own measurements failed; missed goals do
not count.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from gpu_children import Found, measure_all
from gpu_report import goals, problems, table

ROOT = Path(__file__).resolve().parents[1]
# For integration_tests and shard.tests.
sys.path.append(str(ROOT))


class Section(NamedTuple):
    """A function of a module in this folder that takes a Bench, and its time limit in seconds,
    after which it starts no measurement."""

    module: str
    function: str
    seconds: float


# A new part is an entry here and a name in the Makefile. The limits come first: shares refer to
# them.
_LIMITS = Section("gpu_limits", "limits", 40)
PARTS: dict[str, dict[str, Section]] = {
    "kernels": {
        "limits": _LIMITS,
        "table": Section("gpu_limits", "table", 5),
        "decode": Section("gpu_attention", "decode", 80),
        "prefill": Section("gpu_attention", "prefill", 60),
        "kernels": Section("gpu_kernels", "kernels", 60),
        "products": Section("gpu_limits", "products", 40),
        "matrices": Section("gpu_products", "products", 60),
        "launches": Section("gpu_limits", "launches", 15),
        "torch": Section("gpu_torch", "torch_attention", 50),
        "compile": Section("gpu_compile", "compile_seconds", 50),
    },
    "engine": {
        "limits": _LIMITS,
        "tokens": Section("gpu_engine_tokens", "tokens", 90),
        "steps": Section("gpu_engine_steps", "steps", 90),
        "gaps": Section("gpu_engine_steps", "gaps", 30),
        "server": Section("gpu_server", "server", 130),
        "start": Section("gpu_server", "start", 70),
        # Last: it uses the remaining time.
        "soak": Section("gpu_engine_soak", "soak", 180),
    },
}
SECTIONS = {name: section for part in PARTS.values() for name, section in part.items()}


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    if options.child:
        return work(options.child, options.dry, options.limits, options.seconds)
    names = _wanted(options.parts or list(PARTS), options.sections)
    begun = time.monotonic()
    said = {
        **_machine(),
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "parts": options.parts or list(PARTS),
        "is_dry": options.dry,
    }
    command = [sys.executable, str(Path(__file__).resolve()), *(["--dry"] if options.dry else [])]
    output = _output(options.output)

    def write(found: Found) -> dict[str, Any]:
        seconds = round(time.monotonic() - begun, 1)
        return _write(output, {**said, "seconds": seconds}, found)

    report = write(measure_all(command, names, begun + options.seconds, write))
    print(table(report))
    print(f"written to {output}")
    sys.exit(report["status"])


def _write(output: Path, said: dict[str, Any], found: Found) -> dict[str, Any]:
    """Makes the report and writes it to the file."""
    told = problems(found)
    report = {
        "status": 1 if told else 0,
        **said,
        **asdict(found),
        "goals": goals(found),
        "problems": told,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="only these of the parts")
    # With the installation of wheels before and a child that hangs at the end: ten minutes.
    parser.add_argument("--seconds", type=float, default=520, help="when to begin nothing new")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--limits", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are: {', '.join(PARTS)}")
    return options


def _wanted(parts: Sequence[str], only: Sequence[str] | None) -> list[str]:
    names = dict.fromkeys(name for part in parts for name in PARTS[part])
    return [name for name in names if not only or name in only or name == "limits"]


def _machine() -> dict[str, object]:
    from integration_tests.on_gpu import machine

    return machine(sys.executable, os.environ)


def _output(asked: Path | None) -> Path:
    folder = Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    return asked or folder / f"gpu-bench-{datetime.now(UTC):%Y-%m-%d}.json"


def work(names: Sequence[str], is_dry: bool, limits: dict[str, float], seconds: float) -> None:
    """The child process: runs sections one after the other, for `seconds` in total."""
    until = time.monotonic() + seconds
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"
        # It corrects the interpreter's products of bfloat16.
        importlib.import_module("shard.tests.interpreted")
    from gpu_timing import Bench, Limits

    bench = Bench(is_dry, Limits(**limits))
    # Longer, because the machine may be busy and CPU kernels may have to be compiled.
    patience = 5 if is_dry else 1
    for name in names:
        section = SECTIONS[name]
        bench.begin(name, min(patience * section.seconds, until - time.monotonic()))
        getattr(importlib.import_module(section.module), section.function)(bench)
        bench.end()


if __name__ == "__main__":
    main()
