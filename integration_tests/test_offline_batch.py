"""`text-generation-launcher batch`: results in order, after any interruption."""

import json
import os
import pty
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration_tests.server import (
    SCRIPTS,
    LauncherHandle,
    _end_with_parent,
    assert_ended,
    clean_environment,
    wait_until,
)

NUM_REQUESTS = 40


def requests() -> list[dict[str, Any]]:
    """Of different lengths, some long."""
    return [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"the cat number {number} ",
                "max_tokens": 400 if number % 10 == 5 else 4 + number % 5,
                "temperature": 0,
            },
        }
        for number in range(NUM_REQUESTS)
    ]


class BatchRun:
    """Files in a folder, and launchers that work on them one after another."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.source, self.target = folder / "requests.jsonl", folder / "results.jsonl"
        self.log = folder / "log"
        self._uds = str(folder / "s")
        self._model = model
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, stderr: int | None = None) -> "subprocess.Popen[bytes]":
        """Starts a launcher on the files."""
        command = [str(SCRIPTS / "text-generation-launcher"), "batch", "--dtype", "float32"]
        command += ["--model-id", str(self._model), "--shard-uds-path", self._uds]
        command += ["--input", str(self.source), "--output", str(self.target), *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if stderr is None else stderr,
                env=clean_environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self.process

    def run(self, *flags: str) -> int:
        """Runs a launcher to its end; the exit code."""
        return self.start(*flags).wait(120)

    def write(self, lines: Sequence[dict[str, Any] | str]) -> None:
        """The input; texts as they are."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("\n".join(texts) + "\n")

    def results(self) -> list[dict[str, Any]]:
        """The output."""
        return [json.loads(line) for line in self.target.read_text().splitlines()]

    def num_results(self) -> int:
        """Whole lines of the output so far."""
        return self.target.read_bytes().count(b"\n") if self.target.exists() else 0


@pytest.fixture
def batch(tiny_model_path: Path) -> Iterator[BatchRun]:
    """In a folder with a short name, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="pytgi-") as folder:
        run = BatchRun(Path(folder), tiny_model_path)
        yield run
        print(run.log.read_text() if run.log.exists() else "")
        if run.process is not None:
            run.process.kill()
            run.process.wait()


def text_of(result: dict[str, Any]) -> str:
    """The first choice of a completion."""
    text = result["response"]["body"]["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def test_every_kind_of_line(batch: BatchRun, server: LauncherHandle) -> None:
    completion = requests()[0]
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "n": 2},
    }
    response = {
        "custom_id": "response",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "hi", "max_output_tokens": 5},
    }
    wrong = {**completion, "custom_id": "wrong", "body": {"prompt": "x", "max_tokens": "many"}}
    batch.write([completion, "{bad", chat, response, wrong])
    assert batch.run() == 3
    results = batch.results()
    ids = ["request-0", None, "chat", "response", "wrong"]
    assert [result["custom_id"] for result in results] == ids
    codes = [result["response"] and result["response"]["status_code"] for result in results]
    assert codes == [200, None, 200, 200, 400]
    assert results[1]["error"]["code"] == "invalid_json_line"
    assert len(results[2]["response"]["body"]["choices"]) == 2
    assert results[4]["response"]["body"]["error"]["param"] == "max_tokens"
    answer = server.client.post("/v1/completions", json=completion["body"]).json()
    assert text_of(results[0]) == answer["choices"][0]["text"]
    assert "5 requests: 3 answered, 2 failed" in batch.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_continues(batch: BatchRun, number: signal.Signals) -> None:
    batch.write(requests())
    process = batch.start("--max-batch-size", "2")
    wait_until(lambda: batch.num_results() >= 3, 60, "three results")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(30) == (-number if number is signal.SIGKILL else 128 + number)
    assert_ended(family)
    kept = batch.target.read_bytes()
    assert 3 <= kept.count(b"\n") < NUM_REQUESTS
    assert batch.run() == 0
    whole = batch.target.read_bytes()
    assert whole.startswith(kept[: kept.rindex(b"\n") + 1])
    results = batch.results()
    assert [one["custom_id"] for one in results] == [one["custom_id"] for one in requests()]
    assert all(one["response"]["status_code"] == 200 for one in results)


def test_a_shard_that_dies_is_no_result(batch: BatchRun) -> None:
    batch.write(requests())
    process = batch.start("--max-batch-size", "2")
    wait_until(lambda: batch.num_results() >= 3, 60, "three results")
    (shard,) = (
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if any("text-generation-server" in part for part in child.cmdline())
    )
    shard.kill()
    assert process.wait(30) == 1
    assert all(one["response"]["status_code"] == 200 for one in batch.results())
    assert batch.num_results() < NUM_REQUESTS
    assert batch.run() == 0
    assert batch.num_results() == NUM_REQUESTS


def test_results_of_something_else(batch: BatchRun) -> None:
    batch.write(requests()[:2])
    batch.target.write_text("my notes\n")
    assert batch.run() == 1
    assert batch.target.read_text() == "my notes\n"
    (error,) = [line for line in batch.log.read_text().splitlines() if " ERROR " in line]
    assert "line 1 of --output" in error


def test_a_bar_on_a_terminal(batch: BatchRun) -> None:
    batch.write(requests()[:5])
    ours, theirs = pty.openpty()
    process = batch.start(stderr=theirs)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            drawn += os.read(ours, 4096)
        except OSError:  # the other side of the terminal is closed
            break
    os.close(ours)
    assert process.wait(30) == 0
    assert b"5/5" in drawn and b"tokens/s" in drawn
