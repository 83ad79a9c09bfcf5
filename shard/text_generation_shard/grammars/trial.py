"""Trials of grammars: each is compiled in a child process first, under limits of time and memory.

A fork takes longer than a small grammar, so a child whose trial was small is used again.
"""

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

# Limits of a trial in CPU and elapsed time, and the interval of checks.
_MOST_CPU_S, _LONGEST_S, _LOOK_S = 1.5, 5.0, 0.05
# How long the first trials wait for the tokenizer to be loaded.
_LOADING_S = 4.0
# After this CPU time a trial's priority is lowered, in favour of the model.
_NICE_AFTER_S, _NICE = 0.05, 5
# A trial is long after this CPU time; at most this many long ones run at the same time.
_LONG_S, _MOST_LONG = 0.2, 2
# A refused trial may be requested again after this time.
_RETRY_AFTER_S = 2
# How long the server may take to fork, and to end.
_FORK_S, _DYING_S = 2.0, 0.02

# Limits of the idle children, and of the trials of each.
_MOST_IDLE, _MOST_TRIED = 4, 50
# A child whose trial took more is not used again.
_SMALL_S, _SMALL_BYTES = 0.02, 1 << 20

_TOO_SLOW = "it is too complex: compiling it takes too long; make it smaller"
_TOO_LARGE = "it is too large: compiling it needs too much memory; make it smaller"
_BUSY = "other large grammars are being compiled; try again later"
_LOST = "the process that compiles grammars has ended; try again later"


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial."""

    error: str = ""
    # Not 0: the grammar was not tried, and may be requested again after this many seconds.
    retry_after_s: int = 0
    ending: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    used_s: float = 0.0
    grown_bytes: int = 0
    # The process that holds the grammar, if it has passed.
    child: "TrialChild | None" = None


class TrialChild:
    """Owns the connection to a process that tries grammars; the process ends when it is closed."""

    def __init__(
        self, number: int, connection: socket.socket, server: Child, kill: Callable[[int], None]
    ) -> None:
        """`server`: the parent, with which the child ends; `kill` ends the child with a number."""
        self.connection = connection
        self.server = server
        self.process = 0
        """Its process id; 0 until it has sent it."""
        self.num_tried = 0
        self._number, self._kill = number, kill

    def kill(self) -> None:
        """Kill the process. From any thread."""
        self._kill(self._number)

    def end(self) -> None:
        """Kill the process and close the connection."""
        self.kill()
        self.connection.close()

    def guard(self, is_again: bool) -> Guard:
        """A guard of the grammar that it tried last."""
        return Guard(self.connection, self.process, self.kill, is_again)


class TrialServer:
    """Owns the process that forks the children; restarts it if it has ended.

    Every method but `kill` is called in one thread, which must outlive the children: the kernel
    ends the process with the thread that started it.
    """

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self._tokenizer = tokenizer
        self._process: Child | None = None
        self._is_closed = False
        self._num_children = 0

    def start(self) -> None:
        """Start the process unless it runs. OSError if that fails."""
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

    def fork(self) -> TrialChild:
        """A new child. ConnectionError if the process can not fork."""
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
                return TrialChild(self._num_children, ours, self._process, self.kill)
        ours.close()
        raise ConnectionError(_LOST)

    def kill(self, number: int) -> None:
        """Kill a child. From any thread."""
        with suppress(OSError):
            # If the parent has ended, its children have ended as well.
            if (process := self._process) is not None:
                process.connection.send(f"k {number}".encode())

    def close(self) -> None:
        """End the process and all children; it is not restarted."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class Trials:
    """Owns the running trials. Used from one event loop.

    A trial ends within about five seconds. Its child is killed unless the trial has passed, also
    when the caller is cancelled.
    """

    def __init__(self, server: TrialServer, thread: ThreadPoolExecutor) -> None:
        """`thread`: its only worker calls the server."""
        self._server, self._thread = server, thread
        self._num_long = 0
        self._idle: list[TrialChild] = []

    async def run(self, text: str) -> Trial:
        """Try one grammar."""
        if self._idle:
            # If this child ends, the grammar is tried again in a new one.
            with suppress(OSError, EOFError):
                return await self._tried_by(self._idle.pop(), text)
        loop = asyncio.get_running_loop()
        forked = loop.run_in_executor(self._thread, self._server.fork)
        try:
            child = await asyncio.shield(forked)
        except asyncio.CancelledError:
            forked.add_done_callback(_forget)
            raise
        except OSError:
            return Trial(_LOST, _RETRY_AFTER_S)
        try:
            return await self._tried_by(child, text)
        except (OSError, EOFError):
            # It exceeded its limits, unless all children ended, shortly before their parent does.
            await asyncio.sleep(_DYING_S)
            is_alone = child.server.is_alive
            return Trial(_TOO_LARGE) if is_alone else Trial(_LOST, _RETRY_AFTER_S)

    def done_with(self, trial: Trial) -> None:
        """Reuse the child of a trial, or end it."""
        if (child := trial.child) is None:
            return
        is_small = trial.used_s < _SMALL_S and trial.grown_bytes < _SMALL_BYTES
        if is_small and child.num_tried < _MOST_TRIED and len(self._idle) < _MOST_IDLE:
            self._idle.append(child)
        else:
            child.end()

    def close(self) -> None:
        """End the idle children."""
        while self._idle:
            self._idle.pop().end()

    async def _tried_by(self, child: TrialChild, text: str) -> Trial:
        try:
            trial = await self._watched(child, text)
        except BaseException:
            child.end()
            raise
        if trial.child is None:
            child.end()
        return trial

    async def _watched(self, child: TrialChild, text: str) -> Trial:
        """The child's answer, or why the trial was stopped. EOFError if the child has ended."""
        loop = asyncio.get_running_loop()
        began = asked = loop.time()
        is_long, is_nice = False, False
        child.num_tried += 1
        before = cpu_s(child.process) if child.process else 0.0
        answer = loop.create_task(_answer(child, text))
        try:
            while True:
                if (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
                    break
                used = cpu_s(child.process) - before if child.process else 0.0
                if used == float("inf"):
                    used = 0.0  # it has just ended; its answer or the end of data follows
                if used > _NICE_AFTER_S and not is_nice:
                    is_nice = True
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, child.process, _NICE)
                if used > _LONG_S and not is_long:
                    if self._num_long >= _MOST_LONG:
                        return Trial(_BUSY, _RETRY_AFTER_S)
                    is_long = True
                    self._num_long += 1
                if used > _MOST_CPU_S:
                    return Trial(_TOO_SLOW)
                if not child.process and loop.time() < asked + _LOADING_S:
                    began = loop.time()  # its parent still loads the tokenizer
                if loop.time() > began + _LONGEST_S:
                    # A trial that got no CPU time is not too slow.
                    is_slow = used > _LONG_S
                    return Trial(_TOO_SLOW if is_slow else _BUSY, _RETRY_AFTER_S * (not is_slow))
        finally:
            answer.cancel()
            self._num_long -= is_long
        error, ending, eos_ids, used, grown = answer.result()
        if error:
            return Trial(error)
        return Trial("", 0, tuple(ending), tuple(eos_ids), used, grown, child)


def _forget(forked: "asyncio.Future[TrialChild]") -> None:
    if not forked.cancelled() and forked.exception() is None:
        forked.result().end()


async def _answer(child: TrialChild, text: str) -> Any:
    """Send a grammar to the child, after its process id has arrived; the child's answer."""
    if not child.process:
        child.process = await _next_message(child.connection)
    message = pack(((), "try", text))
    await asyncio.get_running_loop().sock_sendall(child.connection, message)
    return await _next_message(child.connection)


async def _next_message(connection: socket.socket) -> Any:
    loop = asyncio.get_running_loop()
    unpacker = Unpacker()
    while not unpacker.add(await loop.sock_recv(connection, 1 << 16)):
        pass
    return unpacker.message()


def may_grow(text: str) -> bool:
    """Whether generation with a grammar may cost much more than its compilation.

    This holds for intersections of patterns, and for patterns with so many repeats that states are
    built lazily; llguidance's limits do not bound that. It is also True for many cheap grammars,
    which then only run in their own process.
    """
    if "&" in text or "%json" in text or "patternProperties" in text:
        return True
    if _repeats_often(text):
        return True
    num_patterns = sum(text.count(f'"{keyword}"') for keyword in _PATTERNS)
    return num_patterns > 1 and any(f'"{keyword}"' in text for keyword in _COMBINERS)


def _repeats_often(text: str) -> bool:
    """Whether the product of all repeats exceeds _MOST_REPEATS, as if they were nested."""
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
# The first digits of a longer number are large enough.
_COUNTS = re.compile(r"[{~] *(\d{0,18})\d*(?:(?:,|\.\.) *(\d{0,18})\d*)?")
_LENGTHS = re.compile(r'"(?:min|max)Length": ?(\d{1,18})')
_MOST_REPEATS = 4096
