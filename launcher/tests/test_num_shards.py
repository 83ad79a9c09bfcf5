"""The number of shards, by TGI's rules."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from text_generation_launcher.config import count_gpus, find_num_shards
from text_generation_process.option import InvalidOptions

CUDA, NVIDIA = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"


def never() -> int:
    raise AssertionError("GPUs were counted where their number does not matter")


def has(num: int) -> Callable[[], int]:
    return lambda: num


@pytest.mark.parametrize(
    "sharded, num_shard, device, environment, gpus, expected",
    [
        # The requested number, on any device.
        (None, 3, None, {}, never, 3),
        (True, 2, "cpu", {}, never, 2),
        (False, 2, None, {CUDA: "0"}, never, 2),
        (False, None, None, {CUDA: "0,1"}, never, 1),
        # No flag: the variables count, if there is a GPU.
        (None, None, None, {}, never, 1),
        (None, None, None, {CUDA: "0"}, never, 1),
        (None, None, None, {CUDA: "0,1"}, has(2), 2),
        (None, None, None, {CUDA: "0,1"}, has(0), 1),
        (None, None, "cuda", {CUDA: "0,1"}, never, 2),
        (None, None, "cpu", {CUDA: "0,1", NVIDIA: "all"}, never, 1),
        (None, None, None, {CUDA: "", NVIDIA: "all"}, never, 1),
        (None, None, None, {CUDA: "-1"}, never, 1),
        (None, None, None, {CUDA: "0, 1,-1,2"}, has(8), 2),
        (None, None, None, {CUDA: "GPU-ab,MIG-cd,GPU-ef"}, has(8), 3),
        (None, None, None, {CUDA: "0", NVIDIA: "0,1,2"}, never, 1),
        (None, None, None, {NVIDIA: "0,1,2"}, has(3), 3),
        (None, None, None, {NVIDIA: "all"}, has(4), 4),
        (None, None, None, {NVIDIA: "all"}, has(0), 1),
        (None, None, None, {NVIDIA: "void"}, has(2), 2),
        (None, None, None, {NVIDIA: ""}, has(2), 2),
        # All GPUs are requested.
        (True, None, None, {CUDA: "0,1"}, has(2), 2),
        (True, None, None, {NVIDIA: "all"}, has(2), 2),
        (True, None, None, {}, has(8), 8),
        (True, None, "cuda", {CUDA: "0,1"}, has(0), 2),
        # All GPUs are requested, and there are not enough.
        (True, 1, None, {CUDA: "0,1"}, never, "--sharded true and --num-shard 1 contradict"),
        (True, None, "cpu", {CUDA: "0,1"}, never, "needs --num-shard on a CPU"),
        (True, None, None, {}, has(0), "needs --num-shard on a CPU"),
        (True, None, None, {CUDA: "0,1"}, has(0), "needs --num-shard on a CPU"),
        (True, None, None, {CUDA: "0"}, has(8), "more than one GPU, and 1 can be seen"),
        (True, None, None, {}, has(1), "more than one GPU, and 1 can be seen"),
    ],
)
def test_the_number(sharded, num_shard, device, environment, gpus, expected):
    given = (sharded, num_shard, device, environment, gpus)
    if isinstance(expected, int):
        assert find_num_shards(*given) == expected
        return
    with pytest.raises(InvalidOptions, match=expected) as caught:
        find_num_shards(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "script, expected",
    [
        ("echo GPU-1; echo GPU-2", 2),
        ("exit 0", 0),
        ("echo 'No devices were found'; exit 6", 3),  # the device files of the driver count
        (None, 3),
    ],
)
def test_gpus_are_counted_by_nvidia_smi(script, expected, tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    command = tmp_path / "nvidia-smi"
    if script is not None:
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    assert count_gpus(str(command), tmp_path) == expected


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"SM_NUM_GPUS": "4"}, "4"),
        ({"SM_NUM_GPUS": "4", "NUM_SHARD": "2"}, "4"),
        ({"NUM_SHARD": "2"}, "2"),
        ({"SM_NUM_GPUS": "0", "NUM_SHARD": "2"}, "2"),
        ({"SM_NUM_GPUS": "0"}, ""),
        ({}, ""),
    ],
)
def test_sagemaker_says_how_many_gpus_there_are(environment, expected, tmp_path: Path):
    launcher = tmp_path / "text-generation-launcher"
    launcher.write_text('#!/bin/sh\necho "$NUM_SHARD"\n')
    launcher.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = Path(__file__).parents[2] / "docker/sagemaker-entrypoint"
    said = subprocess.check_output(
        ["sh", str(script)], env={"PATH": path, "HF_MODEL_ID": "a/b", **environment}, text=True
    )
    assert said == f"{expected}\n"
