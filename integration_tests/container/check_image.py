"""The content of the image: its size, its settings, and every file of every layer."""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from integration_tests.container.conftest import SECRET
from integration_tests.container.podman import BASE_IMAGE, IMAGE, Podman

MAX_BYTES = 1_600_000_000
# Folders that the layers on top of the base may change.
PLACES = re.compile(r"(data|etc|opt/pytgi|tmp|usr|var|run|root)(/|$)|opt$")
LEFTOVERS = re.compile(
    r"(^|/)(\.git|\.env|\.netrc|token|pip\.conf|direct_url\.json|requirements\.txt|install-packages"
    r"|torch/test|torch/include|pip-.*\.dist-info|[^/]*\.whl)(/|$)"
    r"|(^|/)tests/|^(build|mnt|root|tmp|run|opt/(?!pytgi))/?.|^var/(cache|log|lib/apt/lists)/."
)


@pytest.fixture(scope="module")
def layers(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The layers that were added to the base, as archives."""
    folder = tmp_path_factory.mktemp("layers")
    archive = folder / "image.tar"
    podman.run("save", "--format", "docker-archive", "--output", archive, IMAGE, timeout_s=600)
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    archive.unlink()
    manifest = json.loads((folder / "manifest.json").read_text())[0]
    below = len(podman.inspect(BASE_IMAGE)["RootFS"]["Layers"])
    return [folder / name for name in manifest["Layers"][below:]]


def files(layers: list[Path]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Each existing entry of the layers, and its content if it is a file."""
    for layer in layers:
        with tarfile.open(layer) as archive:
            for entry in archive:
                if Path(entry.name).name.startswith(".wh."):
                    continue  # marks a file of a lower layer as deleted
                yield entry, archive.extractfile(entry) if entry.isfile() else None


def test_size(podman: Podman) -> None:
    size = podman.inspect(IMAGE)["Size"]
    print(f"{size / 1e6:.0f} MB")
    assert size < MAX_BYTES


def test_settings(podman: Podman) -> None:
    image = podman.inspect(IMAGE)
    config = image["Config"]
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["text-generation-launcher"]
    assert not config.get("Cmd")
    assert list(config["ExposedPorts"]) == ["80/tcp"]
    assert image["Healthcheck"]["Test"] == ["CMD", "healthcheck.py"]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    assert environment["PORT"] == "80"
    assert environment["HUGGINGFACE_HUB_CACHE"] == "/data"
    assert SECRET not in json.dumps(image)
    assert SECRET not in podman.run("history", "--no-trunc", "--format", "json", IMAGE)


def test_no_leftover(layers: list[Path]) -> None:
    entries = [entry for entry, _ in files(layers)]
    names = [entry.name.removeprefix("./").rstrip("/") for entry in entries]
    assert len(names) > 5000
    assert [name for name in names if LEFTOVERS.search(name)] == []
    assert [name for name in names if not PLACES.match(name)] == []


def test_no_secret(layers: list[Path]) -> None:
    num_read = 0
    for entry, content in files(layers):
        if content is not None:
            assert SECRET.encode() not in content.read(), entry.name
            num_read += 1
    assert num_read > 5000


def test_nobody_else_can_write(layers: list[Path]) -> None:
    """Only root can change files of the image, and no file is setuid or setgid."""
    writable = set()
    for entry, _ in files(layers):
        if not entry.issym():
            assert not (entry.isfile() and entry.mode & 0o6000), f"{entry.name} is setuid"
            assert entry.uid == 0, entry.name
            if entry.mode & 0o002:
                writable.add(entry.name.removeprefix("./").rstrip("/"))
    assert writable <= {"data", "tmp", "var/tmp", "run/lock"}


def test_packages_have_a_layer_of_their_own(layers: list[Path]) -> None:
    """A change of the source changes only the last layer."""
    with tarfile.open(layers[-1]) as archive:
        sources = archive.getnames()
    packages = {name.split("/")[5] for name in sources if "/site-packages/" in name}
    assert {name for name in packages if not re.match(r"text_generation_|pytgi-", name)} == set()
    assert layers[-1].stat().st_size < 30_000_000
