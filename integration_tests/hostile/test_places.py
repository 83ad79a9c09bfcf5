"""Odd places to run at: each is served, or is one sentence that names the place."""

import ctypes
import os
import resource
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, wait_until

NOBODY = 65534
PROMPT = "the cat sat on "
# All kernels are compiled where there are none, while others use the machine.
COMPILE_TIMEOUT_S = 300.0
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


@pytest.fixture(autouse=True)
def is_root() -> None:
    if os.geteuid() != 0:
        pytest.fail("these tests mount and own files as others: run them as root, as CI does")


def serves(handle: LauncherHandle) -> str:
    """Ready, answers, ends in order; its log."""
    wait_until(
        lambda: "Ready on" in handle.log or handle.process.poll() is not None,
        COMPILE_TIMEOUT_S,
        "it is ready",
    )
    handle.wait_until_ready()
    assert handle.generate(PROMPT, max_new_tokens=2)["generated_text"]
    return handle.stop()


def errors_of(handle: LauncherHandle) -> list[str]:
    """The sentences with which it ends."""
    assert handle.wait_for_exit() == 1
    assert "Traceback" not in handle.log
    return [line for line in handle.log.splitlines() if " ERROR " in line]


def error_of(handle: LauncherHandle) -> str:
    """The only one."""
    (error,) = errors_of(handle)
    return error


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A separate file system, removed after the block."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_names_that_are_not_ascii_where_they_are_no_utf8(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    model = tmp_path / "modèle-模型"
    shutil.copytree(tiny_model_path, model)
    log = serves(launch(model, LC_ALL="C"))
    assert str(model) in log


def test_a_name_that_is_no_text(launch: Launch, tiny_model_path: Path, tmp_path: Path) -> None:
    model = tmp_path / os.fsdecode(b"model-\xff")
    shutil.copytree(tiny_model_path, model)
    *of_children, error = errors_of(launch(model))
    # The router reads the tokenizer while the shard reads the weights. The launcher reports the one
    # that fails first, in the last line; the other may have written its own error before it ended.
    router, shard = (
        "model-\\udcff/tokenizer.json cannot be read",
        "/model.safetensors is not a readable safetensors file",
    )
    assert " ERROR text_generation_launcher: " in error
    assert router in error or shard in error
    assert len(of_children) <= 1
    assert all((shard if router in error else router) in other for other in of_children)


def test_no_temporary_folder(launch: Launch, tiny_model_path: Path) -> None:
    """Sockets need a place."""
    folders = ("/tmp", "/var/tmp", "/usr/tmp", "/dev/shm")

    def make_read_only() -> None:
        # In this process's own view of the files, which stay where they are.
        assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        for folder in filter(os.path.isdir, folders):
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    handle = launch(tiny_model_path, in_child=make_read_only, chooses_sockets=False)
    error = error_of(handle)
    assert "there is no place for the shards' sockets (/tmp: Read-only file system" in error
    assert error.endswith(
        "set TMPDIR to a folder that can be written, or choose a place with --shard-uds-path"
    )


def test_a_folder_of_kernels_that_is_full(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    with mounted(tmp_path / "small", "size=64k") as folder:
        (folder / "rest").write_bytes(b"x" * 4096 * 10)
        log = serves(launch(tiny_model_path, NUMBA_CACHE_DIR=str(folder)))
    assert f"compiled kernels are not cached in {folder}/pytgi-kernels-" in log
    assert "No space left on device" in log


@pytest.mark.parametrize("whose", ["others may write", "another user's"])
def test_a_folder_of_kernels_that_others_can_write(
    launch: Launch, tiny_model_path: Path, tmp_path: Path, whose: str
) -> None:
    """What lies there is run."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    if whose == "others may write":
        folder.chmod(0o777)
        sentence = f"others may write to {folder} (mode 0777)"
    else:
        os.chown(folder, NOBODY, NOBODY)
        sentence = f"{folder} belongs to user {NOBODY}"
    log = serves(launch(tiny_model_path, NUMBA_CACHE_DIR=str(folder)))
    warnings = [line for line in log.splitlines() if " WARN" in line and str(folder) in line]
    assert len(warnings) == 1 and sentence in warnings[0]
    assert not list(folder.glob("*/*"))


def test_kernels_that_all_may_write_are_not_made(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    """With a umask that denies nothing, and a place of one's own."""
    folder = tmp_path / "kernels"
    environment = {"in_child": lambda: os.umask(0), "NUMBA_CACHE_DIR": str(folder)}
    handle = launch(tiny_model_path, **environment)
    # The first ones tell how all are made.
    wait_until(lambda: len(list(folder.rglob("*.nbi"))) > 5, COMPILE_TIMEOUT_S, "some are made")
    handle.kill()
    made = [folder, *folder.rglob("*")]
    assert not [path for path in made if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]


def test_few_files_may_be_open(launch: Launch, tiny_model_path: Path) -> None:
    """Said at the start, said when it happens, and over when the connections have gone."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 80))

    handle = launch(tiny_model_path, in_child=limit)
    handle.wait_until_ready()
    assert "may open 80 files (ulimit -Hn), and --max-concurrent-requests 128 takes" in handle.log
    for process in handle.family():
        assert process.rlimit(resource.RLIMIT_NOFILE) == (80, 80)
    with ExitStack() as stack:

        def is_told() -> bool:
            # What the server's start has opened and closes meanwhile is room for some more.
            for _ in range(20):
                connection = socket.create_connection(("127.0.0.1", handle.port))
                stack.callback(connection.close)
            return "Can not accept connections" in handle.log

        wait_until(is_told, 10, "it is said")
    wait_until(lambda: is_healthy(handle), 20, "there is room again")
    assert handle.generate(PROMPT, max_new_tokens=2)["generated_text"]
    assert handle.log.count("Can not accept connections") == 1
    handle.stop()


def is_healthy(handle: LauncherHandle) -> bool:
    try:
        return httpx.get(f"{handle.url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_the_limit_of_files_is_raised(launch: Launch, tiny_model_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

    handle = launch(tiny_model_path, in_child=limit)
    handle.wait_until_ready()
    for process in handle.family():
        assert process.rlimit(resource.RLIMIT_NOFILE) == (most, most)
    assert "ulimit" not in handle.stop()
