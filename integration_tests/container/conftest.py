"""The image under test and the containers that run it.

The files are called check_*.py, so that `pytest` alone leaves them out: they need root, podman and
five minutes. `make container-test` names them.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.container.podman import IMAGE, ROOT, Container, Podman, missing_tools

SECRET = "hf_not_for_any_layer"
"""Wrong values that exist where the image is built, and in the builder's environment."""
Start = Callable[..., Container]


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that images are built from."""
    folder = tmp_path_factory.mktemp("context")
    copy_sources(folder)
    return folder


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory, context: Path) -> Iterator[Podman]:
    """podman, with the image built."""
    if missing := missing_tools():
        pytest.fail(missing, pytrace=False)
    podman = Podman(tmp_path_factory.mktemp("podman"))
    podman.make_base_image()
    podman.build(context, "cpu", IMAGE, HF_TOKEN=SECRET, API_KEY=SECRET)
    yield podman
    podman.close()


def copy_sources(context: Path) -> None:
    """The files of a clone, and files of a working tree that must not get into an image."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, context / name)
    for name in (".env", ".git/config", "data/token", "router/.env", "shard/tests/token"):
        path = context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"HF_TOKEN={SECRET}\n")


@pytest.fixture
def start(podman: Podman) -> Iterator[Start]:
    """Starts containers of a test's own, and removes them."""
    started: list[Container] = []

    def start(
        *options: str | Path, arguments: tuple[str, ...] = (), image: str = IMAGE
    ) -> Container:
        container = podman.start(*options, arguments=arguments, image=image)
        started.append(container)
        return container

    yield start
    for container in started:
        print(container.log())
        container.remove()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for /data that any user may write to, with the kernels of earlier tests in it."""
    folder = tmp_path_factory.mktemp("data")
    os.chmod(folder, 0o1777)
    return folder


@pytest.fixture(scope="session")
def model(tiny_model_path: Path) -> Path:
    """The tiny checkpoint, readable for any user."""
    for path in (tiny_model_path, *tiny_model_path.iterdir()):
        path.chmod(0o755)
    return tiny_model_path
