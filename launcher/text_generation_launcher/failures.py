"""Which of several ended children failed first, and the sentences for the log."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from text_generation_launcher.log import Log
from text_generation_launcher.process import ManagedProcess

GAVE_UP = 3
"""The exit code of a shard that ends because another shard failed."""
CAUSE_S = 0.5
"""How long after the end of one child the end of another, which caused it, may be noticed."""
POLL_S = 0.02


class Kind(IntEnum):
    """How a child ended that should run. A lower value can be the cause of a higher one."""

    KILLED = 0
    """By a signal that the launcher did not send."""
    FAILED = 1
    """By itself."""
    ENDED = 2
    """With exit code 0, although it should run."""
    GAVE_UP = 3
    """Because of another shard."""
    NOT_A_SHARD = 4
    """The router, with any exit code: it ends when it has lost a shard."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a child that should run."""

    name: str
    """As the log calls it."""
    code: int
    """Its exit code, or the negative number of the signal that killed it."""
    kind: Kind = Kind.NOT_A_SHARD
    rank: int = -1
    """-1: it is no shard."""
    seen: int = 0
    """Number of the look at all children that found it; one look may find several ends."""
    words: tuple[str, ...] = ()
    """Its last lines, or the sentences of its last errors."""

    def how(self, was_ready: bool = False) -> str:
        """How it ended, without its last words."""
        if self.kind is Kind.GAVE_UP:
            how = f"{self.name} ended because another shard failed (exit code {self.code})"
        elif self.code > 0:
            how = f"{self.name} failed with exit code {self.code}"
        elif self.code == 0:
            how = f"{self.name} ended unexpectedly with exit code 0"
        else:
            how = f"{self.name} was killed by signal {-self.code} ({signal.strsignal(-self.code)})"
            if self.code == -signal.SIGKILL:
                how += ", as the system does when memory runs out,"
        return f"{how} while serving" if was_ready else how

    def describe(self, was_ready: bool = False) -> str:
        """How it ended, and its last words."""
        how = self.how(was_ready)
        if not self.words:
            return f"{how} and printed nothing"
        if len(self.words) == 1:
            return f"{how}: {self.words[0]}"
        return "\n".join([f"{how}; its last lines:", *(f"  {line}" for line in self.words)])


class ChildDied(Exception):
    """A child that should run has ended; the message has its name, how it ended, its last words."""

    def __init__(self, sentence: str, how: str) -> None:
        super().__init__(sentence)
        self.how = how
        """The same without the words."""


def kind_of(code: int, num_shards: int) -> Kind:
    """The kind of a shard's end."""
    if code < 0:
        return Kind.KILLED
    if code == 0:
        return Kind.ENDED
    return Kind.GAVE_UP if code == GAVE_UP and num_shards > 1 else Kind.FAILED


def first_failure(ends: Sequence[End]) -> End:
    """The end to report, of at least one."""
    return min(ends, key=lambda end: (end.kind, end.seen, end.rank))


def may_follow_another(end: End, num_shards: int) -> bool:
    """Whether an end that is not noticed yet may have caused it."""
    return end.kind is Kind.NOT_A_SHARD or (num_shards > 1 and end.kind is not Kind.KILLED)


def death_of(child: ManagedProcess) -> ChildDied:
    """The end of a child that is not a shard."""
    end = _with_words(child, End(child.name, child.returncode or 0))
    return ChildDied(end.describe(), end.how())


def diagnose(
    shards: Sequence[ManagedProcess],
    router: ManagedProcess | None,
    wait: Callable[[float], None],
    log: Log,
    was_ready: bool,
) -> ChildDied:
    """Names the child that failed first; at least one has ended. Logs the ends of the others.

    `wait` takes seconds, and may return earlier or raise.
    """
    ends: dict[ManagedProcess, End] = {}
    deadline = time.monotonic() + CAUSE_S
    look = 0
    while True:
        for rank, child in (*enumerate(shards), *([(-1, router)] if router else [])):
            if child not in ends and not child.is_alive:
                code = child.returncode or 0
                kind = Kind.NOT_A_SHARD if rank < 0 else kind_of(code, len(shards))
                ends[child] = End(child.name, code, kind, rank, look)
        first = first_failure(tuple(ends.values()))
        remaining_s = deadline - time.monotonic()
        is_last = all(not shard.is_alive for shard in shards)
        if is_last or remaining_s <= 0 or not may_follow_another(first, len(shards)):
            break
        wait(min(remaining_s, POLL_S))
        look += 1
    with_words = {end: _with_words(child, end) for child, end in ends.items()}
    blamed = with_words.pop(first)
    for end in with_words.values():
        if end.words != blamed.words:  # ranks that report the same error are logged once
            log.info(end.describe(was_ready))
    # The cause may be a shard that is stopped, and has not ended.
    is_consequence = blamed.kind in (Kind.GAVE_UP, Kind.NOT_A_SHARD)
    cause = describe_stopped(shards) if is_consequence else ""
    return ChildDied(blamed.describe(was_ready) + cause, blamed.how(was_ready) + cause)


def describe_stopped(children: Sequence[ManagedProcess]) -> str:
    """Which of them a signal has stopped, in parentheses; empty if none."""
    names = [child.name for child in children if child.is_stopped]
    return f" ({', '.join(names)} is stopped, as by SIGSTOP)" if names else ""


def _with_words(child: ManagedProcess, end: End) -> End:
    """The end with the child's last words, which are not logged elsewhere after this."""
    child.drain()
    return replace(end, words=child.last_words())


def grouped(messages: Sequence[tuple[str, str]], doing: str = "") -> str:
    """Names with their last messages, grouped by message; `doing` follows the names."""
    names: dict[str, list[str]] = {}
    for name, message in messages:
        names.setdefault(message, []).append(name)
    return "; ".join(
        f"{', '.join(group)}{doing}" + (f": {message}" if message else "")
        for message, group in names.items()
    )
