"""A request, its parameters and its outputs: frozen values only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from text_generation_process.sampling import SAMPLING, Sampling
from text_generation_process.sampling import FinishReason as FinishReason
from text_generation_process.sampling import Pooling as Pooling


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text; `source` is a JSON schema, a regex, or a grammar in llguidance's
    Lark or in GBNF."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    source: str


TRUNCATE_TO_FIT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParameters:
    """The parameters of a request, of which only the types are checked; None: not given."""

    inputs: str
    # The prompt as ids, in place of `inputs`; ids are below `Limits.vocab_size`.
    input_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    best_of: int | None = None
    # The given fields of `Sampling`.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos_token: bool = False
    return_full_text: bool | None = None
    stop: tuple[str, ...] = ()
    # Number of tokens kept at the end of the prompt; TRUNCATE_TO_FIT: as many as fit.
    truncate: int | None = None
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None
    # TGI's routes keep a stop string at the end of the text, OpenAI's leave it out.
    keeps_stop_sequence: bool = True
    # vLLM's option to keep the stop string or stop token that ended the text. Everything else is as
    # where stop strings are left out.
    includes_stop: bool = False
    # More tokens that end the text.
    stop_token_ids: tuple[int, ...] = ()
    # Stop strings do not count in the text of this many first tokens.
    num_unstopped_tokens: int = 0
    # What the API that was asked allows, where that is more than this server's `Limits` for TGI's.
    most_stop_sequences: int = 0
    most_top_n_tokens: int = 0
    # Special tokens whose text is visible, like the markers around tool calls.
    visible_special_tokens: frozenset[str] = frozenset()
    # All special tokens are visible, except the ones that end the text.
    shows_special_tokens: bool = False
    deterministic: bool = False
    cache_salt: str | None = None
    # Higher ones come first.
    priority: int = 0
    # Requested hidden state of the prompt.
    pooling: Pooling | None = None
    # Requested log-probabilities: of each of these as the first token.
    score_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From values by name; those of `Sampling` that are None are not given. `logit_bias`: by
        token id, which may be a text."""
        own = {name: values.pop(name) for name in SAMPLING if name in values}
        given = {name: value for name, value in own.items() if value is not None}
        if (biases := given.get("logit_bias")) is not None:
            given["logit_bias"] = tuple((int(key), bias) for key, bias in biases.items())
        return cls(sampling=given, **values)

    @property
    def is_prompt_only(self) -> bool:
        """Whether only the prompt is evaluated. The one token behind it is not reported."""
        return self.pooling is not None or bool(self.score_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """One valid request: its parameters, and what validation has made of them. `input_ids` is not
    empty, and already truncated."""

    asked: GenerateParameters
    input_ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    prefill_logprobs: bool = False
    # A grammar in llguidance's form, compiled on the shards; empty: none.
    grammar: str = ""
    # Requests with different cache salts share no KV.
    cache_salt: str = ""
    # Higher ones come first.
    priority: int = 0


def sequences_of(request: Request, num: int, salt: str, priority: int | None) -> list[Request]:
    """`num` requests for one prompt that differ only in their seeds, with the caller's cache salt,
    and its priority if there is one.

    All callers' salts have the same length. Therefore the request's own salt, which follows it, can
    not turn it into that of another caller.
    """
    cache_salt = salt + request.cache_salt
    return [
        replace(
            request,
            sampling=replace(request.sampling, seed=(request.sampling.seed + place) % 2**64),
            prefill_logprobs=request.prefill_logprobs and place == 0,
            cache_salt=cache_salt,
            priority=request.priority if priority is None else priority,
        )
        for place in range(num)
    ]


class Token(NamedTuple):
    """One token with its text; `logprob` is None where it is not defined (first prompt token).

    A tuple, because one is made for every token: it is faster than a frozen dataclass.
    """

    id: int
    text: str
    logprob: float | None
    special: bool = False


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The end of a successful generation."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None
    # The stop string that ended it.
    stop_sequence: str | None = None
    # The id of `stop_token_ids` that ended it.
    stop_token_id: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token that ended the text; None: neither did."""
        return self.stop_token_id if self.stop_sequence is None else self.stop_sequence


TIMES = ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token")
"""TGI's names for the parts of a request's time, in logs, headers and traces."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a successful generation ends with, and how long its parts took, in seconds."""

    generated: GeneratedText
    # By TIMES.
    times: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Results about the prompt: its tokens with log-probabilities, or for prompt-only requests a
    hidden state and scores."""

    tokens: tuple[Token, ...]
    # The best alternatives of each token, none for the first; empty: not requested.
    top_tokens: tuple[tuple[Token, ...], ...] = ()
    # The rank of each token among all, from 1; None for the first.
    ranks: tuple[int | None, ...] = ()
    # float32, little-endian, not normalised; empty: not requested.
    pooled: bytes = b""
    # Log-probabilities of `Request.score_token_ids`.
    scores: tuple[float, ...] = ()


class TokenOutput(NamedTuple):
    """One generated token; the last one of a generation has `generated`.

    `delta` is the text that can be shown now: without hidden special tokens and, where stop strings
    are left out, without text that may belong to one. The deltas, joined, are `GeneratedText.text`.
    """

    token: Token
    delta: str = ""
    top_tokens: tuple[Token, ...] = ()
    generated: GeneratedText | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole generation; `top_tokens` has one entry per token, or is empty."""

    prompt_ids: tuple[int, ...]
    cached_tokens: int
    prefill: PrefillOutput
    tokens: tuple[Token, ...]
    top_tokens: tuple[tuple[Token, ...], ...]
    ending: Ending

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean over the generated tokens; -inf where it is not defined: the worst of all."""
        total = sum(math.nan if t.logprob is None else t.logprob for t in self.tokens)
        mean = total / len(self.tokens)
        return -math.inf if math.isnan(mean) else mean


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of a prompt that is not continued. It holds no ids: each of many documents may
    have a long query in front."""

    prompt_tokens: int
    prefill: PrefillOutput
    ending: Ending
