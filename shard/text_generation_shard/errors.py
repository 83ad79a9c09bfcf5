"""Errors a person can mend; the message is the one sentence they read."""


class ModelError(ValueError):
    """The model can not be served: says what is wrong with it, what was expected, what to do."""


class BatchError(ValueError):
    """A call named a batch or request the shard does not have, or asked for more than it has."""


class RankError(RuntimeError):
    """Another shard did not come, or has given up: the message names it. What the ranks computed
    together in this message is lost."""

    def __init__(self, sentence: str, is_final: bool) -> None:
        super().__init__(sentence)
        self.is_final = is_final
        """Whether this rank can not go on: another one did not come within the step deadline, is
        gone, or this process is stopping. False: another rank has given up this message only, and
        the next one can be computed."""
