"""Folders to which no other user may have written."""

import os
import stat
from pathlib import Path

import pytest
from text_generation_shard import trusted_folders as places
from text_generation_shard.device.cuda.device import choose_directory
from text_generation_shard.trusted_folders import temporary_folder, why_untrusted

NOBODY = 65534


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir(mode=0o755)
    assert why_untrusted(folder) == ""
    for mode in (0o777, 0o775, 0o1777):
        folder.chmod(mode)
        assert why_untrusted(folder).startswith(f"others may write to {folder} (mode ")
    folder.chmod(0o755)
    tmp_path.chmod(0o777)
    assert str(tmp_path) in why_untrusted(folder)
    tmp_path.chmod(0o1777)  # as /tmp is
    assert why_untrusted(folder) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    assert why_untrusted(folder) == f"{folder} belongs to user {NOBODY}"
    (folder / "b").mkdir()
    assert why_untrusted(folder / "b") == f"{folder} belongs to user {NOBODY}"


def test_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.tempfile, "tempdir", str(tmp_path))
    folder = temporary_folder("x")
    assert folder == tmp_path / f"x-{os.geteuid()}" == temporary_folder("x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(OSError, match="is open to other users: remove it"):
        temporary_folder("x")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="or is no folder"):
        temporary_folder("x")


@pytest.mark.parametrize("place", ["own", "open", "file", "~"])
def test_where_kernels_of_a_gpu_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    monkeypatch.setattr(places.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    asked = "~/kernels" if place == "~" else str(tmp_path / place / "kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", asked)
    choose_directory()
    chosen = os.environ["TRITON_CACHE_DIR"]
    if place == "own":
        assert chosen == asked and caplog.text == ""
    else:
        assert chosen == str(tmp_path / f"pytgi-triton-{os.geteuid()}")
        assert f"not cached in {asked} but in {chosen}: " in caplog.text
