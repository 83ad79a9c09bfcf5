"""Errors a person can mend; the message is the one sentence they read."""


class ModelError(ValueError):
    """The model can not be served: says what is wrong with it, what was expected, what to do."""


class BatchError(ValueError):
    """A call named a batch or request the shard does not have, or asked for more than it has."""


class OwnError(BatchError):
    """The same for a reason that this rank has and others may not have: it can not compute what
    they do, and has to say so. Of any other BatchError all ranks have the same."""


class RankError(RuntimeError):
    """Another shard did not come, or has given up: the message names it. What the ranks computed
    together in this message is lost."""

    def __init__(self, sentence: str, is_final: bool) -> None:
        super().__init__(sentence)
        self.is_final = is_final
        """Whether this rank can not go on: another one did not come within the step deadline, is
        gone, or this process is stopping. False: another rank has given up this message only, and
        the next one can be computed."""


OTHER_RANK_FAILED = 3
"""Exit code of a shard that has ended because another one did."""
