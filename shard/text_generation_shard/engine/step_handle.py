"""A step that was launched, and what became of it."""

from typing import Protocol

from text_generation_shard.device.base import Launched
from text_generation_shard.engine.plan import Plan
from text_generation_shard.engine.step import StepOutput


class Collector(Protocol):
    """Who gives steps their outcomes: the engine."""

    def collect(self, handle: "StepHandle") -> None:
        """See Engine."""


class StepHandle:
    """A step that was launched."""

    def __init__(
        self, engine: Collector, plan: Plan, launched: Launched, began_ns: int, admit_ns: int
    ) -> None:
        self.plan, self.launched = plan, launched
        self.began_ns, self.admit_ns = began_ns, admit_ns
        self.outcome: StepOutput | BaseException | None = None
        """Set by the engine."""
        self._engine = engine

    def wait(self) -> None:
        """Until `result` does not, or hardly, wait. From any thread."""
        if self.outcome is None:
            self.launched.wait()

    def result(self) -> StepOutput:
        """Wait for the step. If it failed, its new requests have no rows, and the others are as
        they were but for the blocks that their tables grew by. For want of memory only requests
        fail, and only those that do not fit alone: see `StepOutput.errors`."""
        self._engine.collect(self)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None, "a collected step has an outcome"
        return self.outcome
