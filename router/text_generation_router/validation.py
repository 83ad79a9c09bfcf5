"""Checks the parameters of a request against the limits of this server.

The order and the sentences are TGI's: clients see the first that applies.
Comparisons are written so that NaN fails them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from text_generation_process.sampling import DRAWING, NUMBERS, Sampling

from text_generation_router.errors import AdapterNotFoundError, ContextLengthError, ValidationError
from text_generation_router.grammar import GrammarCompiler
from text_generation_router.metrics import Metrics
from text_generation_router.request import TRUNCATE_TO_FIT, GenerateParameters, Request
from text_generation_router.text.tokenizer import LONG_TEXT, Tokenizer

__all__ = ["TRUNCATE_TO_FIT", "GenerateParameters", "Limits", "Validation"]


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


def _complaints(asked: GenerateParameters, limits: Limits) -> Iterator[str]:
    """What is wrong with the parameters, in the order in which TGI looks for it."""
    has_several = (asked.best_of or 1) > 1
    draws = asked.sampling.get("do_sample") or any(name in asked.sampling for name in DRAWING)
    if has_several and not draws:
        yield "you must use sampling when `best_of` is > 1"
    if asked.deterministic and not limits.is_deterministic:
        yield (
            "`deterministic` can not be kept by this server: its operators round differently in "
            "other batches; serve on a CPU with --dtype float32 or bfloat16, or leave it out"
        )
    for name, number in NUMBERS.items():
        if name in asked.sampling and not number.range.allows(asked.sampling[name]):
            yield f"`{name}` must be {number.range.words}"
    if asked.max_new_tokens is not None and asked.max_new_tokens <= 0:
        yield "`max_new_tokens` must be strictly positive"
    most_stops = max(limits.max_stop_sequences, asked.most_stop_sequences)
    if len(asked.stop) > most_stops:
        yield f"`stop` supports up to {most_stops} stop sequences. Given: {len(asked.stop)}"
    yield from _unknown_ids("stop_token_ids", asked.stop_token_ids, limits)
    if "seed" in asked.sampling and has_several:
        yield "`seed` must not be set when `best_of` > 1"
    most_top = max(limits.max_top_n_tokens, asked.most_top_n_tokens)
    if (asked.top_n_tokens or 0) > most_top:
        yield f"`top_n_tokens` must be >= 0 and <= {most_top}. Given: {asked.top_n_tokens}"
    yield from _wrong_biases(asked, limits)
    ids, most_ids = asked.input_ids, limits.max_input_tokens
    if not (asked.inputs if ids is None else ids):
        yield "`inputs` cannot be empty"
    # Too many ids are refused for their number, later.
    if ids and (len(ids) <= most_ids or asked.truncate is not None):
        yield from _unknown_ids("inputs", ids, limits)
    if asked.truncate is not None and not 0 < asked.truncate <= most_ids:
        yield (
            f"`truncate` must be strictly positive and less than {most_ids}. "
            f"Given: {asked.truncate}"
        )


def _unknown_ids(name: str, ids: Sequence[int], limits: Limits) -> Iterator[str]:
    """Says the first of the ids that the model does not have."""
    size = limits.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        unknown = next(token_id for token_id in ids if not 0 <= token_id < size)
        yield (
            f"`{name}` must be token ids >= 0 and below {size}, the size of the vocabulary. "
            f"Given: {unknown}"
        )


def _wrong_biases(asked: GenerateParameters, limits: Limits) -> Iterator[str]:
    for token_id, bias in asked.sampling.get("logit_bias", ()):
        if token_id >= limits.vocab_size:
            yield (
                f"`logit_bias` must name token ids below {limits.vocab_size}, the size of the "
                f"vocabulary. Given: {token_id}"
            )
        if not -100.0 <= bias <= 100.0:
            yield f"`logit_bias` must be >= -100.0 and <= 100.0. Given: {bias} for {token_id}"


def check_first(asked: GenerateParameters, limits: Limits, is_stream: bool) -> None:
    """Refuses a `best_of` that this server does not allow, and what can not be streamed. It comes
    before permits are taken. Raises ValidationError."""
    best_of = 1 if asked.best_of is None else asked.best_of
    if is_stream and best_of != 1:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if is_stream and asked.decoder_input_details:
        raise ValidationError(
            "`decoder_input_details` == true is not supported when streaming tokens"
        )
    if limits.max_best_of == 1 and best_of != 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if best_of != 1 and not 0 < best_of <= limits.max_best_of:
        raise ValidationError(
            f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}"
        )


class Validation:
    """Turns parameters into a `Request`, or raises the first error."""

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
        if (complaint := next(_complaints(asked, self.limits), None)) is not None:
            raise ValidationError(complaint)
        if asked.input_ids is None:
            count, input_ids = await self._tokenized(asked)
        else:
            count = min(len(asked.input_ids), asked.truncate or len(asked.input_ids))
            input_ids = asked.input_ids
        max_new_tokens = self._checked_length(asked, count)
        input_ids = tuple(input_ids[-count:])
        grammar = await self._compiled(asked, max_new_tokens)
        if asked.adapter_id is not None:
            raise AdapterNotFoundError(asked.adapter_id)
        self._metrics.request_input_length.observe(count)
        self._metrics.request_max_new_tokens.observe(max_new_tokens)
        return Request(
            asked=asked,
            input_ids=input_ids,
            sampling=Sampling(**{"seed": random.getrandbits(64)} | dict(asked.sampling)),
            max_new_tokens=max_new_tokens,
            prefill_logprobs=asked.decoder_input_details,
            grammar=grammar,
            cache_salt=asked.cache_salt or "",
            priority=asked.priority,
        )

    async def _tokenized(self, asked: GenerateParameters) -> tuple[int, Sequence[int]]:
        """The number of prompt tokens after truncation, and their ids if they are not too many.

        A text that is too long by its bytes alone is refused before it is tokenized.
        """
        limit = self.limits.max_input_tokens
        if asked.truncate is None and len(asked.inputs) > LONG_TEXT:
            least = self._tokenizer.least_tokens(asked.inputs)
            if least > limit:
                self._checked_length(asked, least, is_least=True)
        tokens = await self._tokenizer.token_ids(asked.inputs, asked.add_special_tokens)
        ids = tuple(tokens[-(asked.truncate or limit) :])
        if self._tokenizer.vocab_size > self.limits.vocab_size:
            self._check_known(ids)
        return len(ids) if asked.truncate else len(tokens), ids

    def _check_known(self, ids: Sequence[int]) -> None:
        """Refuses ids that only the tokenizer has."""
        if (largest := max(ids, default=0)) >= self.limits.vocab_size:
            raise ValidationError(
                f"`inputs` has the token {self._tokenizer.decode_each([largest])[0]!r}, which "
                f"this model does not have: its token ids are below {self.limits.vocab_size}. "
                f"Given: {largest}"
            )

    def _checked_length(self, asked: GenerateParameters, count: int, is_least: bool = False) -> int:
        """The most tokens of the answer to a prompt of `count` tokens, if both are valid.
        `is_least`: the prompt was not tokenized, and has at least `count` tokens."""
        limits, new_tokens = self.limits, asked.max_new_tokens
        if new_tokens is None:
            new_tokens = max(1, limits.max_total_tokens - count)
        if count == 0:
            raise ValidationError(
                "`inputs` must have at least one token; the tokenizer makes none of this text"
            )
        # Nothing follows the prompt: the limit of prompts leaves room for one token.
        answer = 0 if asked.is_prompt_only else new_tokens
        if count > limits.max_input_tokens or count + answer > limits.max_total_tokens:
            raise ContextLengthError(
                num_prompt_tokens=count,
                max_new_tokens=answer,
                max_input_tokens=limits.max_input_tokens,
                max_total_tokens=limits.max_total_tokens,
                is_least=is_least,
            )
        if (least := asked.min_new_tokens or 0) > new_tokens:
            raise ValidationError(
                f"`min_new_tokens` must be <= `max_new_tokens`. Given: {least} and {new_tokens}"
            )
        return new_tokens

    async def _compiled(self, asked: GenerateParameters, max_new_tokens: int) -> str:
        """The grammar in the shards' form, compiled there; empty: none."""
        if asked.grammar is None:
            return ""
        text, min_tokens = await self._grammars.compile(asked.grammar)
        if min_tokens > max_new_tokens:
            raise ValidationError(
                f"`max_new_tokens` must be >= {min_tokens}, the tokens that the shortest "
                f"text of this grammar needs. Given: {max_new_tokens}"
            )
        return text
