"""What OpenAI's request bodies have in common, and the body of /v1/completions.

`null` is the same as leaving a field out, everywhere. Fields that are not named here are not read;
those that OpenAI's API has and this server can not serve are named, and refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from text_generation_router.api.bounded import Items, Numbers
from text_generation_router.api.schemas import Body, CacheSalt, LogitBias, Uint32, to_float32
from text_generation_router.validation import GenerateParameters

# The limits come first, because the documentation shows them only there.
Penalty = Annotated[float, Field(ge=-2, le=2), AfterValidator(to_float32)]
Fraction = Annotated[float, Field(ge=0, le=1), AfterValidator(to_float32)]
Positive = Annotated[float, Field(gt=0), AfterValidator(to_float32)]
MOST_TOP_LOGPROBS = 20
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


def refuses(*harmless: Any) -> AfterValidator:
    """For a field that is not supported: null and `harmless`, which ask for nothing, may come."""

    def check(value: Any) -> None:
        if value is not None and value not in harmless:
            raise ValueError("not supported; leave it out")

    return AfterValidator(check)


NOT_SUPPORTED = Field(description="Not supported.")
Refused = Annotated[Any, refuses(), NOT_SUPPORTED]


def _not_to_nothing(given: int) -> int:
    if given == 0:
        raise ValueError("must be -1 or at least 1")
    return given


TruncateTokens = Annotated[int, Field(ge=-1), AfterValidator(_not_to_nothing)]
"""The tokens to which a longer prompt is cut; -1: as many as can be."""


def _none_empty(stops: str | list[str]) -> str | list[str]:
    if "" in ([stops] if isinstance(stops, str) else stops):
        raise ValueError("a stop string must not be empty")
    return stops


Stop = Annotated[str | Items[str], AfterValidator(_none_empty)]


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = Field(
        default=None, description="Send the usage in a last chunk of its own."
    )


class SamplingBody(Body):
    """How to generate. Fields that OpenAI does not have come last, from `repetition_penalty` on."""

    model: str | None = Field(
        default=None, description="The served model, or `tgi`.", examples=["tgi"]
    )
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = Field(
        default=None, description="Token id to what is added to its logit, -100 to 100."
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Answers to one prompt. Default: 1."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        default=None, description="Answer i is drawn with seed + i. Default: random."
    )
    stop: Stop | None = Field(
        default=None, description="Ends the text before any of these.", examples=[["\n"]]
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0), AfterValidator(to_float32)] | None = Field(
        default=None, description="0: always the likeliest token. Default: 1."
    )
    top_p: Fraction | None = None
    repetition_penalty: Positive | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="0 or -1: all tokens."
    )
    typical_p: Annotated[float, Field(gt=0, le=1), AfterValidator(to_float32)] | None = None
    deterministic: bool | None = Field(
        default=None, description="The same tokens in whatever company, bit for bit."
    )
    cache_salt: CacheSalt | None = None

    @property
    def num_sequences(self) -> int:
        """`n` or its default."""
        return 1 if self.n is None else self.n

    @property
    def is_stream(self) -> bool:
        """`stream` or its default."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> GenerateParameters:
        """The parameters that all of OpenAI's routes have, without a prompt."""
        is_greedy = self.temperature == 0 or self.top_p == 0
        drawing: dict[str, Any] = {}
        if not is_greedy:
            drawing = {
                "do_sample": True,
                "temperature": self.temperature,
                # These values take all tokens, and so does leaving them out.
                "top_p": None if self.top_p == 1 else self.top_p,
                "typical_p": None if self.typical_p == 1 else self.typical_p,
                "top_k": None if self.top_k in (0, -1) else self.top_k,
            }
        return GenerateParameters(
            inputs="",
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(key), bias) for key, bias in (self.logit_bias or {}).items()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=None if self.seed is None else self.seed % 2**64,
            keeps_stop_sequence=False,
            most_top_n_tokens=MOST_TOP_LOGPROBS,
            deterministic=bool(self.deterministic),
            cache_salt=self.cache_salt,
            **drawing,
        )


class CompletionRequest(SamplingBody):
    """Body of /v1/completions."""

    prompt: str | Items[str] | Numbers[TokenId] | Items[Numbers[TokenId]] = Field(
        description="A text, several, the ids of one, or the ids of several.",
        examples=["My name is Olivier and I"],
    )
    echo: bool | None = Field(default=None, description="Put the prompt before the text.")
    max_tokens: Uint32 | None = Field(
        default=16, description="null: as many as fit. 0 with `echo`: the prompt only."
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        default=None, description="Return log-probabilities, and so many best tokens at each step."
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Generate so many and return the `n` likeliest."
    )
    suffix: str | None = Field(default=None, description="Not supported.")

    @field_validator("prompt")
    @classmethod
    def _prompt_not_empty(cls, prompt: Any) -> Any:
        if prompt == []:
            raise ValueError("Empty array detected. Do not use an empty array for the prompt.")
        return prompt

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str | None) -> str | None:
        if suffix:
            raise ValueError(
                "Suffix is not supported and can be achieved by preprocessing the prompt."
            )
        return suffix

    @field_validator("best_of")
    @classmethod
    def _best_of_at_least_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if best_of is not None and best_of < n:
            raise ValueError(f"must be >= `n`, which is {n}")
        if best_of is not None and best_of > n and info.data.get("stream"):
            raise ValueError("must be the same as `n` when `stream` is true")
        return best_of

    @field_validator("logprobs")
    @classmethod
    def _prompt_logprobs_not_streamed(
        cls, logprobs: int | None, info: ValidationInfo
    ) -> int | None:
        if logprobs is not None and info.data.get("echo") and info.data.get("stream"):
            raise ValueError("it can not be streamed together with `echo`")
        return logprobs

    @field_validator("max_tokens")
    @classmethod
    def _none_with_echo_only(cls, max_tokens: int | None, info: ValidationInfo) -> int | None:
        if max_tokens == 0 and not info.data.get("echo"):
            raise ValueError("must be at least 1; it may be 0 where `echo` is true")
        return max_tokens

    @property
    def num_candidates(self) -> int:
        """How many texts are generated for one prompt; at least `num_sequences`."""
        return self.num_sequences if self.best_of is None else self.best_of

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, texts or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(Sequence[str | list[int]], self.prompt)
