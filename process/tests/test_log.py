import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from text_generation_process.log import MAX_LINES, LineStream, Output

from launcher.tests.conftest import wait_until


def describe(count: int) -> str:
    return f"{count} dropped"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of one page with a slow reader."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def read_until(end: int, last: bytes) -> list[bytes]:
    """All lines up to the line `last`."""
    data = b""
    while not data.endswith(last + b"\n"):
        data += os.read(end, 1 << 16)
    return data.splitlines()


def test_order_is_kept_and_nothing_lost_while_there_is_room(pipe):
    output = Output(pipe[1], describe)
    for number in range(MAX_LINES):
        output.write(f"line {number}")
    assert read_until(pipe[0], b"line %d" % (MAX_LINES - 1)) == [
        b"line %d" % number for number in range(MAX_LINES)
    ]
    assert output.flush() and output.num_dropped == 0


def test_lines_that_have_no_room_are_dropped_and_counted_in_their_place(pipe):
    output = Output(pipe[1], describe)
    num_lines = 3 * MAX_LINES
    for number in range(num_lines):
        output.write(f"line {number}")
    assert not output.flush(0.01)
    output.write("the end", is_needed=True)
    dropped = output.num_dropped
    assert dropped > MAX_LINES
    lines = read_until(pipe[0], b"%d dropped" % dropped)
    expected = [b"line %d" % number for number in range(num_lines - dropped)]
    assert lines == [*expected, b"the end", b"%d dropped" % dropped]
    assert output.flush()
    output.write("again")
    assert read_until(pipe[0], b"again") == [b"again"]
    assert output.num_dropped == dropped


@pytest.mark.parametrize("kind", ["socket", "terminal"])
def test_other_readers_that_do_not_read(kind):
    if kind == "socket":
        ends = socket.socketpair()
        reader, writer = (end.detach() for end in ends)
    else:
        reader, writer = pty.openpty()
    output = Output(writer, describe)
    for number in range(2 * MAX_LINES):
        output.write(f"{number} ".ljust(300, "."))
    assert output.num_dropped
    text = b""
    while not text.rstrip().endswith(b"%d dropped" % output.num_dropped):
        text += os.read(reader, 1 << 16)
    assert output.flush()
    os.close(reader)
    os.close(writer)


def test_a_reader_that_is_gone():
    reader, writer = os.pipe()
    output = Output(writer, describe)
    os.close(reader)
    for _ in range(MAX_LINES):
        output.write("x" * 1000)
    assert output.flush() and output.num_dropped == 0
    os.close(writer)


def test_many_threads(pipe):
    output = Output(pipe[1], describe)

    def say(name: int) -> None:
        for number in range(100):
            output.write(f"{name} {number}")

    threads = [threading.Thread(target=say, args=[name]) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output.write("end", is_needed=True)
    lines = read_until(pipe[0], b"end")
    for name in range(8):
        own = [line for line in lines if line.startswith(b"%d " % name)]
        assert own == [b"%d %d" % (name, number) for number in range(100)]


def test_a_signals_handler_may_write(pipe):
    output = Output(pipe[1], describe)
    before = signal.signal(signal.SIGALRM, lambda *_: output.write("alarm", is_needed=True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        for number in range(2000):
            output.write(f"line {number}", is_needed=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    output.write("end", is_needed=True)
    lines = [line for line in read_until(pipe[0], b"end") if line != b"alarm"]
    assert lines == [*(b"line %d" % number for number in range(2000)), b"end"]


def test_names_of_files_keep_their_bytes(pipe):
    output = Output(pipe[1], describe)
    output.write(os.fsdecode(b"/models/\xff"))
    output.write("half a character: \ud83d")
    assert read_until(pipe[0], b"half a character: ?")[0] == b"/models/\xff"


def test_print_writes_whole_lines(pipe):
    output = Output(pipe[1], describe)
    stream = LineStream(output, pipe[1])
    print("a", "b", file=stream)
    print("c", end="", file=stream)
    print("d\ne", end="", file=stream)
    stream.finish()
    assert read_until(pipe[0], b"e") == [b"a b", b"cd", b"e"]
    assert stream.fileno() == pipe[1]


def test_a_process_ends_while_nobody_reads():
    """And within the second that it waits for its reader."""
    script = (
        "import atexit\n"
        "from text_generation_process.log import Output\n"
        "output = Output(1, str)\n"
        "atexit.register(output.flush)\n"
        "for _ in range(5000): output.write('x' * 1000)\n"
        "raise SystemExit(7)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 7
    assert process.stdout is not None
    process.stdout.close()
