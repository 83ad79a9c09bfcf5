"""The socket of a shard: that it is one of our own user's, and stays the one it was."""

import asyncio
import os
import socket
import stat
import struct

from text_generation_router.errors import GenerationError

_POLL_S = 0.02
# struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")


class ShardSocket:
    """Owns a reference to one socket on this machine, until closed.

    `address` leads to the socket that was looked at and to no other, whatever is put in the place
    of its name later: prompts go only to a process of our own user's, or of root's.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError while nobody listens there, GenerationError if it is a stranger's."""
        self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # What `unix:` is followed by: a name in /proc leads to the file itself, not to a path.
        self.address = f"/proc/self/fd/{self._descriptor}"
        try:
            state = os.fstat(self._descriptor)
            if not stat.S_ISSOCK(state.st_mode):
                raise GenerationError(f"{path} is not a socket: give that of a shard")
            _check_user(path, state.st_uid)
            _check_user(path, _listener(self.address))
        except BaseException:
            self.close()
            raise

    @classmethod
    async def wait_for(cls, path: str) -> "ShardSocket":
        """The socket, as soon as a shard listens there."""
        while True:
            try:
                return cls(path)
            except OSError:
                await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Nobody can connect with `address` any more."""
        os.close(self._descriptor)


def path_of(url: str) -> str:
    """The path in the address of a shard: `unix:path` or `unix:///path`."""
    path = url.removeprefix("unix:")
    return path[2:] if path.startswith("//") else path


def _listener(address: str) -> int:
    """The user whose process listens, as the system says."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # one that is full is one that can not be asked now
        probe.connect(address)
        found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def _check_user(path: str, user: int) -> None:
    if user not in (0, os.geteuid()):
        raise GenerationError(
            f"{path} is a socket of user {user}, and this router runs as user {os.geteuid()}: "
            "nothing is sent there; remove it, and give the shards a folder that others can not "
            "write to, or run both as one user"
        )
