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
LOST = "the process of the grammar has ended"
"""The failure of a row that did not cause it: it may go on in another process."""


def pack(message: Any) -> bytes:
    """Encode a message between the shard and the process of a grammar."""
    data = marshal.dumps(message)
    return _HEADER.pack(len(data)) + data


class Unpacker:
    """Owns the received bytes that no message was made of."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> bool:
        """Whether a message is complete. EOFError if `data` is empty."""
        if not data:
            raise EOFError("the other side has closed the connection")
        self._data += data
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether `message` may be called."""
        size = len(self._data) - _HEADER.size
        return size >= 0 and size >= _HEADER.unpack_from(self._data)[0]

    def message(self) -> Any:
        """The first complete message."""
        end = _HEADER.size + _HEADER.unpack_from(self._data)[0]
        message = marshal.loads(self._data[_HEADER.size : end])
        del self._data[:end]
        return message


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
    process has ended, all calls fail with `LOST`. Calls run one at a time.
    """

    def __init__(
        self,
        connection: socket.socket,
        process: int,
        kill: Callable[[], None],
        is_again: bool = False,
    ) -> None:
        """`kill` is called at most once, if an answer takes too long. `is_again`: an earlier
        process of this grammar has ended, too."""
        connection.setblocking(True)
        self._connection, self._process, self._kill = connection, process, kill
        weakref.finalize(self, connection.close)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._lock = threading.Lock()
        self._is_again, self._is_lost = is_again, False
        self._num_rows = 0
        self._allowed_s = cpu_s(process) + _ALLOWANCE_S
        # Rows to delete in the process with the next message.
        self._forgotten: deque[int] = deque()

    @property
    def has_ended(self) -> bool:
        """Whether no call can be answered any more. From any thread."""
        closed = select.poll()
        closed.register(self._connection, 0)
        return self._is_lost or bool(closed.poll(0))

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
        answers, failure = self.end(1, num_tokens)
        if failure:
            raise GrammarError(failure)
        return answers[0]

    def begin(self, what: str, *values: Any) -> None:
        """Send a call; `end` must follow."""
        self._lock.acquire()
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        if not self._is_lost:
            try:
                self._connection.sendall(pack((forgotten, what, *values)))
            except OSError:
                self._is_lost = True

    def end(self, num_answers: int, num_tokens: int) -> tuple[list[Any], str]:
        """Wait for the answers to `begin`: those that came, and why the next one did not."""
        answers: list[Any] = []
        try:
            if self._is_lost:
                return answers, LOST
            self._receive(answers, num_answers, num_tokens * _ALLOWANCE_EACH_S)
            return answers, ""
        except GrammarError as error:
            self._is_lost = True
            return answers, str(error)
        except (OSError, EOFError):
            self._is_lost = True
            # The first time it may have been killed from outside.
            return answers, _ENDED if self._is_again else LOST
        finally:
            self._lock.release()

    def _receive(self, answers: list[Any], num_answers: int, more_s: float) -> None:
        unpacker = Unpacker()
        began = time.monotonic()
        self._allowed_s += more_s
        before, used = cpu_s(self._process), 0.0
        most = min(self._allowed_s - before, _ANSWER_CPU_S + more_s)
        while len(answers) < num_answers:
            if self._poll.poll(_LOOK_MS):
                unpacker.add(self._connection.recv(1 << 16))
                while unpacker.is_complete:
                    answers.append(unpacker.message())
                continue
            now = cpu_s(self._process)
            used += min(now - before, _MOST_BETWEEN_S)
            before = now
            if used > most or time.monotonic() > began + _ANSWER_S:
                self._kill()
                raise GrammarError(_TOO_SLOW)


@dataclass(frozen=True, slots=True)
class GuardedGrammar(Grammar):
    """A grammar that is compiled in its own process."""

    guard: Guard | None = None

    @property
    def has_ended(self) -> bool:
        """See Grammar."""
        return self.guard is None or self.guard.has_ended


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
