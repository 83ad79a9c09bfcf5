"""How to generate, in OpenAI's bodies: their fields, and those that vLLM adds to them, which its
clients and load generators send.

Each of vLLM's is honoured as vLLM does, or refused in a sentence; the `warning` header names
fields without effect. Those that are honoured come first. Described of them is only what is this
server's own.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from text_generation_router.api.body import (
    ANY_OBJECT,
    DETERMINISTIC,
    IGNORED,
    STREAM,
    Hint,
    JsonSchema,
    grammar_of,
    schema_grammar,
)
from text_generation_router.fields import (
    NOT_SUPPORTED,
    Body,
    CacheSalt,
    Items,
    LogitBias,
    Numbers,
    NumSequences,
    Refused,
    Seed,
    Stop,
    Uint32,
    optional,
    parameters_of,
    refuses,
    with_numbers,
)
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters

# What vLLM takes by default; OpenAI's own limit for the tokens of an answer is the same.
MOST_PROMPT_LOGPROBS = 20
_MAX_REQUEST_ID = 128
# Field of `structured_outputs` → form, as in the names of the others.
_FORMS = {"json_": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def _not_blank(choices: list[str]) -> list[str]:
    if not choices:
        raise ValueError("give at least one text to choose from")
    if "" in choices:
        raise ValueError("a text to choose must not be empty")
    return choices


Choices = Annotated[Items[str], AfterValidator(_not_blank)]


def _grammar_of(name: str, given: Any) -> Grammar | None:
    """What a field asks for: one of `_GUIDED`, one of `_FORMS`, or `response_format`."""
    if given is None:
        return None
    match name.removeprefix("guided_"):
        case "json":
            return schema_grammar(given)
        case "regex":
            return Grammar("regex", given)
        case "choice":
            # One terminal, so that a choice may begin with another one.
            quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in given)
            return Grammar("lark", f"start: CHOICE\nCHOICE: {quoted}")
        case "grammar":
            return Grammar("gbnf" if "::=" in given else "lark", given)
        case "structured_outputs":
            forms = (_grammar_of(form, getattr(given, field)) for field, form in _FORMS.items())
            any_object = schema_grammar(ANY_OBJECT) if given.json_object else None
            return next(filter(None, forms), any_object)
        case _:
            return grammar_of(given)


def _not_to_nothing(given: int) -> int:
    if given == 0:
        raise ValueError("must be -1 or at least 1")
    return given


TruncateTokens = Annotated[int, Field(ge=-1, lt=2**32), AfterValidator(_not_to_nothing)]
"""The tokens to which a longer prompt is cut; -1: as many as can be."""


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Prompts = str | Items[str] | Numbers[TokenId] | Items[Numbers[TokenId]]


def prompts_of(given: Prompts) -> Sequence[str | list[int]]:
    """The prompts, texts or ids."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return cast("Sequence[str | list[int]]", given)


class StructuredOutputsBody(Body):
    """What the answer has to look like: exactly one of the first five."""

    json_: JsonSchema | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[
        Any, refuses(sentence="not supported; use `grammar`, or `tools` for calls"), NOT_SUPPORTED
    ] = None
    disable_any_whitespace: Annotated[Any, refuses(False), NOT_SUPPORTED] = None
    disable_additional_properties: Annotated[
        Any,
        refuses(False, sentence='not supported; put `"additionalProperties": false` in the schema'),
        NOT_SUPPORTED,
    ] = None
    whitespace_pattern: Refused = None
    disable_fallback: Annotated[Any, Hint(False, True), IGNORED] = None

    @field_validator("regex", "choice", "grammar", "json_object")
    @classmethod
    def _one_at_a_time(cls, given: Any, info: ValidationInfo) -> Any:
        if given is not None and given is not False:
            for field, form in _FORMS.items():
                if info.data.get(field) is not None:
                    raise ValueError(f"must not be given together with `{form}`")
        return given


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = optional("Send `usage` in a last event of its own.")
    continuous_usage_stats: bool | None = optional("Send the usage so far in each chunk.")


@with_numbers
class SamplingBody(Body):
    """How to generate. Fields that OpenAI does not have come last, from `repetition_penalty` on."""

    model: str | None = optional("The served model, or `tgi`.", examples=["tgi"])
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = optional(
        "Token id, and what is added to its logit: -100 to 100."
    )
    n: NumSequences | None = optional("How many answers to one prompt. Default: 1.")
    seed: Seed | None = optional("Answer i is drawn with seed + i. Default: random.")
    stop: Stop | None = optional("The text ends before any of these.", examples=[["\n"]])
    stream: bool | None = optional(STREAM)
    stream_options: StreamOptions | None = optional("Only for a stream.")
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    typical_p: float | None = None
    deterministic: bool | None = optional(DETERMINISTIC)
    cache_salt: CacheSalt | None = None

    @property
    def num_sequences(self) -> int:
        """`n` or its default."""
        return 1 if self.n is None else self.n

    @property
    def tells_usage(self) -> bool:
        """Whether each chunk of a stream has its usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class VllmBody(SamplingBody):
    """Those and vLLM's fields of both bodies."""

    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[Uint32] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = optional(
        "Put the tokenizer's special tokens before the prompt. Default: true for `prompt`; false "
        "for `messages`, whose template writes them.",
    )
    truncate_prompt_tokens: TruncateTokens | None = optional(
        "Keep only this many of the prompt's last tokens; -1: all that fit."
    )
    truncation_side: Annotated[
        Any,
        refuses("left", sentence="only `left` is supported: the last tokens are kept"),
        Field(description="Only `left`."),
    ] = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_PROMPT_LOGPROBS)] | None = optional(
        "Return log-probabilities of the prompt, and at each position this number of best tokens. "
        "Not streamed.",
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=_MAX_REQUEST_ID)] | None = optional(
        "Part of the `id` of the answer. Default: random."
    )
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = optional("The text follows this grammar, in Lark or GBNF.")
    structured_outputs: StructuredOutputsBody | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = optional(
        "Requests of a lower number have their turn first, as at vLLM; the header X-Priority, "
        "which counts the other way, goes before it. Default: 0.",
    )
    guided_decoding_backend: Annotated[Any, Hint("auto", "guidance"), IGNORED] = None
    spaces_between_special_tokens: Annotated[Any, Hint(True), IGNORED] = None
    session_id: Annotated[Any, Hint(), IGNORED] = None
    return_token_offsets: Annotated[Any, Hint(False), IGNORED] = None
    return_mm_kwargs: Annotated[Any, Hint(True), IGNORED] = None
    guided_whitespace_pattern: Refused = None
    use_beam_search: Annotated[Any, refuses(False), NOT_SUPPORTED] = None
    early_stopping: Annotated[Any, refuses(False), NOT_SUPPORTED] = None
    length_penalty: Annotated[Any, refuses(1), NOT_SUPPORTED] = None
    allowed_token_ids: Annotated[
        Any, refuses(sentence="not supported; use `guided_choice` or `logit_bias`"), NOT_SUPPORTED
    ] = None
    bad_words: Annotated[Any, refuses([]), NOT_SUPPORTED] = None
    logprob_token_ids: Refused = None
    repetition_detection: Refused = None
    thinking_token_budget: Annotated[Any, refuses(-1), NOT_SUPPORTED] = None
    watermarking: Annotated[Any, refuses(False), NOT_SUPPORTED] = None
    logits_processors: Annotated[Any, refuses([]), NOT_SUPPORTED] = None
    routed_experts_prompt_start: Annotated[Any, refuses(0), NOT_SUPPORTED] = None
    stream_interval: Annotated[Any, refuses(1), NOT_SUPPORTED] = None
    kv_transfer_params: Refused = None
    ec_transfer_params: Refused = None
    vllm_xargs: Annotated[Any, refuses({}), NOT_SUPPORTED] = None

    @field_validator("prompt_logprobs")
    @classmethod
    def _not_streamed(cls, prompt_logprobs: int | None, info: ValidationInfo) -> int | None:
        if prompt_logprobs is not None and info.data.get("stream"):
            raise ValueError("it can not be streamed; leave out `stream`")
        return prompt_logprobs

    @field_validator(*_GUIDED[1:], "response_format", check_fields=False)
    @classmethod
    def _one_form(cls, given: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if asked := _grammar_of(info.field_name, given):
            for name in _GUIDED:
                other = _grammar_of(name, info.data.get(name))
                if other is not None and other != asked:
                    raise ValueError(f"must not be given together with `{name}`, which differs")
        return given

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the text has special tokens, too."""
        return self.skip_special_tokens is False

    def sampling(
        self,
        *,
        grammar: Grammar | None,
        top_n_tokens: int | None,
        decoder_input_details: bool = False,
        priority: int = 0,
        **more: Any,
    ) -> GenerateParameters:
        """What is asked of the model, without a prompt. The arguments: what the fields of one route
        say. All grammars that are given agree."""
        best = top_n_tokens, self.prompt_logprobs
        guides = (_grammar_of(name, getattr(self, name)) for name in _GUIDED)
        return parameters_of(
            self,
            cache_salt=self.cache_salt,
            shows_special_tokens=self.shows_special_tokens,
            truncate=self.truncate_prompt_tokens,
            decoder_input_details=decoder_input_details or self.prompt_logprobs is not None,
            top_n_tokens=max((number for number in best if number is not None), default=None),
            grammar=next(filter(None, guides), grammar),
            priority=priority if self.priority is None else -self.priority,
            **more,
        )


class VllmChatBody(VllmBody):
    """Those and what vLLM adds to chats."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Items[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    media_io_kwargs: Annotated[Any, Hint({}), IGNORED] = None
    mm_processor_kwargs: Annotated[Any, Hint({}), IGNORED] = None
    echo: Annotated[
        Any, refuses(False, sentence="not supported; it is in `messages`"), NOT_SUPPORTED
    ] = None
    chat_template: Annotated[
        Any,
        refuses(
            sentence="templates of requests are not run; start the server with "
            "--tokenizer-config-path, or send a rendered prompt to /v1/completions"
        ),
        NOT_SUPPORTED,
    ] = None
    return_prompt_text: Annotated[
        Any, refuses(False, sentence="not supported; ask /chat_tokenize"), NOT_SUPPORTED
    ] = None
    best_of: Annotated[Any, refuses(1), NOT_SUPPORTED] = None

    @field_validator("continue_final_message")
    @classmethod
    def _not_both(cls, given: bool | None, info: ValidationInfo) -> bool | None:
        if given and info.data.get("add_generation_prompt"):
            raise ValueError("must not be true together with `add_generation_prompt`")
        return given
