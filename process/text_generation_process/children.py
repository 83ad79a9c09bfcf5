"""Child processes for work that may have to be killed."""

import os
import socket
import subprocess
import sys
from contextlib import suppress


class Child:
    """Owns a process that runs a module of the server, and the socket to it.

    The module gets the socket as its standard input, and the id of this process as its first
    argument, for `lifetime.end_with_parent`. Ctrl-C at a terminal does not reach it.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        is_silent: bool = False,
    ) -> None:
        """`is_silent`: its output is discarded, tracebacks too. Raises OSError."""
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, kind)
        """Closed by `end`."""
        output = subprocess.DEVNULL if is_silent else None
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *map(str, (os.getpid(), *arguments))],
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            self.connection.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id, which is not reused before `end`."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once. May be called from any thread."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def end(self) -> None:
        """Kills it, waits until it is gone, and closes the connection. May be repeated."""
        self.kill()
        self._process.wait()
        self.connection.close()
