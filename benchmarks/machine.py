"""Describes the machine, and writes reports; run as a script, measures its limits.

Prints one JSON object with the fields of loads.Rates. A process of its own, so that it holds no
memory while servers are measured.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from loads import Rates

ATTEMPTS = 12


def machine() -> dict[str, str]:
    """Processor, memory, system and load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{memory:.0f} GiB",
        "system": platform.platform(),
        "load_average": " ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


def heading() -> dict[str, Any]:
    """The first fields of a report: when, by which command, and on which machine."""
    script = Path(sys.argv[0]).name
    return {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "machine": machine(),
    }


def results(name: str) -> Path:
    """The default file of a report of today."""
    return Path(__file__).parent / "results" / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"


def write(report: dict[str, Any], path: Path) -> None:
    """Writes a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}", file=sys.stderr)


def measured_rates() -> Rates:
    """The best of many measurements with all cores; takes a few seconds."""
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Rates(**json.loads(done.stdout))


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ATTEMPTS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _read_gb_s() -> float:
    import torch

    values = torch.ones(2**28)  # 1 GiB, far beyond any cache
    seconds = min(_best_s(values.sum), _best_s(lambda: torch.dot(values, values)))
    return values.nbytes / 1e9 / seconds


def _bfloat16_gflop_s() -> float:
    """The rate of a prompt's products: many rows, weights prepacked for oneDNN."""
    import torch

    rates = []
    for rows, inputs, outputs in ((2048, 2048, 2048), (2048, 4096, 4096), (4096, 4096, 4096)):
        left = torch.randn(rows, inputs).bfloat16()
        weight = torch.randn(outputs, inputs).bfloat16()
        seconds = _best_s(partial(torch.nn.functional.linear, left, weight))
        if torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            linear = partial(torch.ops.mkldnn._linear_pointwise, left, packed)
            seconds = min(seconds, _best_s(partial(linear, None, "none", [], "")))
        rates.append(2e-9 * rows * inputs * outputs / seconds)
    return max(rates)


def main() -> None:
    """Measures."""
    rates = {"read_gb_s": _read_gb_s(), "bfloat16_gflop_s": _bfloat16_gflop_s()}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
