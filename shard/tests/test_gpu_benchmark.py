"""The benchmark of a GPU, without one: tiny sizes, and children that do not survive."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# A child of benchmarks/gpu.py; what becomes of it is the name of its first section.
CHILD = """
import json, sys, time
names = sys.argv[sys.argv.index("--child") + 1 :]
def say(**message): print("@gpu " + json.dumps(message), flush=True)
say(begins=names[0], seconds=0)
say(record={"section": names[0], "name": "one", "us": 1.0})
if names[0] == "dies": sys.exit("the device is lost")
if names[0] == "hangs": time.sleep(60)
say(ended=names[0])
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("gpu") / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry"]
    # As on a machine that has a GPU: the benchmark asks for the interpreter itself.
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    done = subprocess.run(
        [*command, "--output", str(output)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for word in ("decode", "of limit", "met: error in bfloat16", "not measured: prefill"):
        assert word in done.stdout
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.nightly
def test_all_sections_are_measured(report: dict[str, Any]) -> None:
    assert report["status"] == 0 and not report["failed"] and not report["left_out"]
    assert {"gpu", "driver", "torch", "triton", "commit"} <= report.keys()
    sections = {record["section"] for record in report["records"]}
    assert len(sections) == 16 and all(value > 0 for value in report["limits"].values())


@pytest.mark.nightly
def test_our_kernels_have_errors_and_shares(report: dict[str, Any]) -> None:
    measured = ("decode", "prefill", "kernels", "matrices")
    own = [one for one in report["records"] if one["section"] in measured]
    assert len(own) > 10
    for one in own:
        assert 0 < one["error"] <= one["bound"] and one["us"] > 0 and one["share"] > 0, one
    for kernel in ("add_norm", "gate", "rotate_and_store", "int8", "int4", "fp8", "one tile"):
        assert any(kernel in one["name"] for one in own)


@pytest.mark.nightly
def test_an_engine_is_measured_as_on_a_gpu(report: dict[str, Any]) -> None:
    """The goals are of figures that are there."""
    found = {(one["section"], name) for one in report["records"] for name in one}
    tokens = [one for one in report["records"] if one["section"] == "tokens"]
    assert len(tokens) == 6 and all(one["same"] == one["tokens"] > 0 for one in tokens)
    assert all(one["replays"] > 0 for one in tokens)
    wanted = {
        *(("steps", "share"), ("gaps", "busy"), ("server", "times"), ("start", "first_token_s")),
        *(("soak", "preempted"), ("soak", "most_blocks_share")),
    }
    assert wanted <= found
    (soak,) = [one for one in report["records"] if one["section"] == "soak"]
    assert soak["most_blocks_share"] == 1 and soak["tokens"] > 100
    assert all(soak[name] > 0 for name in ("preempted", "cancelled", "with_grammar"))


@pytest.mark.nightly
def test_what_is_refused_is_a_sentence(report: dict[str, Any]) -> None:
    refused = [one for one in report["records"] if "refused" in one]
    assert any("varlen_attn" in one["name"] for one in refused)
    assert all(one["section"] in ("torch", "launches", "compile") for one in refused)


def test_names_of_parts_do_not_reach_pytest() -> None:
    found = re.search(r"GPU_PARTS := (.*)", (ROOT / "Makefile").read_text())
    said = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "nothing"],
        capture_output=True,
        text=True,
    ).stderr
    assert found is not None and f"there are: {', '.join(found[1].split())}\n" in said


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.usefixtures("benchmarks")
def test_children_that_die_or_hang_cost_their_section(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_children

    monkeypatch.setattr(gpu_children, "_GRACE_S", 3.0)
    sections = ["well", "dies", "hangs", "last"]
    command = [sys.executable, "-c", CHILD]
    written = []
    found = gpu_children.measure_all(command, sections, time.monotonic() + 60, written.append)
    assert len(written) == 2
    assert [one["section"] for one in found.records] == sections and not found.left_out
    assert found.failed == {
        "dies": "its process ended with 1: the device is lost",
        "hangs": "it took too long, and its process was ended",
    }
    never = [sys.executable, "-c", "import nothing_of_that_name"]
    found = gpu_children.measure_all(never, sections, time.monotonic() + 60, written.append)
    assert found.failed.keys() == set(sections) and "nothing_of_that_name" in found.failed["last"]
