"""The process that forks children to try grammars; each child may be killed at any time.

Its standard input is a socket to the shard. `f NUMBER` with a socket forks a child that answers
there; `k NUMBER` kills it. The process has loaded the tokenizer and never imports torch, so that a
child is cheap. A child tries one grammar after another, and holds the rows of the last one. The
process ends with the shard, and the children end with the process.
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

# Most memory that a child may add, and most CPU time. The shard enforces a shorter time; this one
# holds while the shard is suspended.
_MEMORY_BYTES, _TRIAL_CPU_S = 256 << 20, 6


def main(arguments: Sequence[str]) -> int:
    """`arguments`: process id of the shard, tokenizer file, vocabulary size, end tokens."""
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
    """Fork and kill on request, until the shard closes the socket."""
    waker, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)[::-1]
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker)
    # Not yet reaped: their process ids can not be reused.
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
                continue  # the shard sees the closed connection
            if process == 0:
                _child(connection, tools)
            children[number] = process


def _child(connection: socket.socket, tools: tuple[LLTokenizer, EndingSearch] | str) -> None:
    """Never returns, and skips Python's cleanup at exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent(os.getppid())
        # Hides error output at lack of memory, which can contain the user's grammar.
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
    grammar = Grammar()
    rows: dict[int, Constraint] = {}
    while True:
        forgotten, what, *values = receive(connection)
        if what == "try":
            # Free the previous grammar before this one is measured.
            grammar = Grammar()
            rows.clear()
            grammar, used, grown = _tried(tools, values[0])
            answer = grammar.error, grammar.ending, grammar.eos_ids, used, grown
            connection.sendall(pack(answer))
            continue
        for row in forgotten:
            rows.pop(row, None)
        if what == "masks":
            # One by one: the shard knows which row this process was busy with when it ended.
            for row, guesses in values[0]:
                connection.sendall(pack(_masks(rows[row], guesses)))
            continue
        connection.sendall(pack(_answer(grammar, rows, what, values)))


def _tried(tools: tuple[LLTokenizer, EndingSearch] | str, text: str) -> tuple[Grammar, float, int]:
    """Compile a grammar within limits; also returns its CPU seconds and bytes."""
    if isinstance(tools, str):
        return Grammar(tools), 0.0, 0
    size, resident = _memory()
    began = time.process_time()
    _limit(resource.RLIMIT_AS, size + _MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, int(began) + _TRIAL_CPU_S)
    grammar = compile_text(*tools, text)
    used, grown = time.process_time() - began, _memory()[1] - resident
    _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    return grammar, used, max(0, grown)


def _limit(kind: int, most: int) -> None:
    """Set a resource limit, at most the hard limit."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = hard if most == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, hard))


def _answer(grammar: Grammar, rows: dict[int, Constraint], what: str, values: list[Any]) -> Any:
    row, *others = values
    if what == "open":
        generated, max_new_tokens = others
        # The shard itself handles `min_new_tokens`.
        rows[row] = Constraint(grammar, generated, max_new_tokens, 0)
        return rows[row].failure
    if what == "allowed":
        return len(rows[row].allowed(others[0]))
    assert what == "settle", what
    token = rows[row].settle(others[0])
    return token, rows[row].failure, rows[row].is_driven


def _masks(constraint: Constraint, guesses: Sequence[int]) -> tuple[str, list[bytes]]:
    """A failure, or the masks at the position and after each allowed guess."""
    masks = [] if constraint.failure else constraint.masks(guesses)
    return constraint.failure, masks


def _memory() -> tuple[int, int]:
    """Bytes of the address space, and resident bytes without mapped files: loaded libraries must
    not count as the grammar's."""
    size, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text("ascii").split())
    return size * resource.getpagesize(), (resident - of_files) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
