"""Trials of grammars: compiled in a child process first, under limits of time and memory."""

import asyncio
import os
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from text_generation_process.children import Child

from text_generation_shard.grammars.constraint import TokenizerFile
from text_generation_shard.grammars.guard import Guard, Unpacker, cpu_s, pack

# What a trial may use of a processor and how long it may last; how often that is looked at.
_MOST_CPU_S, _LONGEST_S, _LOOK_S = 1.5, 5.0, 0.05
# A trial that has used so much gives way to all others, the model first of all, but not so far that
# it could not end in time.
_NICE_AFTER_S, _NICE = 0.05, 5
# A trial that has used so much is a long one. Short ones wait for nobody.
_LONG_S, _MOST_LONG = 0.2, 2
# When a trial that found no room may be asked for again.
_RETRY_AFTER_S = 2
# How long the server may take to fork, and to end.
_FORK_S, _DYING_S = 2.0, 0.02

_TOO_SLOW = "it is too complex: compiling it takes too long; make it smaller"
_TOO_LARGE = "it is too large: compiling it needs too much memory; make it smaller"
_BUSY = "other large grammars are being compiled; try again later"
_LOST = "the process that compiles grammars has ended; try again later"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a trial."""

    error: str = ""
    # Not 0: nothing is known about the grammar, and it may be tried again after so many seconds.
    retry_after_s: int = 0
    ending: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    used_s: float = 0.0
    grown_bytes: int = 0
    # Where the grammar is, until it is closed.
    guard: Guard | None = None


class TrialServer:
    """Owns the process that forks the children; starts it anew if it has ended.

    Every method but `kill` is called in one thread that lives as long as the children should: the
    kernel ends the process with the thread that started it.
    """

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self._tokenizer = tokenizer
        self._process: Child | None = None
        self._is_closed = False
        self._num_children = 0

    def start(self) -> None:
        """Nothing if it runs already. Raises OSError."""
        if self._is_closed or (self._process is not None and self._process.is_alive):
            return
        self._end()
        file = self._tokenizer
        self._process = Child(
            "text_generation_shard.grammars.trial_server",
            *(file.path, file.vocab_size, *file.eos_ids),
            kind=socket.SOCK_SEQPACKET,
        )
        self._process.connection.settimeout(_FORK_S)

    def fork(self) -> tuple[int, socket.socket, Child]:
        """A new child: its number, the connection to it and the process it dies with."""
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):
                self.start()
                if self._process is None:
                    break
                self._num_children += 1
                message = f"f {self._num_children}".encode()
                try:
                    socket.send_fds(self._process.connection, [message], [theirs.fileno()])
                except OSError:
                    self._process.kill()
                    continue
                ours.setblocking(False)
                return self._num_children, ours, self._process
        ours.close()
        raise ConnectionError(_LOST)

    def kill(self, number: int) -> None:
        """End a child, if it has not ended by itself. From any thread."""
        with suppress(OSError):
            # If the process that forks is gone, its children are gone as well.
            if (process := self._process) is not None:
                process.connection.send(f"k {number}".encode())

    def close(self) -> None:
        """End the process with all children, for good."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class Trials:
    """Owns the trials under way. Used from one event loop.

    Promises: a trial ends within about five seconds, whatever the grammar; then, and when its
    caller is cancelled, nothing of it goes on, unless it has passed: its child waits for whoever
    has the guard.
    """

    def __init__(self, server: TrialServer, thread: ThreadPoolExecutor) -> None:
        """`thread` has one worker, in which the server is used."""
        self._server, self._thread = server, thread
        self._num_long = 0

    async def run(self, text: str) -> Trial:
        """Try one grammar."""
        loop = asyncio.get_running_loop()
        forked = loop.run_in_executor(self._thread, self._server.fork)
        try:
            number, connection, server = await asyncio.shield(forked)
        except asyncio.CancelledError:
            forked.add_done_callback(self._forget)
            raise
        except OSError:
            return Trial(_LOST, _RETRY_AFTER_S)

        def kill() -> None:
            self._server.kill(number)

        try:
            trial = await self._watched(connection, text, kill)
        except (OSError, EOFError):
            # It has died of its limits, unless all have died: they go a little before the server.
            await asyncio.sleep(_DYING_S)
            is_alone = server.is_alive
            trial = Trial(_TOO_LARGE) if is_alone else Trial(_LOST, _RETRY_AFTER_S)
        except BaseException:
            kill()
            connection.close()
            raise
        if trial.guard is None:
            kill()
            connection.close()
        return trial

    def _forget(self, forked: "asyncio.Future[tuple[int, socket.socket, Child]]") -> None:
        if not forked.cancelled() and forked.exception() is None:
            number, connection, _ = forked.result()
            self._server.kill(number)
            connection.close()

    async def _watched(
        self, connection: socket.socket, text: str, kill: Callable[[], None]
    ) -> Trial:
        """The child's answer, or what it has met with. EOFError if it has died."""
        loop = asyncio.get_running_loop()
        began, is_long, is_nice = loop.time(), False, False
        process = 0
        answer = loop.create_task(_exchange(connection, None))
        try:
            while True:
                if (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
                    if process:
                        break
                    process = answer.result()
                    answer = loop.create_task(_exchange(connection, text))
                    continue
                used = cpu_s(process) if process else 0.0
                if used == float("inf"):
                    used = 0.0  # it has just ended, and its answer or its end arrives
                if used > _NICE_AFTER_S and not is_nice:
                    is_nice = True
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, process, _NICE)
                if used > _LONG_S and not is_long:
                    if self._num_long >= _MOST_LONG:
                        return Trial(_BUSY, _RETRY_AFTER_S)
                    is_long = True
                    self._num_long += 1
                if used > _MOST_CPU_S:
                    return Trial(_TOO_SLOW)
                if loop.time() > began + _LONGEST_S:
                    # A small one that got no processor is not to blame.
                    is_slow = used > _LONG_S
                    return Trial(_TOO_SLOW if is_slow else _BUSY, _RETRY_AFTER_S * (not is_slow))
        finally:
            answer.cancel()
            self._num_long -= is_long
        error, ending, eos_ids, used, grown = answer.result()
        if error:
            return Trial(error)
        guard = Guard(connection, process, kill)
        return Trial("", 0, tuple(ending), tuple(eos_ids), used, grown, guard)


async def _exchange(connection: socket.socket, text: str | None) -> Any:
    """The next message, after `text` is sent."""
    loop = asyncio.get_running_loop()
    if text is not None:
        await loop.sock_sendall(connection, pack(text))
    unpacker = Unpacker()
    while not unpacker.add(await loop.sock_recv(connection, 1 << 16)):
        pass
    return unpacker.message()


def may_grow(text: str) -> bool:
    """Whether following a grammar may take much more than compiling it.

    So it is where a text must follow several patterns at once, and where a pattern is repeated so
    often that its states are made as they are reached; llguidance's limits do not bound that. True
    as well for many that cost little: they are only followed in a process of their own.
    """
    if "&" in text or "%json" in text or "patternProperties" in text:
        return True
    if _repeats_often(text):
        return True
    num_patterns = sum(text.count(f'"{keyword}"') for keyword in _PATTERNS)
    return num_patterns > 1 and any(f'"{keyword}"' in text for keyword in _COMBINERS)


def _repeats_often(text: str) -> bool:
    """As if all that is repeated in a text stood in each other."""
    if any(int(length) > _MOST_REPEATS for length in _LENGTHS.findall(text)):
        return True
    product = 1
    for least, most in _COUNTS.findall(text):
        product *= max(1, int(most or least or 0))
        if product > _MOST_REPEATS:
            return True
    return False


_PATTERNS: Sequence[str] = ("pattern", "format")
_COMBINERS: Sequence[str] = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
# Of a longer number the first digits are large enough.
_COUNTS = re.compile(r"[{~] *(\d{0,18})\d*(?:(?:,|\.\.) *(\d{0,18})\d*)?")
_LENGTHS = re.compile(r'"(?:min|max)Length": ?(\d{1,18})')
# A million repeats take a second once, at the first token.
_MOST_REPEATS = 4096
