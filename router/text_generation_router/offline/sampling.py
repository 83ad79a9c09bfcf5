"""The parameters of a generation, with the names of vLLM and OpenAI."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import orjson
from pydantic import ValidationError

from text_generation_router.fields import (
    MOST_TOP_LOGPROBS,
    Body,
    Fraction,
    Items,
    LogitBias,
    NumSequences,
    Penalty,
    Positive,
    Seed,
    Stop,
    Temperature,
    TopK,
    TypicalP,
    Uint32,
    drawing,
)
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters


class _Checked(Body):
    """Validates `SamplingParams`; fields of OpenAI's routes are validated as there."""

    frequency_penalty: Penalty | None
    presence_penalty: Penalty | None
    logit_bias: LogitBias | None
    n: NumSequences | None
    seed: Seed | None
    stop: Stop | None
    temperature: Temperature | None
    top_p: Fraction | None
    repetition_penalty: Positive | None
    top_k: TopK | None
    typical_p: TypicalP | None
    deterministic: bool | None
    max_tokens: Uint32 | None
    min_tokens: Uint32
    min_p: Fraction
    include_stop_str_in_output: bool
    ignore_eos: bool
    stop_token_ids: Items[Uint32]
    logprobs: Uint32 | None
    prompt_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of the answers to one prompt. Raises ValueError for invalid values.

    At most one of `json_schema`, `regex` and `lark` may be set; the text then follows it.
    """

    n: int = 1
    """Answers to the prompt, whose prefill is computed once."""
    max_tokens: int | None = 16
    """None: as many as the context allows."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    typical_p: float = 1.0
    min_p: float = 0.0
    """Only tokens with at least this share of the best token's probability."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    """Answer i uses seed + i; None: a random seed."""
    stop: str | Sequence[str] = ()
    """The text ends before the first of these."""
    include_stop_str_in_output: bool = False
    """The text ends after the stop string instead."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, in addition to the model's own."""
    logprobs: int | None = None
    """The number of most likely tokens at each position, in addition to the chosen token."""
    prompt_logprobs: bool = False
    """Compute the log-probabilities of the prompt's tokens."""
    deterministic: bool = False
    """The same results, bit for bit, regardless of batch composition."""
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        self._checked()
        self._grammar()

    def to_parameters(self) -> GenerateParameters:
        """The router's parameters, without a prompt."""
        checked = self._checked()
        drawn = drawing(checked.temperature, checked.top_p, checked.top_k, checked.typical_p)
        return GenerateParameters(
            inputs="",
            **drawn,
            frequency_penalty=checked.frequency_penalty,
            presence_penalty=checked.presence_penalty,
            repetition_penalty=checked.repetition_penalty,
            logit_bias=tuple((int(key), bias) for key, bias in (checked.logit_bias or {}).items()),
            stop=(checked.stop,) if isinstance(checked.stop, str) else tuple(checked.stop or ()),
            seed=None if checked.seed is None else checked.seed % 2**64,
            keeps_stop_sequence=False,
            most_top_n_tokens=MOST_TOP_LOGPROBS,
            deterministic=bool(checked.deterministic),
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.min_tokens,
            num_unstopped_tokens=self.min_tokens,
            min_p=(checked.min_p or None) if drawn["do_sample"] else None,
            ignore_eos_token=self.ignore_eos,
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
            includes_stop=self.include_stop_str_in_output,
            top_n_tokens=self.logprobs,
            decoder_input_details=self.prompt_logprobs,
            grammar=self._grammar(),
        )

    def _checked(self) -> _Checked:
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in _Checked.model_fields
        }
        given["stop"] = _listed(self.stop)
        given["stop_token_ids"] = _listed(self.stop_token_ids)
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(key): bias for key, bias in self.logit_bias.items()}
        try:
            return _Checked.model_validate(given)
        except ValidationError as error:
            raise ValueError(complaint(error)) from None

    def _grammar(self) -> Grammar | None:
        schema = self.json_schema
        if schema is not None and not isinstance(schema, str):
            schema = orjson.dumps(dict(schema)).decode()
        sources: dict[Literal["json_schema", "regex", "lark"], str | None]
        sources = {"json_schema": schema, "regex": self.regex, "lark": self.lark}
        grammars = [Grammar(kind, source) for kind, source in sources.items() if source is not None]
        if len(grammars) > 1:
            raise ValueError("`json_schema`, `regex` and `lark` exclude each other: set only one")
        return grammars[0] if grammars else None


def _listed(given: Any) -> Any:
    """An iterable as a list; text and other values unchanged."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    return list(given) if is_list else given


def complaint(error: ValidationError, within: str = "") -> str:
    """The first of pydantic's errors as a sentence; `within` names the validated argument.

    Of pydantic's location only the first parts are used: the rest may name types.
    """
    first = error.errors()[0]
    place = within
    for part in first["loc"][:2]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
        if not within:
            break
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"`{place}`: {message}. Given: {first['input']!r:.60}"
