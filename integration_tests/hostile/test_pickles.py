"""A checkpoint that is a program: it is never run, and harmless ones are converted and served."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from integration_tests.conftest import Launch
from integration_tests.hostile.contained import contained
from integration_tests.test_bad_models import assert_refused


class Evil:
    """Runs a command when it is unpickled by anything that trusts it."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._trace}",)


def pickled(source: Path, target: Path, **more: object) -> Path:
    """A copy of a checkpoint whose weights are a pickle, with additional content."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    torch.save({**weights, **more}, target / "pytorch_model.bin")
    return target


def test_what_runs_something_is_refused_in_one_line(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    directory = pickled(tiny_model_path, tmp_path / "model", evil=Evil(trace))
    fragments = ("pytorch_model.bin is refused", "posix.system", "none of its code was run")
    assert_refused(launch(directory), *fragments)
    assert not trace.exists()
    assert not list(directory.glob("*safetensors*"))


def test_a_shard_reads_no_pickle(tiny_model_path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    directory = pickled(tiny_model_path, tmp_path / "model", evil=Evil(trace))
    command = [sys.executable, "-m", "text_generation_shard.cli", "serve", str(directory)]
    socket = f"--uds-path={tmp_path / 'socket'}"
    ended = subprocess.run([*command, socket, "--device=cpu"], capture_output=True, text=True)
    assert ended.returncode == 1
    lines = [line for line in ended.stdout.splitlines() if " ERROR " in line]
    assert len(lines) == 1, ended.stdout
    assert "pytorch_model.bin, which is a pickle" in lines[0]
    assert f"text-generation-server download-weights {directory}" in lines[0]
    assert not trace.exists()


def test_weights_are_converted_and_served(tiny_model_path: Path, tmp_path: Path) -> None:
    """With the same tokens as from the checkpoint they were taken from."""
    prompt: dict[str, Any] = {"inputs": "the cat sat", "max_new_tokens": 20}
    with contained(tiny_model_path) as handle:
        wanted = handle.generate(**prompt)
    directory = pickled(tiny_model_path, tmp_path / "model")
    with contained(directory) as handle:
        assert handle.generate(**prompt) == wanted
        assert "converting pytorch_model.bin to model.safetensors" in handle.log
    before = load_file(tiny_model_path / "model.safetensors")
    after = load_file(directory / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
