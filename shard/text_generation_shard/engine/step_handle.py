"""A launched step and its outcome."""

from typing import Protocol

from text_generation_shard.device.base import Launched
from text_generation_shard.engine.plan import Plan
from text_generation_shard.engine.step import StepOutput


class Collector(Protocol):
    """The part of the engine that sets the outcomes of steps."""

    def collect(self, handle: "StepHandle") -> None:
        """See Engine."""


class StepHandle:
    """A launched step. The engine sets its outcome."""

    def __init__(
        self, engine: Collector, plan: Plan, launched: Launched, began_ns: int, admit_ns: int
    ) -> None:
        self.plan, self.launched = plan, launched
        self.began_ns, self.admit_ns = began_ns, admit_ns
        self.outcome: StepOutput | BaseException | None = None
        self._engine = engine

    def wait(self) -> None:
        """Wait until `result` returns almost at once. From any thread."""
        if self.outcome is None:
            self.launched.wait()

    def result(self) -> StepOutput:
        """Wait for the step. If it failed, its new requests have no rows, and the other rows are
        unchanged but for grown block tables. Out of memory fails only the requests that do not fit
        alone: see `StepOutput.errors`."""
        self._engine.collect(self)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None, "a collected step has an outcome"
        return self.outcome
