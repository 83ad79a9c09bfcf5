"""The benchmark of a GPU, without one: tiny sizes, and children that do not survive."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
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


def test_all_sections_are_measured(report: dict[str, Any]) -> None:
    assert report["status"] == 0 and not report["failed"] and not report["left_out"]
    assert {"gpu", "driver", "torch", "triton", "commit"} <= report.keys()
    sections = {record["section"] for record in report["records"]}
    assert len(sections) == 16 and all(value > 0 for value in report["limits"].values())


def test_our_kernels_have_errors_and_shares(report: dict[str, Any]) -> None:
    measured = ("decode", "prefill", "kernels", "matrices")
    own = [one for one in report["records"] if one["section"] in measured]
    assert len(own) > 10
    for one in own:
        assert 0 < one["error"] <= one["bound"] and one["us"] > 0 and one["share"] > 0, one
    for kernel in ("add_norm", "gate", "rotate_and_store", "int8", "int4", "fp8", "one tile"):
        assert any(kernel in one["name"] for one in own)


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


@pytest.mark.usefixtures("benchmarks")
def test_broken_promises_and_missed_goals() -> None:
    from gpu_children import Found
    from gpu_report import goals, problems

    records: list[dict[str, Any]] = [
        {"section": "start", "name": "8B", "first_token_s": 15.1},
        {"section": "gaps", "name": "8B 32 x 1024", "busy": 0.97},
        {"section": "tokens", "name": "one", "broken": "no step was a graph"},
    ]
    found = Found(records=records)
    assert problems(found) == ["tokens, one: no step was a graph"]
    states = {one["value"]: one["state"] for one in goals(found)}
    assert (states[15.1], states[0.97]) == ("missed", "met")


@pytest.mark.usefixtures("benchmarks")
def test_time_in_which_no_kernel_runs() -> None:
    from gpu_engine_steps import busy_share

    busy, longest = busy_share([(0, 10), (2, 5), (8, 12), (20, 30), (31, 40)])
    assert (busy, longest) == (pytest.approx(1 - 9 / 40), 8)
    with pytest.raises(ValueError, match="no kernel was seen"):
        busy_share([])


# Tokens, and the log-probability of the last one, of request 0, which is greedy, and of request 1.
SAME = ([5, 6], -1.0), ([7, 8], -2.0)
COMPARED = {
    "same": (SAME, "float32", ""),
    "as good": ((([5, 9], -1.0005), SAME[1]), "float32", ""),
    "worse": ((([5, 9], -1.1), SAME[1]), "float32", "request 0: 1 of 2 tokens"),
    "drawn": ((SAME[0], ([7, 9], -2.0)), "float32", "request 1: 1 of 2 tokens"),
    "rounded": ((SAME[0], ([7, 9], -5.0)), "bfloat16", ""),
    "shorter": ((([5], -1.0), SAME[1]), "float32", "request 0: 1 of 2 tokens"),
    "longer": ((([5, 6, 7], -1.0), SAME[1]), "float32", "request 0: 2 of 2 tokens"),
    "not the same score": ((SAME[0], ([7, 8], -2.3)), "bfloat16", "differ by 0.3"),
}


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("name", list(COMPARED))
def test_tokens_of_two_engines(name: str) -> None:
    from gpu_caller import Answer
    from gpu_engine_tokens import Run, compared

    def run(answers: Any, replays: int) -> Run:
        made = {
            number: Answer(ids, [-1.0] * (len(ids) - 1) + [last])
            for number, (ids, last) in enumerate(answers)
        }
        return Run(made, {0}, 2, replays)

    other, dtype, sentence = COMPARED[name]
    found = compared(run(SAME, 0), run(other, 2), dtype)
    assert sentence in str(found.get("broken", "")) and bool(sentence) == ("broken" in found)


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    ("replays", "is_right"), [((0, 9), True), ((0, 0), False), ((1, 9), False)]
)
def test_graphs_where_they_should_be(replays: tuple[int, int], is_right: bool) -> None:
    from gpu_engine_tokens import Run, compared

    both = [Run({}, set(), 9, count) for count in replays]
    assert ("broken" not in compared(both[0], both[1], "float32")) == is_right


@pytest.mark.usefixtures("benchmarks")
def test_blocks_and_rows_that_are_lost() -> None:
    from gpu_caller import Caller, LostError

    engine: Any = SimpleNamespace(block_size=16, num_rows_taken=0)
    caller = Caller(engine, 8, 4, 64)
    caller.end()
    engine.num_rows_taken = 1
    with pytest.raises(LostError, match="1 rows are in use for 0 requests"):
        caller.check()
    caller._free.pop()
    with pytest.raises(LostError, match="7 blocks are free and 0 held, of 8"):
        caller.check()


@pytest.mark.usefixtures("benchmarks")
def test_a_request_that_fails_before_its_first_token() -> None:
    from gpu_caller import Caller
    from text_generation_process.sampling import Sampling
    from text_generation_shard.engine.step import FinishReason, NewRequest, StepOutput

    failed = SimpleNamespace(result=lambda: StepOutput([], [], errors=[(0, "no memory")]))
    engine: Any = SimpleNamespace(block_size=16, num_rows_taken=0, launch=lambda step: failed)
    caller = Caller(engine, 8, 4, 64)
    caller.ask(NewRequest(0, [5] * 40, 40, 0, (), Sampling(), 1))
    caller.run()
    assert caller.answers[0].reason == FinishReason.ERROR and caller.most_blocks == 3
    caller.end()


@pytest.mark.usefixtures("benchmarks")
def test_when_a_server_said_what() -> None:
    from gpu_server import log_seconds

    log = (
        "1970-01-01T00:00:12.5Z  INFO text_generation_shard: first\n"
        "Traceback\n"
        "1970-01-01T00:00:12.5Z WARNING text_generation_router.infer: second: third\n"
    )
    assert log_seconds(log, 10.0) == {"2.50 s": "shard: first | router.infer: second: third"}
