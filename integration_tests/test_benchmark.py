"""`text-generation-benchmark` on real shards, its own or others that run, and on a server."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_generation_benchmark.cli import main

from integration_tests.server import (
    SCRIPTS,
    LauncherHandle,
    _end_with_parent,
    clean_environment,
    running,
    wait_until,
)

BENCHMARK = [sys.executable, "-m", "text_generation_benchmark.cli"]


def benchmark(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the tool to its end."""
    return subprocess.run(
        [*BENCHMARK, *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=120,
    )


def test_shards_of_its_own(tiny_model_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    shape = ["-b", "1", "3", "-s", "5", "40", "-d", "4", "-r", "2", "--top-n-tokens", "2"]
    files = ["--output", str(output)]
    done = benchmark("--model-id", str(tiny_model_path), *shape, *files, "--", "--dtype", "float32")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "| dtype | float32 |" in done.stdout
    for step in ("Prefill", "Decode (token)", "Decode (total)"):
        assert f"| {step} | 3 | 40 | " in done.stdout
    report = json.loads(output.read_text())
    assert report["parameters"]["model"] == str(tiny_model_path)
    shapes = [(one["batch_size"], one["sequence_length"]) for one in report["batches"]]
    assert shapes == [(1, 5), (3, 5), (1, 40), (3, 40)]
    assert all(one["decode_token"]["latency_ms"]["p50"] > 0 for one in report["batches"])


def test_shards_that_run_already(tiny_model_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pytgi-") as folder:
        shards = subprocess.Popen(
            [
                str(SCRIPTS / "text-generation-launcher"),
                *("shards", "--model-id", str(tiny_model_path), "--json-output"),
                *("--shard-uds-path", f"{folder}/s"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
            preexec_fn=_end_with_parent,
        )
        try:
            assert shards.stdout is not None
            answer = next(json.loads(line) for line in shards.stdout if "model_path" in line)
            assert answer["model_path"] == str(tiny_model_path)
            where = ["-m", answer["master_shard_uds_path"], "-t", answer["model_path"]]
            for _ in range(2):
                done = benchmark(*where, "-b", "2", "-d", "3", "-r", "1")
                assert (done.returncode, done.stderr) == (0, ""), done
                assert done.stdout.startswith("batch size 2, sequence length 10, ")
            done = benchmark(*where, "-b", "2", "-s", "100000", "-r", "1")
            assert done.returncode == 1
            assert "but the model takes at most 512: lower one of them" in done.stderr
            shards.send_signal(signal.SIGTERM)
            assert shards.wait(30) == 0
        finally:
            shards.kill()
            shards.wait()
            assert shards.stdout is not None
            shards.stdout.close()
        wait_until(lambda: not Path(f"{folder}/s-0").exists(), 5, "the socket is gone")


@pytest.fixture(scope="module")
def embedded_server() -> Iterator[LauncherHandle]:
    """What the launcher starts without a model."""
    with running(None) as handle:
        yield handle
        handle.assert_idle()


SIZES = ("--input-tokens", "40", "--output-tokens", "8", "--requests", "6", "--warmups", "1")


@pytest.mark.parametrize("form", ["tgi", "openai-completions", "openai-chat"])
def test_a_server_that_runs(
    embedded_server: LauncherHandle, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A closed and an open loop."""
    # What /info says is enough for the first form.
    api = [] if form == "tgi" else ["--api", form]
    for loop in (["--clients", "1", "3"], ["--rate", "30"]):
        output = tmp_path / "load.json"
        where = ["--url", embedded_server.url, "-o", str(output)]
        assert main([*where, *api, *loop, *SIZES]) == 0
        said = capsys.readouterr()
        report = json.loads(output.read_text())
        assert report["parameters"]["api"] == form
        assert report["parameters"]["model"] == "pytgi/embedded"
        assert len(report["points"]) == len(loop) - 1
        for point in report["points"]:
            assert (point["requests_ok"], point["errors"]) == (6, {}), said.out
            assert point["output_tokens_counted_by"] == "server"
            assert 25 < point["input_tokens_got_p50"] < 60
            assert 0 < point["output_tokens_got_p50"] <= 8
            assert (point["output_tokens_got_p50"] < 8) == ("the median answer has" in said.out)
            assert 0 < point["ttft_ms"]["p50"] <= point["latency_ms"]["p50"]
            assert ("ttft_from_due_ms" in point) == (loop[0] == "--rate")
        assert said.err == ""


def _as_at_a_terminal() -> None:
    """Shells have what runs in the background ignore Ctrl-C, and it is inherited."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_prints_what_was_measured(embedded_server: LauncherHandle) -> None:
    load = subprocess.Popen(
        [*BENCHMARK, "--url", embedded_server.url, "--seconds", "60", "--timeout", "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        preexec_fn=_as_at_a_terminal,
    )
    try:
        before = embedded_server.metrics().get("tgi_request_success", 0.0)
        wait_until(
            lambda: embedded_server.metrics().get("tgi_request_success", 0.0) > before + 5,
            20,
            "two questions, a warm-up and three requests are answered",
        )
        load.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        output, errors = load.communicate(timeout=10)
    finally:
        load.kill()
        load.wait()
    assert time.monotonic() - stopped < 5
    assert (load.returncode, errors) == (130, "")
    assert "| itl_ms | " in output
    assert "interrupted; running streams, not counted: 1." in output
    embedded_server.assert_idle()
