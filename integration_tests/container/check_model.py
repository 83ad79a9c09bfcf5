"""The download and storage of models, and a model that is too large."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.container.conftest import Start
from integration_tests.container.podman import Podman
from integration_tests.hub import FakeHub, serving

FLAGS = ("--model-id", "some/model")


@pytest.fixture
def hub(podman: Podman, model: Path) -> Iterator[FakeHub]:
    """A hub with the tiny checkpoint, reachable from containers."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with serving(FakeHub(files), "0.0.0.0") as hub:
        hub.endpoint = hub.endpoint.replace("0.0.0.0", podman.gateway())
        yield hub


@pytest.fixture
def volume(podman: Podman) -> Iterator[str]:
    """The name of an empty volume."""
    name = podman.run("volume", "create").strip()
    yield name
    podman.run("volume", "rm", "--force", name)


def asked_for_files(hub: FakeHub) -> list[str]:
    """The files that were downloaded since the last call."""
    found = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    hub.requests.clear()
    return found


def test_a_second_start_downloads_nothing(volume: str, start: Start, hub: FakeHub) -> None:
    """With a new volume, a read-only image and an unknown user."""
    options = (
        *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--user", "4242"),
        *("-p", "127.0.0.1::80", "-v", f"{volume}:/data", "-e", f"HF_ENDPOINT={hub.endpoint}"),
        *("-e", "HF_TOKEN=hf_ours"),
    )
    first = start(*options, arguments=FLAGS)
    first.wait_until_ready()
    first.stop()
    assert any(path.endswith("model.safetensors") for path in asked_for_files(hub))
    assert hub.tokens == {"Bearer hf_ours"}

    second = start(*options, arguments=FLAGS)
    second.wait_until_ready()
    log = second.stop()
    assert asked_for_files(hub) == []
    assert "found in the hub cache" in log
    assert "compiled the kernels" not in log  # they are in the volume, too


def test_a_folder_that_docker_made_for_root(
    start: Start, hub: FakeHub, data: Path, tmp_path: Path
) -> None:
    """`-v $PWD/data:/data` works as well, and the log says what it costs."""
    tmp_path.chmod(0o755)
    (tmp_path / "data").mkdir(mode=0o755)
    flags = (
        *("-p", "127.0.0.1::80", "-v", f"{tmp_path}/data:/data"),
        *("-e", f"HF_ENDPOINT={hub.endpoint}"),
        # only to have the kernels at once
        *("-v", f"{data}:/kernels", "-e", "NUMBA_CACHE_DIR=/kernels/.kernels"),
    )
    container = start(*flags, arguments=FLAGS)
    container.wait_until_ready()
    log = container.stop()
    assert "user 1000 may not write to /data: some/model is kept in /tmp" in log
    assert "`chown 1000` the directory" in log
    assert os.listdir(tmp_path / "data") == []


def write_large_checkpoint(model: Path, directory: Path) -> Path:
    """The tiny checkpoint with an embedding of 2 GB of zeros, a sparse file."""
    directory.mkdir()
    for path in model.iterdir():
        if path.suffix == ".json":
            (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    rows = 2_000_000_000 // (4 * config["hidden_size"])
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    data = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    offset = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if tensor["shape"][0] == config["vocab_size"]:
            tensor["shape"][0] = rows
        count = 4
        for length in tensor["shape"]:
            count *= length
        tensor["data_offsets"] = [offset, offset + count]
        offset += count
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return directory


def test_memory_too_small_for_the_model(
    start: Start, data: Path, model: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    large = write_large_checkpoint(model, tmp_path / "large")
    flags = ("--memory", "1500m", "-v", f"{data}:/data", "-v", f"{large}:/model:ro")
    container = start(*flags, arguments=("--model-id", "/model"))
    assert container.wait_for_exit() == 1
    errors = [line for line in container.log().splitlines() if " ERROR " in line]
    assert len(errors) == 1
    assert re.search(
        r"the weights take 2\.00 GB in float32, and of the memory limit of 1\.57 GB that this "
        r"process runs under \(a container's --memory\) [01]\.\d\d GB are left: raise the limit",
        errors[0],
    )
    assert not container.state()["OOMKilled"]


def test_memory_too_small_for_anything(start: Start, data: Path) -> None:
    """The memory can not be predicted, so the kernel kills the shard; the launcher says why."""
    container = start("--memory", "150m", "--memory-swap", "150m", "-v", f"{data}:/data")
    assert container.wait_for_exit() == 1
    assert "as the system does when memory runs out" in container.log()
