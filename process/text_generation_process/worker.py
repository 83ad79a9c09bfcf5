"""Runs functions on users' input in processes that can be killed.

A `Worker` starts a server (`python -m text_generation_process.worker`), which imports a module,
prepares it once, and never sees users' input. The server forks runners. A runner takes calls, one
at a time, from a socket of its own. It may be killed at any time, and the
next one is forked in milliseconds. Arguments and answers are bytes, so that no answer can run code
in the parent.
"""

import ctypes
import gc
import importlib
import io
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Loaded here, because a fork must not wait for a lock of the loader.
_prctl = ctypes.CDLL(None).prctl
START_S = 30.0
"""For preparing the module: long, because the machine also loads the model."""
# A runner ends itself at the timeout of its call. Without an answer this much later, all processes
# of the worker are replaced.
_MARGIN_S = 1.0
# A runner that has grown by more than this ends after its answer, which frees its memory.
_KEPT_BYTES = 64 << 20
# Length of the function's name, timeout, length of the argument; then both.
_CALL = struct.Struct(">BdQ")
# Whether there can be further calls, length of the answer; then the answer.
_ANSWER = struct.Struct(">?Q")
_PIECE_BYTES = 1 << 20


class WorkerError(Exception):
    """A call has no answer: its runner died, of lack of memory for example."""


class WorkerTimeoutError(WorkerError):
    """A call took too long, and its runner was killed."""


class WorkerStartError(WorkerError):
    """No process could be started, or its module could not be prepared."""


class WorkerClosedError(WorkerError):
    """The worker is closed."""


class Worker:
    """Owns a server process and its runners: as many as there are calls at a time.

    Thread-safe. Processes are started when they are needed, and replaced when they die. None of
    them outlives `close` or this process, and none has a socket of this process.
    """

    def __init__(self, module: str, argument: bytes = b"", *, memory_bytes: int | None) -> None:
        """The server calls `prepare(argument)` of the module once, which must not start threads.
        The calls are to methods of what it returns, or functions of the module if that is nothing.
        A runner may add `memory_bytes`; None: any number."""
        self._module, self._argument, self._memory_bytes = module, argument, memory_bytes
        self._starting = threading.Lock()
        self._server: _Server | None = None
        self._idle: list[tuple[socket.socket, _Server]] = []
        """Connections to runners without a call, each with the server that forked it."""
        self._is_closed = False

    def start(self) -> None:
        """Returns when a runner is ready; without it, the first call waits for that. Raises
        WorkerStartError and WorkerClosedError."""
        self._release(*self._take())

    def call(
        self, function: str, argument: bytes, timeout_s: float, *, may_repeat: bool = True
    ) -> bytes:
        """What the method or function of this name returns. Raises WorkerError. A call whose server
        died is repeated once: no call can end the server of another, but the system may."""
        connection, server = self._take()
        began = time.monotonic()
        try:
            answer, has_more = _ask(connection, function, argument, timeout_s)
        except (OSError, EOFError) as error:
            connection.close()
            if self._is_closed:
                raise WorkerClosedError("the worker is closed") from error
            if isinstance(error, TimeoutError):
                self._end()
            if time.monotonic() - began >= timeout_s:
                raise WorkerTimeoutError(f"{function} did not end in {timeout_s:g} s") from error
            if may_repeat and not server.is_alive:
                return self.call(function, argument, timeout_s, may_repeat=False)
            raise WorkerError(f"the process of {function} died") from error
        if has_more:
            self._release(connection, server)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Ends all processes; calls that run fail. May be repeated."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()
        with suppress(IndexError):
            while True:
                self._idle.pop()[0].close()

    def _release(self, connection: socket.socket, server: "_Server") -> None:
        self._idle.append((connection, server))
        if self._is_closed:
            self._end()

    def _take(self) -> tuple[socket.socket, "_Server"]:
        """A connection to a runner for one call, and its server. Raises WorkerStartError and
        WorkerClosedError."""
        with suppress(IndexError):
            while True:
                connection, server = self._idle.pop()
                if server.is_alive and not _has_ended(connection):
                    return connection, server
                connection.close()
        try:
            connection, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerStartError(f"can not start a process: {error}") from error
        try:
            with theirs, self._starting:
                present = self._server
                server = present if present and present.is_alive else self._new_server()
                socket.send_fds(server.connection, [b"r"], [theirs.fileno()])
        except (OSError, EOFError) as error:
            connection.close()
            self._end()
            if self._is_closed:
                raise WorkerClosedError("the worker is closed") from error
            raise WorkerStartError(f"can not start a process: {error}") from error
        return connection, server

    def _new_server(self) -> "_Server":
        """Raises OSError and EOFError."""
        self._end()
        server = self._server = _Server(self._module, self._memory_bytes or 0)
        if self._is_closed:
            raise EOFError("the worker is closed")
        _ask(server.connection, "prepare", self._argument, START_S)
        return server


class _Server(subprocess.Popen[bytes]):
    """The server process. Owns the socket to it, its standard input."""

    def __init__(self, module: str, memory_bytes: int) -> None:
        """Raises OSError."""
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "text_generation_process.worker"]
        command += [module, str(memory_bytes)]
        try:
            with theirs:
                # Ctrl-C at a terminal does not reach it.
                super().__init__(command, stdin=theirs.fileno(), start_new_session=True)
        except BaseException:
            self.connection.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it runs. Its socket is closed before its runners end."""
        try:
            return self.poll() is None and not _has_ended(self.connection)
        except ValueError:  # `end` has closed it meanwhile
            return False

    def end(self) -> None:
        """Kills it, waits until it is gone, and closes the connection. May be repeated."""
        self.kill()
        self.wait()
        self.connection.close()


def _ask(
    connection: socket.socket, function: str, argument: bytes, timeout_s: float
) -> tuple[bytes, bool]:
    """The answer to a call, and whether there can be further calls. Raises OSError (TimeoutError
    if the other side did not end itself in time), and EOFError if it has ended."""
    until = time.monotonic() + timeout_s + _MARGIN_S
    name = function.encode()
    connection.settimeout(timeout_s + _MARGIN_S)
    connection.sendall(_CALL.pack(len(name), timeout_s, len(argument)) + name)
    connection.sendall(argument)
    has_more, size = _ANSWER.unpack(_receive(connection, _ANSWER.size, until))
    return _receive(connection, size, until), has_more


def _receive(connection: socket.socket, num_bytes: int, until: float | None = None) -> bytes:
    """Exactly `num_bytes`. Raises OSError, and EOFError if the other side has ended."""
    received = io.BytesIO()
    while num_bytes:
        if until is not None:
            # Not 0, which would make the socket non-blocking.
            connection.settimeout(max(1e-3, until - time.monotonic()))
        piece = connection.recv(min(_PIECE_BYTES, num_bytes))
        if not piece:
            raise EOFError("it has ended")
        received.write(piece)
        num_bytes -= len(piece)
    return received.getvalue()  # without a copy


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended: an idle one sends nothing else."""
    poller = select.poll()  # not `select`, which takes no descriptor above 1023
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def end_with_parent(parent: int) -> None:
    """Called by a child: the kernel kills it when its parent process ends, even if it has ended
    already. (Exactly: when the thread that started the child ends.)"""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


# ---- In the server process ----


def main() -> None:
    """Forks a runner for each socket that comes, until the parent closes its end."""
    name, memory_bytes = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent may end at any time, before it sends its argument or reads an answer.
    with socket.socket(fileno=0) as control, suppress(ConnectionError):
        module = importlib.import_module(name)
        try:
            _, argument = _next_call(control)
        except EOFError:
            return
        prepared = module.prepare(argument) or module
        _send(control, b"", has_more=True)
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runners that end leave nothing
        server = os.getpid()
        while True:
            message, files, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            # If it can not fork, the parent sees the closed connection.
            with socket.socket(fileno=files[0]) as connection, suppress(OSError):
                if os.fork() == 0:
                    _run(connection, prepared, int(memory_bytes), server)


def _run(connection: socket.socket, prepared: Any, memory_bytes: int, server: int) -> None:
    """One runner. Never returns, and skips Python's cleanup."""
    try:
        end_with_parent(server)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The server's socket; and no output, because a traceback could show a user's text.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        if memory_bytes:
            num_pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            limit = num_pages * resource.getpagesize() + memory_bytes
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        most_bytes = _peak_bytes() + _KEPT_BYTES
        has_more = True
        while has_more:
            name, argument = _next_call(connection)
            answer = getattr(prepared, name)(argument)
            has_more = _peak_bytes() <= most_bytes
            _send(connection, answer, has_more)
    finally:
        os._exit(0)


def _next_call(connection: socket.socket) -> tuple[str, bytes]:
    """The name of the function and its argument. From now on, this process ends at the timeout.
    Raises EOFError."""
    num_name_bytes, timeout_s, num_bytes = _CALL.unpack(_receive(connection, _CALL.size))
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # its default action ends the process
    return _receive(connection, num_name_bytes).decode(), _receive(connection, num_bytes)


def _send(connection: socket.socket, answer: bytes, has_more: bool) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    connection.sendall(_ANSWER.pack(has_more, len(answer)))
    connection.sendall(answer)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
