"""Checks the parameters of a request against the limits of this server: one function per rule.

The order of the rules and the sentences are TGI's: clients see the first rule that fails.
Comparisons are written so that NaN fails them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from text_generation_router.errors import AdapterNotFoundError, ContextLengthError, ValidationError
from text_generation_router.grammar import GrammarCompiler
from text_generation_router.metrics import Metrics
from text_generation_router.request import (
    Grammar,
    Pooling,
    Request,
    Sampling,
    StoppingCriteria,
)
from text_generation_router.tokenizer import LONG_TEXT, Tokenizer

TRUNCATE_TO_FIT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParameters:
    """The parameters of a request, of which only the types are checked; None: not given."""

    inputs: str
    # The prompt as ids, in place of `inputs`; ids are below `Limits.vocab_size`.
    input_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos_token: bool = False
    return_full_text: bool | None = None
    stop: tuple[str, ...] = ()
    # Number of tokens kept at the end of the prompt; TRUNCATE_TO_FIT: as many as fit.
    truncate: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    adapter_id: str | None = None
    keeps_stop_sequence: bool = True
    # See StoppingCriteria.
    includes_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_unstopped_tokens: int = 0
    # What the API that was asked allows, where that is more than this server's `Limits` for TGI's.
    most_stop_sequences: int = 0
    most_top_n_tokens: int = 0
    visible_special_tokens: frozenset[str] = frozenset()
    shows_special_tokens: bool = False
    deterministic: bool = False
    cache_salt: str | None = None
    priority: int = 0
    # For prompt-only requests; see `Request`.
    pooling: Pooling | None = None
    score_token_ids: tuple[int, ...] = ()

    @property
    def wants_sampling(self) -> bool:
        """Whether any parameter asks for tokens to be drawn."""
        shapers = (self.temperature, self.top_k, self.top_p, self.typical_p, self.min_p)
        return self.do_sample or any(shaper is not None for shaper in shapers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of this server, all inclusive; token ids are below `vocab_size`."""

    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    # The tokens of a request are the same in any batch, bit for bit.
    is_deterministic: bool = True


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt after truncation, and of its answer at most."""

    inputs: int
    max_new_tokens: int
    # `inputs` is a lower bound: the prompt was not tokenized.
    is_least: bool = False


Rule = Callable[[GenerateParameters, Limits], str | None]
LengthRule = Callable[[Lengths, GenerateParameters, Limits], ValidationError | None]


def _best_of_needs_sampling(asked: GenerateParameters, limits: Limits) -> str | None:
    if (asked.best_of or 1) > 1 and not asked.wants_sampling:
        return "you must use sampling when `best_of` is > 1"
    return None


def _range(name: str, is_valid: Callable[[float], bool], words: str) -> Rule:
    def rule(asked: GenerateParameters, limits: Limits) -> str | None:
        value = getattr(asked, name)
        return None if value is None or is_valid(value) else f"`{name}` must be {words}"

    return rule


_POSITIVE = (lambda value: value > 0, "strictly positive")
_PENALTY = (lambda value: -2.0 <= value <= 2.0, ">= -2.0 and <= 2.0")
_PROBABILITY = (lambda value: 0.0 < value < 1.0, "> 0.0 and < 1.0")


def _logit_bias_in_range(asked: GenerateParameters, limits: Limits) -> str | None:
    for token_id, bias in asked.logit_bias:
        if token_id >= limits.vocab_size:
            return (
                f"`logit_bias` must name token ids below {limits.vocab_size}, the size of the "
                f"vocabulary. Given: {token_id}"
            )
        if not -100.0 <= bias <= 100.0:
            return f"`logit_bias` must be >= -100.0 and <= 100.0. Given: {bias} for {token_id}"
    return None


def _stop_token_ids(asked: GenerateParameters, limits: Limits) -> str | None:
    unknown = [given for given in asked.stop_token_ids if not 0 <= given < limits.vocab_size]
    if not unknown:
        return None
    return (
        f"`stop_token_ids` must be token ids >= 0 and below {limits.vocab_size}, the size of the "
        f"vocabulary. Given: {unknown[0]}"
    )


def _stop_sequences(asked: GenerateParameters, limits: Limits) -> str | None:
    most = max(limits.max_stop_sequences, asked.most_stop_sequences)
    if len(asked.stop) <= most:
        return None
    return f"`stop` supports up to {most} stop sequences. Given: {len(asked.stop)}"


def _seed_with_best_of(asked: GenerateParameters, limits: Limits) -> str | None:
    if asked.seed is not None and (asked.best_of or 1) > 1:
        return "`seed` must not be set when `best_of` > 1"
    return None


def _top_n_tokens(asked: GenerateParameters, limits: Limits) -> str | None:
    given, most = asked.top_n_tokens or 0, max(limits.max_top_n_tokens, asked.most_top_n_tokens)
    if given <= most:
        return None
    return f"`top_n_tokens` must be >= 0 and <= {most}. Given: {given}"


def _inputs_not_empty(asked: GenerateParameters, limits: Limits) -> str | None:
    given = asked.inputs if asked.input_ids is None else asked.input_ids
    return None if given else "`inputs` cannot be empty"


def _input_ids_known(asked: GenerateParameters, limits: Limits) -> str | None:
    ids = asked.input_ids
    # Too many ids are refused for their number, by a later rule.
    if not ids or (len(ids) > limits.max_input_tokens and asked.truncate is None):
        return None
    if min(ids) >= 0 and max(ids) < limits.vocab_size:
        return None
    unknown = next(token_id for token_id in ids if not 0 <= token_id < limits.vocab_size)
    return (
        f"`inputs` must be token ids >= 0 and below {limits.vocab_size}, the size of the "
        f"vocabulary. Given: {unknown}"
    )


def _truncate(asked: GenerateParameters, limits: Limits) -> str | None:
    given = asked.truncate
    if given is None or 0 < given <= limits.max_input_tokens:
        return None
    return (
        f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. "
        f"Given: {given}"
    )


def _inputs_have_tokens(
    lengths: Lengths, asked: GenerateParameters, limits: Limits
) -> ValidationError | None:
    if lengths.inputs > 0:
        return None
    return ValidationError(
        "`inputs` must have at least one token; the tokenizer makes none of this text"
    )


def _context_length(
    lengths: Lengths, asked: GenerateParameters, limits: Limits
) -> ValidationError | None:
    # Nothing follows the prompt: the limit of prompts leaves room for one token.
    is_prompt_only = asked.pooling is not None or asked.score_token_ids
    new_tokens = 0 if is_prompt_only else lengths.max_new_tokens
    if (
        lengths.inputs <= limits.max_input_tokens
        and lengths.inputs + new_tokens <= limits.max_total_tokens
    ):
        return None
    return ContextLengthError(
        num_prompt_tokens=lengths.inputs,
        max_new_tokens=new_tokens,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        is_least=lengths.is_least,
    )


def _min_new_tokens(
    lengths: Lengths, asked: GenerateParameters, limits: Limits
) -> ValidationError | None:
    given = asked.min_new_tokens or 0
    if given <= lengths.max_new_tokens:
        return None
    return ValidationError(
        f"`min_new_tokens` must be <= `max_new_tokens`. Given: {given} and {lengths.max_new_tokens}"
    )


def _deterministic(asked: GenerateParameters, limits: Limits) -> str | None:
    if asked.deterministic and not limits.is_deterministic:
        return (
            "`deterministic` can not be kept by this server: its operators round differently in "
            "other batches; serve on a CPU with --dtype float32 or bfloat16, or leave it out"
        )
    return None


RULES: tuple[Rule, ...] = (
    _best_of_needs_sampling,
    _deterministic,
    _range("temperature", *_POSITIVE),
    _range("repetition_penalty", *_POSITIVE),
    _range("frequency_penalty", *_PENALTY),
    _range("presence_penalty", *_PENALTY),
    _range("top_p", *_PROBABILITY),
    _range("typical_p", *_PROBABILITY),
    _range("min_p", lambda value: 0.0 < value <= 1.0, "> 0.0 and <= 1.0"),
    _range("top_k", *_POSITIVE),
    _range("max_new_tokens", *_POSITIVE),
    _stop_sequences,
    _stop_token_ids,
    _seed_with_best_of,
    _top_n_tokens,
    _logit_bias_in_range,
    _inputs_not_empty,
    _input_ids_known,
    _truncate,
)

# Rules that need the number of prompt tokens.
LENGTH_RULES: tuple[LengthRule, ...] = (
    _inputs_have_tokens,
    _context_length,
    _min_new_tokens,
)


def check_stream(asked: GenerateParameters) -> None:
    """Refuses parameters that can not be streamed; the first check of streaming routes."""
    if asked.best_of is not None and asked.best_of != 1:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if asked.decoder_input_details:
        raise ValidationError(
            "`decoder_input_details` == true is not supported when streaming tokens"
        )


def check_best_of(best_of: int, limits: Limits) -> None:
    """Refuses a `best_of` that this server does not allow."""
    if limits.max_best_of == 1 and best_of != 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if not 0 < best_of <= limits.max_best_of:
        raise ValidationError(
            f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
        )


class Validation:
    """Turns parameters into a `Request`, or raises the error of the first rule that fails."""

    def __init__(
        self, limits: Limits, tokenizer: Tokenizer, metrics: Metrics, grammars: GrammarCompiler
    ) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._grammars = grammars

    async def validate(self, asked: GenerateParameters) -> Request:
        """The valid request: ids truncated from the left, defaults and a seed filled in."""
        if asked.truncate == TRUNCATE_TO_FIT:
            room = self.limits.max_total_tokens - (asked.max_new_tokens or 1)
            asked = replace(asked, truncate=max(1, min(self.limits.max_input_tokens, room)))
        for rule in RULES:
            if complaint := rule(asked, self.limits):
                raise ValidationError(complaint)
        if asked.input_ids is None:
            count, input_ids = await self._tokenized(asked)
        else:
            count = min(len(asked.input_ids), asked.truncate or len(asked.input_ids))
            input_ids = asked.input_ids
        lengths = self._checked_lengths(asked, count)
        input_ids = tuple(input_ids[-count:])
        grammar = await self._compiled(asked, lengths)
        if asked.adapter_id is not None:
            raise AdapterNotFoundError(asked.adapter_id)
        self._metrics.request_input_length.observe(lengths.inputs)
        self._metrics.request_max_new_tokens.observe(lengths.max_new_tokens)
        return Request(
            input_ids=input_ids,
            sampling=_sampling(asked),
            stopping=StoppingCriteria(
                max_new_tokens=lengths.max_new_tokens,
                min_new_tokens=asked.min_new_tokens or 0,
                stop_sequences=asked.stop,
                ignore_eos_token=asked.ignore_eos_token,
                keeps_stop_sequence=asked.keeps_stop_sequence,
                includes_stop=asked.includes_stop,
                stop_token_ids=asked.stop_token_ids,
                num_unstopped_tokens=asked.num_unstopped_tokens,
            ),
            prefill_logprobs=asked.decoder_input_details,
            top_n_tokens=asked.top_n_tokens or 0,
            grammar=grammar,
            visible_special_tokens=asked.visible_special_tokens,
            shows_special_tokens=asked.shows_special_tokens,
            cache_salt=asked.cache_salt or "",
            priority=asked.priority,
            pooling=asked.pooling,
            score_token_ids=asked.score_token_ids,
        )

    def forget_grammar(self, asked: GenerateParameters) -> None:
        """See `GrammarCompiler.forget`."""
        if asked.grammar is not None:
            self._grammars.forget(asked.grammar)

    async def _tokenized(self, asked: GenerateParameters) -> tuple[int, Sequence[int]]:
        """The number of prompt tokens after truncation, and their ids if they are not too many.

        A text that is too long by its bytes alone is refused before it is tokenized.
        """
        limit = self.limits.max_input_tokens
        if asked.truncate is None and len(asked.inputs) > LONG_TEXT:
            least = self._tokenizer.least_tokens(asked.inputs)
            if least > limit:
                self._checked_lengths(asked, least, is_least=True)
        tokens = await self._tokenizer.token_ids(
            asked.inputs, asked.add_special_tokens, asked.truncate or limit
        )
        if self._tokenizer.vocab_size > self.limits.vocab_size:
            self._check_known(tokens.ids)
        return len(tokens.ids) if asked.truncate else tokens.count, tokens.ids

    def _check_known(self, ids: Sequence[int]) -> None:
        """Refuses ids that only the tokenizer has."""
        if (largest := max(ids, default=0)) >= self.limits.vocab_size:
            raise ValidationError(
                f"`inputs` has the token {self._tokenizer.decode_each([largest])[0]!r}, which "
                f"this model does not have: its token ids are below {self.limits.vocab_size}. "
                f"Given: {largest}"
            )

    def _checked_lengths(
        self, asked: GenerateParameters, count: int, is_least: bool = False
    ) -> Lengths:
        """The lengths of a prompt of `count` tokens and of its answer, if they are valid."""
        room = self.limits.max_total_tokens - count
        asked_length = asked.max_new_tokens
        new_tokens = max(1, room) if asked_length is None else asked_length
        lengths = Lengths(count, new_tokens, is_least)
        for length_rule in LENGTH_RULES:
            if error := length_rule(lengths, asked, self.limits):
                raise error
        return lengths

    async def _compiled(self, asked: GenerateParameters, lengths: Lengths) -> str:
        """The grammar in the shards' form, compiled there; empty: none."""
        if asked.grammar is None:
            return ""
        grammar = await self._grammars.compile(asked.grammar)
        if grammar.min_tokens > lengths.max_new_tokens:
            raise ValidationError(
                f"`max_new_tokens` must be >= {grammar.min_tokens}, the tokens that the shortest "
                f"text of this grammar needs. Given: {lengths.max_new_tokens}"
            )
        return grammar.text


# Parameters with the same name in `Sampling`.
_NUMBERS = (
    *("temperature", "top_k", "top_p", "typical_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def _sampling(asked: GenerateParameters) -> Sampling:
    """The given values, the defaults of `Sampling`, and a seed of 64 bits."""
    given = {name: value for name in _NUMBERS if (value := getattr(asked, name)) is not None}
    return Sampling(
        **given,
        do_sample=asked.do_sample,
        seed=random.getrandbits(64) if asked.seed is None else asked.seed,
        watermark=asked.watermark,
        logit_bias=asked.logit_bias,
    )
