"""Folders that only this user may write: for compiled code and downloaded weights."""

import os
import stat
import tempfile
from pathlib import Path


def why_untrusted(path: Path) -> str:
    """Why another user could write to this folder or replace it; empty: only this user and root
    can."""
    place = path.resolve()
    for folder in (place, *place.parents):
        state = folder.stat()
        if state.st_uid not in (0, os.geteuid()):
            return f"{folder} belongs to user {state.st_uid}"
        # A group with the user's own number is taken as private.
        is_own_group = state.st_gid == os.geteuid() != 0
        others = state.st_mode & (0o002 if is_own_group else 0o022)
        # For parents like /tmp, the sticky bit is enough: others can not replace the folder.
        if others and (folder == place or not state.st_mode & stat.S_ISVTX):
            return f"others may write to {folder} (mode {stat.S_IMODE(state.st_mode):04o})"
    return ""


def temporary_folder(name: str) -> Path:
    """A private folder of this user among the temporary files, the same at each start. OSError,
    with a sentence, if it can not be used."""
    try:
        path = Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make a folder for temporary files ({error.strerror}): set TMPDIR to one that "
            "can be written"
        ) from error
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        raise OSError(
            f"{path} belongs to user {state.st_uid} or is no folder, and this is user "
            f"{os.geteuid()}: have it removed or set TMPDIR to another folder"
        )
    if state.st_mode & 0o077:
        raise OSError(f"{path} is open to other users: remove it, and it is created again")
    return path
