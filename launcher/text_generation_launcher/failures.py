"""Which of several ended children failed first, and the sentence for the log. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

GAVE_UP = 3
"""The exit code of a shard that ends because another shard failed."""


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


class ChildDied(Exception):
    """A child that should run has ended; the message has its name, how it ended, its last words."""

    def __init__(self, sentence: str, how: str) -> None:
        super().__init__(sentence)
        self.how = how
        """The same without the words."""

    @classmethod
    def of(cls, end: End, was_ready: bool = False, cause: str = "") -> "ChildDied":
        """`cause` is appended: what else is known."""
        return cls(describe_end(end, was_ready) + cause, describe_how(end, was_ready) + cause)


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


def describe_how(end: End, was_ready: bool = False) -> str:
    """How it ended, without its last words."""
    if end.kind is Kind.GAVE_UP:
        how = f"{end.name} ended because another shard failed (exit code {end.code})"
    elif end.code > 0:
        how = f"{end.name} failed with exit code {end.code}"
    elif end.code == 0:
        how = f"{end.name} ended unexpectedly with exit code 0"
    else:
        how = f"{end.name} was killed by signal {-end.code} ({signal.strsignal(-end.code)})"
        if end.code == -signal.SIGKILL:
            how += ", as the system does when memory runs out,"
    return f"{how} while serving" if was_ready else how


def describe_end(end: End, was_ready: bool = False) -> str:
    """How it ended, and its last words."""
    how = describe_how(end, was_ready)
    if not end.words:
        return f"{how} and printed nothing"
    if len(end.words) == 1:
        return f"{how}: {end.words[0]}"
    return "\n".join([f"{how}; its last lines:", *(f"  {line}" for line in end.words)])
