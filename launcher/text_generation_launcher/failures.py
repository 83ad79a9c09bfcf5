"""Who failed first, when several children have ended, and the sentence that says so. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

GAVE_UP = 3
"""The exit code of a shard that ends because another one has failed."""


class Kind(IntEnum):
    """How a child ended that should run; what can be the cause of the others comes first."""

    KILLED = 0
    """By a signal: the launcher has sent none yet."""
    FAILED = 1
    """By itself."""
    ENDED = 2
    """Unasked, and as if all were well."""
    GAVE_UP = 3
    """Because of another shard."""
    NOT_A_SHARD = 4
    """The router, whatever its end: it ends when it has lost a shard."""


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
    """Which look at the children found it; several ends may be of one look."""
    words: tuple[str, ...] = ()
    """Its last lines, or the sentences of its last errors."""


def kind_of(code: int, num_shards: int) -> Kind:
    """What the end of a shard is."""
    if code < 0:
        return Kind.KILLED
    if code == 0:
        return Kind.ENDED
    return Kind.GAVE_UP if code == GAVE_UP and num_shards > 1 else Kind.FAILED


def first_failure(ends: Sequence[End]) -> End:
    """The one of them that has to be named; there is at least one."""
    return min(ends, key=lambda end: (end.kind, end.seen, end.rank))


def may_follow_another(end: End, num_shards: int) -> bool:
    """Whether it may be the consequence of an end that has not been noticed yet."""
    return end.kind is Kind.NOT_A_SHARD or (num_shards > 1 and end.kind is not Kind.KILLED)


def describe_how(end: End, was_ready: bool = False) -> str:
    """How it ended, without its last words."""
    if end.kind is Kind.GAVE_UP:
        how = f"{end.name} gave up because of another shard (exit code {end.code})"
    elif end.code > 0:
        how = f"{end.name} failed with exit code {end.code}"
    elif end.code == 0:
        how = f"{end.name} ended unasked with exit code 0"
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
