"""The benchmark of a GPU, without one: tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_all_sections_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry"]
    # As on a machine that has a GPU: the benchmark asks for the interpreter itself.
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    done = subprocess.run(
        [*command, "--output", str(output)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for word in ("decode", "of limit", "met: error in bfloat16", "not measured: prefill"):
        assert word in done.stdout
    report: dict[str, Any] = json.loads(output.read_text())
    assert report["status"] == 0 and not report["failed"] and not report["left_out"]
    sections = {record["section"] for record in report["records"]}
    assert len(sections) == 16 and all(value > 0 for value in report["limits"].values())
    tokens = [one for one in report["records"] if one["section"] == "tokens"]
    assert len(tokens) == 6 and all(one["same"] == one["tokens"] > 0 for one in tokens)
