"""The process that tries grammars, each in a copy of itself that may be killed at any time.

Its standard input is a socket to the shard. `f NUMBER` with the end of a connection forks a child
that answers there; `k NUMBER` kills it. It knows the tokenizer and never imports torch, so that a
child costs some milliseconds and megabytes. It ends with the shard, and all children with it.
"""

import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from text_generation_process.lifetime import end_with_parent

from text_generation_shard.grammars.constraint import (
    Constraint,
    Grammar,
    GrammarError,
    TokenizerFile,
    compile_text,
)
from text_generation_shard.grammars.ending import EndingSearch
from text_generation_shard.grammars.guard import pack, receive

# What a child may take beyond what it begins with. The shard sets the limit of time; this one is
# for a shard that is stopped.
_MEMORY_BYTES, _TRIAL_CPU_S = 256 << 20, 6


def main(arguments: Sequence[str]) -> int:
    """`arguments`: the shard's process, the tokenizer's file, its size and its end tokens."""
    parent, path, vocab_size, *eos_ids = arguments
    end_with_parent(int(parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = TokenizerFile(Path(path), int(vocab_size), tuple(map(int, eos_ids)))
    tools: tuple[LLTokenizer, EndingSearch] | str
    try:
        tokenizer = file.load()
        tools = tokenizer, EndingSearch(tokenizer)
    except GrammarError as error:
        tools = str(error)
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as control:
        _serve(control, tools)
    return 0


def _serve(control: socket.socket, tools: tuple[LLTokenizer, EndingSearch] | str) -> None:
    """Forks and kills as it is told, until the shard has closed the socket."""
    waker, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)[::-1]
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker)
    # Those that were not waited for: their number can be nobody else's.
    children: dict[str, int] = {}
    while True:
        ready = select.select([control.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for number, process in list(children.items()):
                if os.waitpid(process, os.WNOHANG)[0]:
                    del children[number]
        if control.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        what, number = message.decode("ascii").split()
        if what == "k":
            if number in children:
                os.kill(children[number], signal.SIGKILL)
            continue
        with socket.socket(fileno=files[0]) as connection:
            try:
                process = os.fork()
            except OSError:
                continue  # whose end is closed sees that nobody answers
            if process == 0:
                _child(connection, tools)
            children[number] = process


def _child(connection: socket.socket, tools: tuple[LLTokenizer, EndingSearch] | str) -> None:
    """Never returns, and does nothing of what a process does at its end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent(os.getppid())
        # What dies for want of memory says so, with words of the user's grammar.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        _answer_all(connection, tools)
        code = 0
    except EOFError:
        code = 0
    finally:
        os._exit(code)


def _answer_all(connection: socket.socket, tools: tuple[LLTokenizer, EndingSearch] | str) -> None:
    connection.sendall(pack(os.getpid()))
    text = receive(connection)
    if isinstance(tools, str):
        connection.sendall(pack((tools, (), (), 0.0, 0)))
        return
    size, resident = _memory()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (_TRIAL_CPU_S, resource.RLIM_INFINITY))
    began = time.process_time()
    grammar = compile_text(*tools, text)
    used, grown = time.process_time() - began, _memory()[1] - resident
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)
    connection.sendall(pack((grammar.error, grammar.ending, grammar.eos_ids, used, grown)))
    rows: dict[int, Constraint] = {}
    while True:
        forgotten, what, *values = receive(connection)
        for row in forgotten:
            rows.pop(row, None)
        connection.sendall(pack(_answer(grammar, rows, what, values)))


def _answer(grammar: Grammar, rows: dict[int, Constraint], what: str, values: list[Any]) -> Any:
    if what == "masks":
        return [_masks(rows[row], guesses) for row, guesses in values[0]]
    row, *others = values
    if what == "open":
        generated, max_new_tokens = others
        # The end tokens before `min_new_tokens` are the shard's business.
        rows[row] = Constraint(grammar, generated, max_new_tokens, 0)
        return rows[row].failure
    if what == "allowed":
        return len(rows[row].allowed(others[0]))
    assert what == "settle", what
    token = rows[row].settle(others[0])
    return token, rows[row].failure, rows[row].is_driven


def _masks(constraint: Constraint, guesses: Sequence[int]) -> tuple[str, list[bytes]]:
    """A failure, or the masks at the place and behind each guess that is allowed."""
    masks = [] if constraint.failure else constraint.masks(guesses)
    return constraint.failure, masks


def _memory() -> tuple[int, int]:
    """Bytes of the address space, and of it those in memory that no file holds: how much of the
    libraries is in memory says nothing about a grammar."""
    size, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text("ascii").split())
    return size * resource.getpagesize(), (resident - of_files) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
