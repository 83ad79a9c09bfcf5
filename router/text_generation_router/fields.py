"""Types of fields that several APIs and `LLM` share: ranges, lists that are bounded, and fields
that are refused."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    create_model,
)
from pydantic_core import CoreSchema, PydanticKnownError, core_schema
from text_generation_process.sampling import NUMBERS, PENALTIES, Number

from text_generation_router.request import GenerateParameters

# No real request has more messages, tools, stop strings or biases.
MAX_ITEMS = 4096

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Bounded:
    """Stands behind a list or an object: refuses more than `most` items before any is validated.
    A list is validated up to the first mistake, because errors take a multiple of their items.

    In place of pydantic's `FailFast`, which can not be hashed and so not be a part of a union.
    """

    most: int | None = MAX_ITEMS

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema = {**schema, "fail_fast": True}
        # A function of Python, in which other threads may run before each list.
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, given: Any) -> Any:
        if self.most is not None and isinstance(given, list | dict) and len(given) > self.most:
            kind = "List" if isinstance(given, list) else "Dictionary"
            raise PydanticKnownError(
                "too_long",
                {"field_type": kind, "max_length": self.most, "actual_length": len(given)},
            )
        return given


Items = Annotated[list[Item], Bounded()]
"""A list of at most `MAX_ITEMS`."""
Numbers = Annotated[list[Item], Bounded(None)]
"""A list of numbers, as many as there are."""
Entries = Annotated[dict[str, Item], Bounded()]
"""An object of at most `MAX_ITEMS` keys."""


def to_float32(value: float) -> float:
    """The nearest 32-bit float, which is what the shard computes with."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise ValueError("must fit in a 32-bit float") from None
    assert isinstance(rounded, float)
    return rounded


def _to_token_ids(biases: dict[str, float]) -> dict[str, float]:
    """Checks that the keys are integers, written as in JSON."""
    for key in biases:
        # Longer ones are no ids, and `int` takes long for them.
        if not (len(key) < 20 and key.isascii() and key.isdecimal() and key == str(int(key))):
            raise ValueError(f'keys must be token ids such as "42", not {key[:20]!r}')
    return biases


def _is_no_choice(name: str) -> str:
    if name in ("auto", "none", "required"):
        raise ValueError(f"a tool can not be called {name!r}")
    return name


ToolName = Annotated[str, Field(min_length=1), AfterValidator(_is_no_choice)]
"""The name of a tool, which `tool_choice` can tell from its other words."""
Float32 = Annotated[float, AfterValidator(to_float32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Uint32 = Annotated[int, Field(ge=0, lt=2**32)]
Uint64 = Annotated[int, Field(ge=0, lt=2**64)]
CacheSalt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        description="Prompts share cached results only with prompts of the same salt.",
    ),
]
LogitBias = Annotated[Entries[Float32], AfterValidator(_to_token_ids)]


# The limits come first: OpenAPI shows them only there.
Penalty = Annotated[float, Field(ge=-2, le=2), AfterValidator(to_float32)]
NumSequences = Annotated[int, Field(ge=1, le=128)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
MOST_TOP_LOGPROBS = 20


def none_empty(stops: str | Sequence[str]) -> str | Sequence[str]:
    """Checks stop strings."""
    if "" in ([stops] if isinstance(stops, str) else stops):
        raise ValueError("a stop string must not be empty")
    return stops


Stop = Annotated[str | Items[str], AfterValidator(none_empty)]


class Body(BaseModel):
    """Types are taken literally: 1 is a number, "1" is not. Unknown fields are not read."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


def optional(description: str | None, default: Any = None, **more: Any) -> Any:
    """A field that may be left out; without another default it may be null."""
    return Field(default=default, description=description, **more)


def refuses(*harmless: Any, sentence: str = "not supported; leave it out") -> AfterValidator:
    """For an unsupported field: only null and the values in `harmless` are accepted."""

    def check(value: Any) -> None:
        if value is not None and value not in harmless:
            raise ValueError(sentence)

    return AfterValidator(check)


NOT_SUPPORTED = Field(description="Not supported.")
Refused = Annotated[Any, refuses(), NOT_SUPPORTED]


Complete = TypeVar("Complete", bound=Body)


def limited(number: Number) -> Any:
    """The type of a sampling number, with the limits of all dialects but TGI's."""
    limits = Field(**number.limits)
    if isinstance(number.neutral, int):
        return Annotated[int, limits]
    return Annotated[float, limits, AfterValidator(to_float32)]


def with_numbers(body: type[Complete]) -> type[Complete]:
    """Adds the sampling numbers to a body. A field of the name of one gets its type and description
    and keeps its place; the others come last."""
    own = {
        name: (limited(number) | None, optional(number.about + number.elsewhere or None))
        for name, number in NUMBERS.items()
    }
    return _completed(body, own)


def with_numbers_of_tgi(body: type[Complete]) -> type[Complete]:
    """The same with TGI's numbers, whose limits `Validation` checks."""
    own = {
        name: (
            (Int32 if isinstance(number.neutral, int) else Float32) | None,
            optional(number.about + number.in_tgi, examples=[number.example]),
        )
        for name, number in NUMBERS.items()
        if number.in_tgi is not None
    }
    return _completed(body, own)


def _completed(body: type[Complete], own: dict[str, Any]) -> type[Complete]:
    return create_model(
        body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **own
    )


def drawing(asked: Any) -> dict[str, Any]:
    """How OpenAI and Anthropic ask for sampling, as fields of `Sampling`.

    Tokens are drawn unless temperature or top_p is 0. What TGI does not allow changes nothing.
    """
    given = {name: value for name in NUMBERS if (value := getattr(asked, name, None)) is not None}
    is_drawn = 0 not in (given.get("temperature"), given.get("top_p"))
    names = NUMBERS if is_drawn else PENALTIES
    kept = [name for name in names if name in given and NUMBERS[name].range.allows(given[name])]
    return {"do_sample": is_drawn, **{name: given[name] for name in kept}}


def parameters_of(asked: Any, **more: Any) -> GenerateParameters:
    """The parameters of what has OpenAI's and vLLM's names of them, without a prompt; None: left
    out. `more`: those whose form is not the same everywhere."""
    least = asked.min_tokens or 0
    return GenerateParameters.of(
        inputs="",
        **drawing(asked),
        logit_bias=asked.logit_bias,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        seed=None if asked.seed is None else asked.seed % 2**64,
        keeps_stop_sequence=False,
        deterministic=bool(asked.deterministic),
        min_new_tokens=least,
        num_unstopped_tokens=least,
        ignore_eos_token=bool(asked.ignore_eos),
        stop_token_ids=tuple(dict.fromkeys(asked.stop_token_ids or ())),
        includes_stop=bool(asked.include_stop_str_in_output),
        most_top_n_tokens=MOST_TOP_LOGPROBS,
        **more,
    )
