"""Grammars that stay in the process of their trial, and the rows that use them there.

The cost of such a grammar's masks is unknown in advance: intersections of patterns can take any
time and memory in a single state. Therefore a process that can be killed computes the masks, and
only requests with that grammar fail with it.
"""

import marshal
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from text_generation_shard.grammars.constraint import Constraint, Grammar, GrammarError
from text_generation_shard.grammars.elsewhere import ConstraintElsewhere, GrammarElsewhere

_HEADER = struct.Struct("<I")
# Limits of one answer in CPU and elapsed time, and the interval of checks.
_ANSWER_CPU_S, _ANSWER_S, _LOOK_MS = 0.1, 2.0, 20
# Most CPU time that counts between two checks. Where a virtual machine is paused, the clock of the
# running process goes on, and one check finds the whole pause.
_MOST_BETWEEN_S = 2 * _LOOK_MS / 1000
# Allowed CPU time of all answers: the initial amount, and the addition per token.
_ALLOWANCE_S, _ALLOWANCE_EACH_S = 1.0, 0.005
_TOO_SLOW = "the grammar is too complex to be followed: the next tokens take too long; simplify it"
_ENDED = "the grammar is too complex to be followed: it needs too much memory; simplify it"


def pack(message: Any) -> bytes:
    """Encode a message between the shard and the process of a grammar."""
    data = marshal.dumps(message)
    return _HEADER.pack(len(data)) + data


class Unpacker:
    """Owns the received bytes of one message."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> bool:
        """Whether the message is complete. EOFError if `data` is empty."""
        if not data:
            raise EOFError("the other side has closed the connection")
        self._data += data
        size = len(self._data) - _HEADER.size
        return size >= 0 and size == _HEADER.unpack_from(self._data)[0]

    def message(self) -> Any:
        """The complete message."""
        return marshal.loads(memoryview(self._data)[_HEADER.size :])


def receive(connection: socket.socket) -> Any:
    """Wait for the next message. EOFError if the connection was closed."""
    unpacker = Unpacker()
    while not unpacker.add(connection.recv(1 << 16)):
        pass
    return unpacker.message()


def cpu_s(process: int) -> float:
    """The CPU seconds that a process has used; inf if it has ended."""
    # The CPU clock id of a process on Linux; see clock_getcpuclockid(3).
    with suppress(OSError):
        return time.clock_gettime(~process << 3 | 2)
    return float("inf")


class Guard:
    """Owns the connection to the process of a grammar; the process ends when it is closed.

    Every call returns within about two seconds. A process that takes too long is killed. After the
    process has ended, all calls raise GrammarError. Calls run one at a time.
    """

    def __init__(self, connection: socket.socket, process: int, kill: Callable[[], None]) -> None:
        """`kill` is called at most once, if an answer takes too long."""
        connection.setblocking(True)
        self._connection, self._process, self._kill = connection, process, kill
        weakref.finalize(self, connection.close)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._lock = threading.Lock()
        self._failure = ""
        self._num_rows = 0
        self._allowed_s = cpu_s(process) + _ALLOWANCE_S
        # Rows to delete in the process with the next message.
        self._forgotten: deque[int] = deque()

    def new_row(self) -> int:
        """A new, unique row number."""
        self._num_rows += 1
        return self._num_rows

    def forget(self, row: int) -> None:
        """Delete a row. From any thread."""
        self._forgotten.append(row)

    def ask(self, what: str, *values: Any, num_tokens: int = 1) -> Any:
        """One call that processes `num_tokens`: the answer, or GrammarError."""
        self.begin(what, *values)
        return self.end(num_tokens)

    def begin(self, what: str, *values: Any) -> None:
        """Send a call; `end` must follow."""
        self._lock.acquire()
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        if not self._failure:
            try:
                self._connection.sendall(pack((forgotten, what, *values)))
            except OSError:
                self._failure = _ENDED

    def end(self, num_tokens: int = 1) -> Any:
        """Wait for the answer to `begin`, or GrammarError."""
        try:
            if not self._failure:
                return self._receive(num_tokens * _ALLOWANCE_EACH_S)
            raise GrammarError(self._failure)
        except (OSError, EOFError) as error:
            self._failure = _ENDED
            raise GrammarError(_ENDED) from error
        finally:
            self._lock.release()

    def _receive(self, more_s: float) -> Any:
        unpacker = Unpacker()
        began = time.monotonic()
        self._allowed_s += more_s
        before, used = cpu_s(self._process), 0.0
        most = min(self._allowed_s - before, _ANSWER_CPU_S + more_s)
        while True:
            if self._poll.poll(_LOOK_MS):
                if unpacker.add(self._connection.recv(1 << 16)):
                    return unpacker.message()
                continue
            now = cpu_s(self._process)
            used += min(now - before, _MOST_BETWEEN_S)
            before = now
            if used > most or time.monotonic() > began + _ANSWER_S:
                self._failure = _TOO_SLOW
                self._kill()
                raise GrammarError(_TOO_SLOW)


@dataclass(frozen=True, slots=True)
class GuardedGrammar(Grammar):
    """A grammar that is compiled in its own process."""

    guard: Guard | None = None


class GuardedConstraint:
    """The state of one request in a guarded grammar; promises the same as `Constraint`."""

    def __init__(
        self, grammar: GuardedGrammar, generated: Sequence[int], max_new_tokens: int, least: int
    ) -> None:
        """See Constraint; `least`: its `min_new_tokens`."""
        assert grammar.guard is not None
        self.failure = ""
        """Why this request can not go on."""
        self.is_driven = False
        """Whether a token was replaced so that the text ends in time."""
        self.eos_ids = grammar.eos_ids
        self.guard, self.row = grammar.guard, grammar.guard.new_row()
        self._num_tokens, self._min_new_tokens = len(generated), least
        weakref.finalize(self, self.guard.forget, self.row)
        self.failure = (
            self._ask("open", list(generated), max_new_tokens, num_tokens=len(generated) + 1)
            or self.failure
        )

    def may_end_after(self, count: int) -> bool:
        """See Constraint."""
        return self._num_tokens + count >= self._min_new_tokens

    def allowed(self, guesses: Sequence[int]) -> Sequence[int]:
        """See Constraint."""
        if self.failure or not guesses:
            return ()
        return guesses[: self._ask("allowed", list(guesses)) or 0]

    def settle(self, token: int) -> int:
        """See Constraint."""
        if not self.failure and (answer := self._ask("settle", token)) is not None:
            token, self.failure, self.is_driven = answer
            self._num_tokens += 1
        return token

    def _ask(self, what: str, *values: Any, num_tokens: int = 1) -> Any:
        """The answer; None: it failed, and `failure` is set."""
        try:
            return self.guard.ask(what, self.row, *values, num_tokens=num_tokens)
        except GrammarError as error:
            self.failure = str(error)
            return None


AnyConstraint = Constraint | GuardedConstraint | ConstraintElsewhere


def begin(
    grammar: Grammar, generated: Sequence[int], max_new_tokens: int, min_new_tokens: int
) -> AnyConstraint:
    """The state of a request in its grammar after the tokens `generated`."""
    if isinstance(grammar, GrammarElsewhere):
        return ConstraintElsewhere()
    kind = GuardedConstraint if isinstance(grammar, GuardedGrammar) else Constraint
    return kind(grammar, generated, max_new_tokens, min_new_tokens)  # type: ignore[arg-type]
