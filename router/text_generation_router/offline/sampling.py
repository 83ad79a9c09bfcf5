"""The parameters of a generation, with the names of vLLM and OpenAI."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import orjson
from pydantic import AfterValidator, ValidationError, create_model
from text_generation_process.sampling import NUMBERS, SamplingNumbers

from text_generation_router.fields import (
    Body,
    Float32,
    NumSequences,
    Seed,
    Uint32,
    limited,
    none_empty,
    parameters_of,
)
from text_generation_router.request import GenerateParameters, Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """The parameters of the answers to one prompt. Raises ValueError for invalid values.

    `temperature` 0: always the most likely token; `top_k` 0 or -1: all tokens. At most one of
    `json_schema`, `regex` and `lark` may be set; the text then follows it.
    """

    n: NumSequences = 1
    """Answers to the prompt, whose prefill is computed once."""
    max_tokens: Uint32 | None = 16
    """None: as many as the context allows."""
    min_tokens: Uint32 = 0
    logit_bias: Mapping[Uint32, Float32] | None = None
    seed: Seed | None = None
    """Answer i uses seed + i; None: a random seed."""
    stop: Annotated[str | Sequence[str], AfterValidator(none_empty)] = ()
    """The text ends before the first of these."""
    include_stop_str_in_output: bool = False
    """The text ends after the stop string instead."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[Uint32] = ()
    """Tokens that end the text, in addition to the model's own."""
    logprobs: Uint32 | None = None
    """The number of most likely tokens at each position, in addition to the chosen token."""
    prompt_logprobs: bool = False
    """Compute the log-probabilities of the prompt's tokens."""
    deterministic: bool = False
    """The same results, bit for bit, regardless of batch composition."""
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        self.to_parameters()

    def to_parameters(self) -> GenerateParameters:
        """The router's parameters, without a prompt."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            checked = _Checked.model_validate(given)
        except ValidationError as error:
            raise ValueError(complaint(error)) from None
        return parameters_of(
            checked,
            max_new_tokens=self.max_tokens,
            top_n_tokens=self.logprobs,
            decoder_input_details=self.prompt_logprobs,
            grammar=self._grammar(),
        )

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


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_HINTS |= {name: limited(number) for name, number in NUMBERS.items()}
_FIELDS: dict[str, Any] = {name: (hint, ...) for name, hint in _HINTS.items()}
_Checked = create_model("_Checked", __base__=Body, **_FIELDS)


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
