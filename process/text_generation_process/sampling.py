"""The sampling parameters of a request, as router and shards have them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; see NextTokenChooserParameters. Defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    watermark: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are drawn (then the seed is reported), or the best one is taken."""
        return self.do_sample or self.temperature != 1.0 or self.is_filtering

    @property
    def is_filtering(self) -> bool:
        """Whether some tokens are excluded from drawing."""
        shares = self.top_p, self.typical_p
        return self.top_k != 0 or min(shares) < 1.0 or self.min_p > 0.0

    @property
    def is_penalising(self) -> bool:
        """Whether tokens that occurred before are penalised."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )
