"""Which child failed first, found by a look at all of them, and what is logged about the others."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from text_generation_launcher.failures import (
    ChildDied,
    End,
    Kind,
    describe_end,
    first_failure,
    kind_of,
    may_follow_another,
)
from text_generation_launcher.log import Log
from text_generation_launcher.process import ManagedProcess

CAUSE_S = 0.5
"""How long after the end of one child the end of another, which caused it, may be noticed."""
POLL_S = 0.02


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
    watched = [*shards, *([router] if router else [])]
    ends: dict[ManagedProcess, End] = {}
    deadline = time.monotonic() + CAUSE_S
    look = 0
    while True:
        for child in watched:
            if child not in ends and not child.is_alive:
                rank = shards.index(child) if child is not router else -1
                ends[child] = _end_of_watched(child, rank, len(shards), look)
        first = first_failure(tuple(ends.values()))
        remaining_s = deadline - time.monotonic()
        is_last = all(not shard.is_alive for shard in shards)
        if is_last or remaining_s <= 0 or not may_follow_another(first, len(shards)):
            break
        wait(min(remaining_s, POLL_S))
        look += 1
    with_words = {child: _with_words(child, end) for child, end in ends.items()}
    [culprit] = [child for child, end in ends.items() if end is first]
    blamed = with_words.pop(culprit)
    for end in with_words.values():
        if end.words != blamed.words:  # ranks that report the same error are logged once
            log.info(describe_end(end, was_ready))
    # The cause may be a shard that is stopped, and has not ended.
    is_consequence = blamed.kind in (Kind.GAVE_UP, Kind.NOT_A_SHARD)
    return ChildDied.of(blamed, was_ready, describe_stopped(shards) if is_consequence else "")


def describe_stopped(children: Sequence[ManagedProcess]) -> str:
    """Which of them a signal has stopped, in parentheses; empty if none."""
    names = [child.name for child in children if child.is_stopped]
    return f" ({', '.join(names)} is stopped, as by SIGSTOP)" if names else ""


def end_of(child: ManagedProcess) -> End:
    """The end of a child that is not a shard."""
    return _with_words(child, End(child.name, child.returncode or 0))


def _end_of_watched(child: ManagedProcess, rank: int, num_shards: int, look: int) -> End:
    code = child.returncode or 0
    if rank < 0:
        return End(child.name, code, seen=look)
    return End(child.name, code, kind_of(code, num_shards), rank, look)


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
