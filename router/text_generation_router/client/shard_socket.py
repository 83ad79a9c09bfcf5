"""The socket of a shard: that it belongs to this user, and is not exchanged."""

import asyncio
import os
import socket
import stat
import struct

from text_generation_router.errors import GenerationError

_POLL_S = 0.02  # a start takes seconds, so that this delays it by nothing
# struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")


class ShardSocket:
    """Owns a reference to one socket on this machine, until closed.

    `address` leads to the checked socket even if another one takes its path later: prompts go only
    to a process of this user, or of root.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError while no process listens, GenerationError if it is another user's."""
        self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # For gRPC, behind `unix:`. A name in /proc leads to the file itself, not to its path.
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
        """`address` is invalid from now on."""
        os.close(self._descriptor)


def path_of(url: str) -> str:
    """The path in the address of a shard: `unix:path` or `unix:///path`."""
    path = url.removeprefix("unix:")
    return path[2:] if path.startswith("//") else path


def _listener(address: str) -> int:
    """The user id of the listening process, from the kernel."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full backlog raises OSError
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
