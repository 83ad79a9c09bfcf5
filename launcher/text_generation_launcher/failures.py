"""Which of several ended children failed first, and the sentences for the log."""

import signal
import time
from collections.abc import Callable, Sequence

from text_generation_launcher.log import Log
from text_generation_launcher.process import ManagedProcess

GAVE_UP = 3
"""The exit code of a shard that ends because another shard failed."""
CAUSE_S = 0.5
"""How long after the end of one child the end of another, which caused it, may be noticed."""
FAILING_S = 5.0
"""The same where the other has logged its error and only has to end, as torch takes its time."""
POLL_S = 0.02


class ChildDied(Exception):
    """A child that should run has ended; the message has its name, how it ended, its last words."""

    def __init__(self, sentence: str, how: str) -> None:
        super().__init__(sentence)
        self.how = how
        """The same without the words."""


def how_it_ended(child: ManagedProcess, was_ready: bool = False, gave_up: bool = False) -> str:
    """The end of a child, without its last words. `gave_up`: because of another shard."""
    name, code = child.name, child.returncode or 0
    if gave_up:
        how = f"{name} ended because another shard failed (exit code {code})"
    elif code > 0:
        how = f"{name} failed with exit code {code}"
    elif code == 0:
        how = f"{name} ended unexpectedly with exit code 0"
    else:
        how = f"{name} was killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            how += ", as the system does when memory runs out,"
    return f"{how} while serving" if was_ready else how


def with_words(how: str, words: Sequence[str]) -> str:
    """How a child ended, and its last lines or the sentences of its last errors."""
    if not words:
        return f"{how} and printed nothing"
    if len(words) == 1:
        return f"{how}: {words[0]}"
    return "\n".join([f"{how}; its last lines:", *(f"  {line}" for line in words)])


def death_of(child: ManagedProcess) -> ChildDied:
    """The end of a child that is not a shard."""
    child.drain()
    how = how_it_ended(child)
    return ChildDied(with_words(how, child.last_words()), how)


def diagnose(
    shards: Sequence[ManagedProcess],
    router: Sequence[ManagedProcess],
    wait: Callable[[float], None],
    log: Log,
    was_ready: bool,
) -> ChildDied:
    """Names the child that failed first; at least one has ended. Logs the ends of the others.

    `wait` takes seconds, and may return earlier or raise.
    """

    def gave_up(child: ManagedProcess) -> bool:
        return child in shards and len(shards) > 1 and child.returncode == GAVE_UP

    def order(child: ManagedProcess) -> int:
        """A lower one can be the cause of a higher one: killed by a signal that the launcher did
        not send, failed by itself, exit code 0, gave up; the router ends when it lost a shard."""
        if child in router:
            return 4
        code = child.returncode or 0
        return 0 if code < 0 else 2 if code == 0 else 3 if gave_up(child) else 1

    ended: list[ManagedProcess] = []
    """In the order in which they were noticed; of those noticed at once by rank."""
    began = time.monotonic()
    while True:
        children = (*shards, *router)
        ended += [child for child in children if child not in ended and not child.is_alive]
        first = min(ended, key=order)
        may_follow = first in router or (len(shards) > 1 and order(first) > 0)
        most_s = FAILING_S if any(s.is_alive and s.is_failing for s in shards) else CAUSE_S
        remaining_s = began + most_s - time.monotonic()
        if all(not shard.is_alive for shard in shards) or remaining_s <= 0 or not may_follow:
            break
        wait(min(remaining_s, POLL_S))
    words = {}
    for child in ended:
        child.drain()
        words[child] = child.last_words()  # not logged elsewhere after this
    for child in ended:
        if words[child] != words[first]:  # ranks that report the same error are logged once
            log.info(with_words(how_it_ended(child, was_ready, gave_up(child)), words[child]))
    # The cause may be a shard that is stopped, and has not ended.
    cause = describe_stopped(shards) if first in router or gave_up(first) else ""
    how = how_it_ended(first, was_ready, gave_up(first))
    return ChildDied(with_words(how, words[first]) + cause, how + cause)


def describe_stopped(children: Sequence[ManagedProcess]) -> str:
    """Which of them a signal has stopped, in parentheses; empty if none."""
    names = [child.name for child in children if child.is_stopped]
    return f" ({', '.join(names)} is stopped, as by SIGSTOP)" if names else ""


def grouped(messages: Sequence[tuple[str, str]], doing: str = "") -> str:
    """Names with their last messages, grouped by message; `doing` follows the names."""
    names: dict[str, list[str]] = {}
    for name, message in messages:
        names.setdefault(message, []).append(name)
    return "; ".join(
        f"{', '.join(group)}{doing}" + (f": {message}" if message else "")
        for message, group in names.items()
    )
