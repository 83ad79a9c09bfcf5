"""Functions that a `Worker` runs in the tests."""

import os
import signal
from pathlib import Path


class Prepared:
    """Has the argument of `prepare`, and all functions below as methods."""

    def __init__(self, argument: bytes) -> None:
        self._argument = argument

    def with_prepared(self, argument: bytes) -> bytes:
        """Both arguments."""
        return argument + self._argument

    def __getattr__(self, name: str) -> object:
        return globals()[name]


def prepare(argument: bytes) -> Prepared | None:
    """Keeps the argument, or does what it says."""
    if argument == b"fail":
        raise ValueError("it can not be prepared")
    if argument == b"sleep":
        signal.pause()
    return Prepared(argument) if argument else None


def pid(argument: bytes) -> bytes:
    """The process id of the runner."""
    return str(os.getpid()).encode()


def sleep(argument: bytes) -> bytes:
    """Waits without end."""
    while True:
        signal.pause()


def compute(argument: bytes) -> bytes:
    """One instruction of the interpreter that does not end."""
    return str(9 ** (9**9)).encode()


def die(argument: bytes) -> bytes:
    """As if the system killed it."""
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def kill_server(argument: bytes) -> bytes:
    """Ends the server, and this process with it, once for each line end in the file."""
    ends = Path(argument.decode())
    if not (left := ends.read_text()):
        return b"repeated"
    ends.write_text(left[1:])
    os.kill(os.getppid(), signal.SIGKILL)
    return sleep(argument)


def fail(argument: bytes) -> bytes:
    """An error that the function does not turn into an answer."""
    raise ValueError("not shown")


def grow(argument: bytes) -> bytes:
    """Takes more memory than a runner may add."""
    return b"x" * (300 << 20)


def grow_a_little(argument: bytes) -> bytes:
    """Takes more than a runner may keep."""
    assert len(bytearray(b"x") * (100 << 20)) == 100 << 20
    return pid(argument)


def ignore_timeout(argument: bytes) -> bytes:
    """A runner that an attacker has taken over."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return sleep(argument)


def descriptors(argument: bytes) -> bytes:
    """What the descriptors of the runner are."""
    paths = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return "\n".join(os.readlink(path) for path in paths if path.is_symlink()).encode()
