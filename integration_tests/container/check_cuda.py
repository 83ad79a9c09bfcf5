"""The image for CUDA without a GPU, with torch for CPUs instead of 3 GB of CUDA: its C compiler,
its folders for compiled kernels, and the error that ends its server.

triton comes from this environment: torch for CPUs does not include it.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from integration_tests.container.check_container import NO_PRIVILEGES, READ_ONLY
from integration_tests.container.conftest import Start
from integration_tests.container.podman import CUDA_IMAGE, Podman

IMAGE_PYTHON = (3, 11)
SCRIPT = "/mnt/first_launch.py"
NO_DEVICE = "--device cuda: torch finds no CUDA device; use --device cpu"


@pytest.fixture(scope="module", autouse=True)
def cuda_image(podman: Podman, context: Path) -> None:
    """The layers of the image for CPUs, and a C compiler."""
    podman.build(context, "cuda", CUDA_IMAGE)


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """An empty folder for /data that any user may write to."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def with_triton() -> tuple[str | Path, ...]:
    """Options of a container in which this environment's triton can be imported."""
    if sys.version_info[:2] != IMAGE_PYTHON:
        pytest.skip("triton is made for this environment's Python, and the image has another")
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    script = Path(__file__).with_name(Path(SCRIPT).name)
    return (
        *("-v", f"{Path(found.origin).parent}:/mnt/triton:ro", "-v", f"{script}:{SCRIPT}:ro"),
        # The backends are found without the metadata that pip would install.
        *("-e", "PYTHONPATH=/mnt", "-e", "TRITON_BACKENDS_IN_TREE=1", "--entrypoint", "python"),
    )


@pytest.mark.parametrize("options", [(), (*READ_ONLY, *NO_PRIVILEGES)], ids=["usual", "read-only"])
def test_a_first_launch(start: Start, kernels: Path, options: tuple[str, ...]) -> None:
    """Triton compiles C and a kernel as the ordinary user, and both are kept in /data."""
    mounts = (*with_triton(), "-v", f"{kernels}:/data")
    container = start(*options, *mounts, arguments=(SCRIPT,), image=CUDA_IMAGE)
    status, log = container.wait_for_exit(), container.log()
    assert status == 0, log
    for kind in (".so", ".cubin", ".nbi"):
        owners = {path.stat().st_uid for path in kernels.rglob(f"*{kind}")}
        assert owners == {1000}, f"{kind}: {owners}\n{log}"


def test_a_first_launch_as_a_user_who_may_not_write_to_data(start: Start, kernels: Path) -> None:
    kernels.chmod(0o755)
    options = (*READ_ONLY, *NO_PRIVILEGES, "--user", "4242:4242", "-v", f"{kernels}:/data")
    container = start(*options, *with_triton(), arguments=(SCRIPT,), image=CUDA_IMAGE)
    status, log = container.wait_for_exit(), container.log()
    assert status == 0, log
    for folder in ("/data/.kernels/triton but in /tmp/pytgi-triton-4242", "/data/.kernels/pytgi"):
        assert f"compiled kernels are not cached in {folder}" in log


def test_without_a_device(start: Start, kernels: Path) -> None:
    """The server reports what is missing and ends."""
    options = (*READ_ONLY, "-v", f"{kernels}:/data")
    container = start(*options, arguments=("--device", "cuda"), image=CUDA_IMAGE)
    status, log = container.wait_for_exit(60), container.log()
    assert status == 1, log
    assert log.splitlines()[-1].endswith(NO_DEVICE)
    assert "Traceback" not in log
