"""How to generate, in the words that vLLM's and OpenAI's users know."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import orjson
from pydantic import ValidationError

from text_generation_router.api.bounded import Items
from text_generation_router.api.openai.schemas import Fraction, SamplingBody
from text_generation_router.api.schemas import Uint32
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters


class _Body(SamplingBody):
    """The types and ranges of `SamplingParams`; those of OpenAI's routes where they have it."""

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
    """How the answers to a prompt are generated. Raises ValueError for what can not be.

    Of `json_schema`, `regex` and `lark` at most one can be given; the text then follows it.
    """

    n: int = 1
    """Answers to one prompt, which is computed once."""
    max_tokens: int | None = 16
    """None: as many as fit into the context."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    typical_p: float = 1.0
    min_p: float = 0.0
    """Only tokens at least so likely as the best one times this."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    """Answer i is drawn with seed + i; None: a random one."""
    stop: str | Sequence[str] = ()
    """The text ends before any of these."""
    include_stop_str_in_output: bool = False
    """The text ends after it instead."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, beside the model's own."""
    logprobs: int | None = None
    """So many of the best tokens at each position; the chosen token's own always comes along."""
    prompt_logprobs: bool = False
    """Compute the log-probabilities of the prompt's tokens."""
    deterministic: bool = False
    """The same tokens, bit for bit, in whatever batch."""
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        self._checked()
        self._grammar()

    def to_parameters(self) -> GenerateParameters:
        """The same for the router, without a prompt."""
        checked = self._checked()
        asked = checked.sampling()
        return replace(
            asked,
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.min_tokens,
            num_unstopped_tokens=self.min_tokens,
            min_p=(checked.min_p or None) if asked.do_sample else None,
            ignore_eos_token=self.ignore_eos,
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
            includes_stop=self.include_stop_str_in_output,
            top_n_tokens=self.logprobs,
            decoder_input_details=self.prompt_logprobs,
            grammar=self._grammar(),
        )

    def _checked(self) -> _Body:
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in _Body.model_fields
        }
        given["stop"] = _listed(self.stop)
        given["stop_token_ids"] = _listed(self.stop_token_ids)
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(key): bias for key, bias in self.logit_bias.items()}
        try:
            return _Body.model_validate(given)
        except ValidationError as error:
            raise ValueError(complaint(error)) from None

    def _grammar(self) -> Grammar | None:
        schema = self.json_schema
        if schema is not None and not isinstance(schema, str):
            schema = orjson.dumps(dict(schema)).decode()
        grammars = [
            Grammar("json_schema", schema) if schema is not None else None,
            Grammar("regex", self.regex) if self.regex is not None else None,
            Grammar("lark", self.lark) if self.lark is not None else None,
        ]
        asked = [grammar for grammar in grammars if grammar is not None]
        if len(asked) > 1:
            raise ValueError("`json_schema`, `regex` and `lark` exclude each other: give one")
        return asked[0] if asked else None


def _listed(given: Any) -> Any:
    """A sequence as a list; what is none, and a text, as it is."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    return list(given) if is_list else given


def complaint(error: ValidationError, within: str = "") -> str:
    """The first of pydantic's complaints in a sentence; `within` names what was checked.

    Below a field pydantic also names types: where they begin, the place is clear enough.
    """
    first = error.errors()[0]
    place = within
    for part in first["loc"][:2]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
        if not within:
            break
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"`{place}`: {message}. Given: {first['input']!r:.60}"
