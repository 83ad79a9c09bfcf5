"""The number of shards by TGI's rules, from two flags and the visible GPUs."""

import subprocess
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path

from text_generation_process.option import InvalidOptions

# Values of NVIDIA_VISIBLE_DEVICES that list no GPU, although a container may have some.
_NO_LIST = ("", "all", "void", "none")
_BY_NAME = ("GPU-", "MIG-")
_DEVICES = Path("/dev")


def find_num_shards(
    sharded: bool | None,
    num_shard: int | None,
    device: str | None,
    environment: Mapping[str, str],
    count_gpus: Callable[[], int],
) -> int:
    """At least 1. Raises InvalidOptions.

    None means "not given". `count_gpus` returns the number of GPUs of this machine. It is called
    only if the result matters, because it may take a second. On a CPU nothing is counted.
    """
    if num_shard is not None:
        if sharded and num_shard <= 1:
            raise InvalidOptions(
                f"--sharded true and --num-shard {num_shard} contradict each other: give "
                "--num-shard 2 or more, or leave out --sharded"
            )
        return num_shard
    if sharded is False:
        return 1
    named = None if device == "cpu" else _num_named(environment, count_gpus)
    if not sharded:
        # The variable may be set where there is no GPU, and then the shard computes on the CPU.
        is_split = (named or 0) > 1 and (device == "cuda" or count_gpus() > 0)
        return named if named and is_split else 1
    present = 0 if device == "cpu" else count_gpus()
    if device != "cuda" and present == 0:
        raise InvalidOptions(
            "--sharded true needs --num-shard on a CPU, where there are no GPUs to count: add "
            "--num-shard 2 or more"
        )
    num = present if named is None else named
    if num <= 1:
        raise InvalidOptions(
            f"--sharded true needs more than one GPU, and {num} can be seen: make more visible "
            "(CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES), give --num-shard, or leave out "
            "--sharded"
        )
    return num


def _num_named(environment: Mapping[str, str], count_gpus: Callable[[], int]) -> int | None:
    """The number of GPUs in the environment's variables; None without these variables."""
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        # CUDA stops at the first name that is not a GPU: `-1` hides all names after it.
        names = [name.strip() for name in chosen.split(",")]
        return len([*takewhile(lambda name: name.isdigit() or name.startswith(_BY_NAME), names)])
    if (chosen := environment.get("NVIDIA_VISIBLE_DEVICES")) is not None:
        if chosen.strip().lower() in _NO_LIST:
            return count_gpus()
        return sum(bool(name.strip()) for name in chosen.split(","))
    return None


def count_gpus(command: str = "nvidia-smi", devices: Path = _DEVICES) -> int:
    """The number of NVIDIA GPUs that nvidia-smi lists; if it does not run, the driver's device
    files."""
    try:
        listed = subprocess.run(
            [command, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return len(list(devices.glob("nvidia[0-9]*")))
    return sum(bool(line.strip()) for line in listed.stdout.splitlines())
