"""`text-generation-benchmark` on real shards: its own, and some that run already."""

import csv
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from integration_tests.server import SCRIPTS, _end_with_parent, clean_environment, wait_until

BENCHMARK = [sys.executable, "-m", "text_generation_router.benchmark.cli"]


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
    outputs = [str(tmp_path / "figures.json"), str(tmp_path / "figures.csv")]
    shape = ["-b", "1", "3", "-s", "5", "40", "-d", "4", "-r", "2", "--top-n-tokens", "2"]
    files = [part for path in outputs for part in ("--output", path)]
    done = benchmark("--model-id", str(tiny_model_path), *shape, *files, "--", "--dtype", "float32")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "| dtype | float32 |" in done.stdout
    for step in ("Prefill", "Decode (token)", "Decode (total)"):
        assert f"| {step} | 3 | 40 | " in done.stdout
    report = json.loads(Path(outputs[0]).read_text())
    assert report["parameters"]["model"] == str(tiny_model_path)
    shapes = [(one["batch_size"], one["sequence_length"]) for one in report["batches"]]
    assert shapes == [(1, 5), (3, 5), (1, 40), (3, 40)]
    assert all(one["decode_token"]["latency_ms"]["p50"] > 0 for one in report["batches"])
    with Path(outputs[1]).open() as file:
        assert len(list(csv.DictReader(file))) == 12


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
            assert "and the model takes 512: choose less" in done.stderr
            shards.send_signal(signal.SIGTERM)
            assert shards.wait(30) == 0
        finally:
            shards.kill()
            shards.wait()
            assert shards.stdout is not None
            shards.stdout.close()
        wait_until(lambda: not Path(f"{folder}/s-0").exists(), 5, "the socket is gone")
