"""A grammar that rank 0 follows; it broadcasts the chosen tokens to this rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_shard.grammars.constraint import Grammar


@dataclass(frozen=True, slots=True)
class GrammarElsewhere(Grammar):
    """Marks that a request has a grammar."""


class ConstraintElsewhere:
    """The state of one request in such a grammar: accepts every token. See `Constraint`."""

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
