"""The sampling parameters of a request, and why a generation ends, for router and shards alike.

A field of `SamplingNumbers` is all that is written of a number: from it follow the fields of the
HTTP bodies and of `LLM`, the limits, and the columns of the shards' row table and of the kernels. A
test compares the message NextTokenChooserParameters with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple, Self


class FinishReason(Enum):
    """Why a generation ended; the value is TGI's word, the name that of generate.proto."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    # Found by the router.
    STOP_SEQUENCE = "stop_sequence"
    # Only for `stop_token_ids`, which TGI does not have.
    STOP_TOKEN = "stop_token"


class Pooling(Enum):
    """Which hidden state represents a prompt: that of its last token, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


class Range(NamedTuple):
    """The values that TGI allows, which all change something, and the same in words."""

    allows: Callable[[float], bool]
    words: str


# Written so that NaN is refused.
_POSITIVE = Range(lambda value: value > 0, "strictly positive")
_PENALTY = Range(lambda value: -2.0 <= value <= 2.0, ">= -2.0 and <= 2.0")
_PROBABILITY = Range(lambda value: 0.0 < value < 1.0, "> 0.0 and < 1.0")
_SHARE = Range(lambda value: 0.0 < value <= 1.0, "> 0.0 and <= 1.0")


@dataclass(frozen=True, slots=True)
class Number:
    """What is known of a number besides its name."""

    # Changes nothing, and has the number's type.
    neutral: float
    range: Range
    # The limits of the other dialects, as arguments of pydantic's `Field`. What they allow beyond
    # `range` changes nothing; a temperature or top_p of 0: tokens are not drawn.
    limits: Mapping[str, Any]
    # It penalises tokens that occurred before. Others shape how a token is drawn.
    is_penalty: bool = False
    # For users: in all dialects, then in TGI's (None: it has no such field) and in the others.
    about: str = ""
    in_tgi: str | None = ""
    elsewhere: str = ""
    # A usual value.
    example: float = 0.0


def _number(neutral: float, *known: Any, **more: Any) -> Any:
    return field(default=neutral, metadata={"number": Number(neutral, *known, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The numbers that shape the choice of a token, in the order in which TGI looks at them; the
    defaults change nothing."""

    temperature: float = _number(
        1.0,
        _POSITIVE,
        {"ge": 0},
        about="Above 1 the choice of tokens is more random, below 1 less.",
        in_tgi=" Must be above 0.",
        elsewhere=" 0: always the likeliest token. Default: 1.",
        example=0.5,
    )
    repetition_penalty: float = _number(
        1.0,
        _POSITIVE,
        {"gt": 0},
        is_penalty=True,
        about="Above 1, tokens that were used are less likely to come again. 1: no penalty.",
        example=1.03,
    )
    frequency_penalty: float = _number(
        0.0,
        _PENALTY,
        {"ge": -2, "le": 2},
        is_penalty=True,
        about="Makes a token less likely the more often it was generated.",
        in_tgi=" -2.0 to 2.0.",
        example=0.1,
    )
    presence_penalty: float = _number(
        0.0,
        _PENALTY,
        {"ge": -2, "le": 2},
        is_penalty=True,
        about="Makes each token that was generated less likely.",
        in_tgi=" -2.0 to 2.0.",
        example=0.1,
    )
    top_p: float = _number(
        1.0,
        _PROBABILITY,
        {"ge": 0, "le": 1},
        about="Draw only from the likeliest tokens whose probabilities add up to this, 0 to 1.",
        example=0.95,
    )
    typical_p: float = _number(
        1.0,
        _PROBABILITY,
        {"gt": 0, "le": 1},
        about="Draw only from the most typical tokens whose probabilities add up to this, 0 to 1.",
        example=0.95,
    )
    # Only tokens with at least this share of the best token's probability.
    min_p: float = _number(0.0, _SHARE, {"ge": 0, "le": 1}, in_tgi=None, example=0.05)
    top_k: int = _number(
        0,
        _POSITIVE,
        {"ge": -1, "lt": 2**31},
        about="Draw only from this many of the likeliest tokens.",
        elsewhere=" 0 or -1: from all.",
        example=10,
    )


NUMBERS: Mapping[str, Number] = {
    own.name: own.metadata["number"] for own in fields(SamplingNumbers)
}
DRAWING = tuple(name for name, number in NUMBERS.items() if not number.is_penalty)
PENALTIES = tuple(name for name, number in NUMBERS.items() if number.is_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingNumbers):
    """How the next token is chosen; see NextTokenChooserParameters. Defaults change nothing."""

    do_sample: bool = False
    seed: int = 0
    watermark: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_wire(cls, message: Any) -> Self:
        """Of NextTokenChooserParameters. Raises ValueError if parallel fields differ in length."""
        bias = zip(message.logit_bias_ids, message.logit_bias_values, strict=True)
        values = {name: getattr(message, name) for name in SAMPLING if name != "logit_bias"}
        return cls(**values, logit_bias=tuple(bias))

    def to_wire(self) -> dict[str, Any]:
        """The fields of NextTokenChooserParameters."""
        values = {name: getattr(self, name) for name in SAMPLING if name != "logit_bias"}
        values["logit_bias_ids"] = [token_id for token_id, _ in self.logit_bias]
        values["logit_bias_values"] = [bias for _, bias in self.logit_bias]
        return values

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are drawn (then the seed is reported), or the best one is taken."""
        return self.do_sample or self._changes(DRAWING)

    @property
    def is_penalising(self) -> bool:
        """Whether tokens that occurred before are penalised."""
        return self._changes(PENALTIES)

    def _changes(self, names: tuple[str, ...]) -> bool:
        return any(getattr(self, name) != NUMBERS[name].neutral for name in names)


SAMPLING = tuple(own.name for own in fields(Sampling))
"""The names of all sampling parameters."""
