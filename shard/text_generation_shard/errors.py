"""Errors that a user can fix; the message is the one sentence the user reads."""


class ModelError(ValueError):
    """The model can not be served; the message says what is wrong, what was expected, what to
    do."""


class UnsupportedError(ModelError):
    """The native implementation does not compute this model; another one may."""


class BatchError(ValueError):
    """A call names an unknown batch or request, or exceeds what the shard has."""


class OwnError(BatchError):
    """A BatchError of this rank that other ranks may not have: this rank must report it to them.
    Any other BatchError occurs on all ranks alike."""


class RankError(RuntimeError):
    """Another shard is lost or has failed; the message names it. The results of the current
    message are lost."""

    def __init__(self, sentence: str, is_final: bool) -> None:
        super().__init__(sentence)
        self.is_final = is_final
        """Whether this rank must end: another one missed the step deadline or has ended, or this
        process is stopping. False: another rank failed this message only, and the next one can be
        computed."""


OTHER_RANK_FAILED = 3
"""Exit code of a shard that ends because another one failed."""
