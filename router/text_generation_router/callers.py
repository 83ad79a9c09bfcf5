"""Whose request it is: what it may share with others, and how much it may still ask for."""

import math
from dataclasses import dataclass

from text_generation_router.errors import KeyLimitError, ValidationError

_MINUTE_S = 60.0
# Nobody knows when a request that is under way will end.
_RETRY_PLACE_S = 1


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What each API key may ask for; None: as much as it likes."""

    max_concurrent_requests: int | None = None
    max_tokens_per_minute: int | None = None


class Allowance:
    """What one API key has under way, and the tokens it may still use; changed by `Infer` alone.

    Tokens are a bucket which holds those of one minute and fills at that pace. Whoever comes while
    there are any in it is let in. Its prompt is taken off when it starts and each of its tokens as
    it is read, so the bucket can go below zero: nobody is let in until it has filled again.
    `now` is in seconds, of a clock that never goes back.
    """

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits
        self.num_under_way = 0
        self._tokens = float(limits.max_tokens_per_minute or 0)
        # When `_tokens` was right.
        self._filled_at = -math.inf

    @property
    def num_free(self) -> int | None:
        """How many more sequences it may have under way, but one at least; None: any number."""
        most = self._limits.max_concurrent_requests
        return None if most is None else max(1, most - self.num_under_way)

    def check_could_fit(self, num: int) -> None:
        """Raises ValidationError for more sequences than it may ever have under way."""
        most = self._limits.max_concurrent_requests
        if most is not None and num > most:
            raise ValidationError(
                f"one request asks for {num} sequences; an API key may have at most {most} under "
                "way (--max-concurrent-requests-per-key)"
            )

    def enter(self, num: int, now: float) -> None:
        """Takes places for `num` sequences. Raises KeyLimitError, and ValidationError if there can
        never be so many."""
        self.check_could_fit(num)
        most = self._limits.max_concurrent_requests
        if most is not None and self.num_under_way + num > most:
            raise KeyLimitError(
                f"This API key has {self.num_under_way} of at most {most} sequences under way "
                "(--max-concurrent-requests-per-key); try again when one has ended",
                "requests",
                _RETRY_PLACE_S,
            )
        if (wait_s := self._wait_s(now)) > 0:
            raise KeyLimitError(
                f"This API key has used its {self._limits.max_tokens_per_minute} tokens a minute "
                f"(--max-tokens-per-minute-per-key); try again in {wait_s} s",
                "tokens",
                wait_s,
            )
        self.num_under_way += num

    def leave(self, num: int) -> None:
        """Gives places back."""
        self.num_under_way -= num
        assert self.num_under_way >= 0, "more left than came"

    def take(self, num_tokens: int, now: float) -> None:
        """Takes tokens off that were used."""
        if self._limits.max_tokens_per_minute is not None:
            self._tokens = self._tokens_at(now) - num_tokens
            self._filled_at = now

    def _tokens_at(self, now: float) -> float:
        most = float(self._limits.max_tokens_per_minute or 0)
        return min(most, self._tokens + (now - self._filled_at) * most / _MINUTE_S)

    def _wait_s(self, now: float) -> int:
        """Whole seconds after which there is a token in the bucket; 0: there is one."""
        most = self._limits.max_tokens_per_minute
        if most is None or (tokens := self._tokens_at(now)) > 0:
            return 0
        return math.floor(-tokens * _MINUTE_S / most) + 1


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. Callers of different salts share no computed prompt."""

    salt: str = ""
    allowance: Allowance | None = None


# Whoever asks a server that has no keys, or has one and no limits.
ANYBODY = Caller()
