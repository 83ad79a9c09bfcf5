"""A grammar that another rank follows, which tells this one what its rows have chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_shard.grammars.constraint import Grammar


@dataclass(frozen=True, slots=True)
class GrammarElsewhere(Grammar):
    """What this rank knows of a grammar: that there is one."""


class ConstraintElsewhere:
    """One request's place in such a grammar: whatever is chosen is right. See `Constraint`."""

    def __init__(self) -> None:
        self.failure = ""
        self.is_driven = False
        self.eos_ids: tuple[int, ...] = ()

    def may_end_after(self, count: int) -> bool:
        """See Constraint."""
        return True

    def allowed(self, guesses: Sequence[int]) -> Sequence[int]:
        """See Constraint."""
        return guesses

    def settle(self, token: int) -> int:
        """See Constraint."""
        return token
