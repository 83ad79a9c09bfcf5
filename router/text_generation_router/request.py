"""What the server has promised to compute: values only, frozen, no text work and no transport."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple


class FinishReason(Enum):
    """Why a generation ended; the value is the word TGI's API uses."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    # Only where a request names such tokens, which TGI's can not.
    STOP_TOKEN = "stop_token"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; defaults change nothing. Ranges are checked by `validation`."""

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
        """Whether tokens are drawn (then the seed is reported) or the best one is taken."""
        return (
            self.do_sample
            or self.temperature != 1.0
            or self.top_k != 0
            or self.top_p < 1.0
            or self.typical_p < 1.0
            or self.min_p > 0.0
        )


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """When a generation ends. Stop strings are matched on text, by the router."""

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    # TGI's routes keep a stop string at the end of the text, OpenAI's leave it out.
    keeps_stop_sequence: bool = True
    # vLLM's routes can keep what ended the text, be it a string or a token: all else is as where
    # stop strings are left out.
    includes_stop: bool = False
    # More tokens that end the text.
    stop_token_ids: tuple[int, ...] = ()
    # Stop strings are not looked for in the text of so many first tokens.
    num_unstopped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must look like; `source` is a JSON schema, a regex, or a grammar in Lark, as
    llguidance has it, or in GBNF."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    source: str


class Pooling(Enum):
    """Which hidden state stands for a prompt: that of its last token, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request. `input_ids` is never empty and already truncated."""

    input_ids: tuple[int, ...]
    sampling: Sampling
    stopping: StoppingCriteria
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    # A grammar in llguidance's own form, which the shards have compiled; empty: none.
    grammar: str = ""
    # Special tokens whose text counts as text, as the markers around tool calls do.
    visible_special_tokens: frozenset[str] = frozenset()
    # All do but those that end the text.
    shows_special_tokens: bool = False
    # Requests of different salts share no KV, whatever their tokens.
    cache_salt: str = ""
    # A hidden state that stands for the prompt is wanted.
    pooling: Pooling | None = None
    # The log-probabilities of these are wanted, each as the first token.
    score_token_ids: tuple[int, ...] = ()

    @property
    def is_prompt_only(self) -> bool:
        """Whether the prompt is asked about, and not what follows. The one token that is computed
        behind it is not told."""
        return self.pooling is not None or bool(self.score_token_ids)


class Token(NamedTuple):
    """One token with its text; `logprob` is None where none is defined (the first of a prompt).

    A tuple, because one is made for every token: a third of the time of a frozen dataclass.
    """

    id: int
    text: str
    logprob: float | None
    special: bool = False


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The ending of a successful generation."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None
    # The stop string that ended it.
    stop_sequence: str | None = None
    # The token that did, where a request names such tokens.
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Clock readings of one request, `time.perf_counter()` seconds."""

    queued: float
    started: float


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """What requests asked about their prompts: the tokens with their log-probabilities, or for
    those that are prompt only a hidden state and scores."""

    tokens: tuple[Token, ...]
    # By token the best ones in its place, none for the first; empty: they were not asked for.
    top_tokens: tuple[tuple[Token, ...], ...] = ()
    # By token its place among all, the likeliest at 1; none for the first.
    ranks: tuple[int | None, ...] = ()
    # Numbers in float32, little-endian, not normalised; empty: not asked for.
    pooled: bytes = b""
    # Log-probabilities of `Request.score_token_ids`.
    scores: tuple[float, ...] = ()


class TokenOutput(NamedTuple):
    """One generated token; on the last one of a generation `generated` and `timings` are set.

    `delta` is the text that may be shown now: no special tokens but the visible ones, and where
    stop strings are left out, nothing that could still become one. The deltas of a generation
    joined are `GeneratedText.text`.
    """

    token: Token
    delta: str = ""
    top_tokens: tuple[Token, ...] = ()
    generated: GeneratedText | None = None
    timings: Timings | None = None


Output = PrefillOutput | TokenOutput
