"""The answers of OpenAI's routes, for the documentation."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from text_generation_router.fields import optional

STREAM = (
    "JSON, or with `stream` lines `data: {…}` up to `data: [DONE]`; what goes wrong after the "
    'first one is a line `data: {"error": {…}}`.'
)


class PromptTokensDetails(BaseModel):
    """Tokens of the prompt that an earlier request had computed already."""

    cached_tokens: int = Field(description="How many tokens.")
    audio_tokens: int = Field(description="Always 0.")


class CompletionTokensDetails(BaseModel):
    """Which of the generated tokens are no text of the answer."""

    reasoning_tokens: int = Field(
        description="Tokens up to the end of the reasoning, its markers included."
    )
    accepted_prediction_tokens: int = Field(description="Always 0.")
    rejected_prediction_tokens: int = Field(description="Always 0.")
    audio_tokens: int = Field(description="Always 0.")


class Usage(BaseModel):
    """Tokens of the prompt, counted once, and of all that was generated."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    completion_tokens: int = Field(description="Tokens that were generated.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails = Field(
        description="What is known of the prompt's tokens."
    )
    completion_tokens_details: CompletionTokensDetails = Field(
        description="What is known of the generated tokens."
    )


class _Answer(BaseModel):
    id: str = Field(description="A new id for each request.")
    object: str
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The served model.")
    system_fingerprint: str = Field(description="The version of the server.")


class CompletionLogprobs(BaseModel):
    """All lists have one entry a token; offsets count characters."""

    tokens: list[str] = Field(description="The text of each token.")
    token_logprobs: list[float | None] = Field(description="The log-probability of each token.")
    top_logprobs: list[dict[str, float] | None] | None = Field(
        description="For each token the likeliest ones of its step."
    )
    text_offset: list[int] = Field(description="Where each token begins in the text.")


class PromptLogprob(BaseModel):
    """Of a token of the prompt, or of one that could have stood there."""

    logprob: float = Field(description="Its log-probability.")
    rank: int | None = Field(description="Its place among all tokens, the likeliest at 1.")
    decoded_token: str = Field(description="Its text.")


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    Field(description="By token of the prompt, by token id. Left out unless asked for."),
]
PromptIds = Annotated[
    list[int] | None,
    Field(description="The prompt. Left out unless asked for; of a stream in the first chunk."),
]
Tier = Annotated[
    Literal["default", "priority", "flex"] | None,
    Field(description="The tier in which it is served. Left out unless one was asked for."),
]
TokenIds = Annotated[
    list[int] | None, Field(description="What was generated. Left out unless asked for.")
]
StopReason = Annotated[
    str | int | None,
    Field(
        description="The stop string or the id of the stop token that ended the text. Left out "
        "where none is given."
    ),
]


class CompletionChoice(BaseModel):
    """One text."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = Field(description="Only if asked for.")
    finish_reason: str | None = Field(
        description="Why the text ended.", examples=["stop", "length"]
    )
    stop_reason: StopReason = None
    prompt_token_ids: PromptIds = None
    token_ids: TokenIds = None
    prompt_logprobs: PromptLogprobs = None


class Completion(_Answer):
    """Answer of /v1/completions."""

    choices: list[CompletionChoice] = Field(description="The texts.")
    usage: Usage = Field(description="How many tokens they took.")


class CompletionChunk(_Answer):
    """Event of /v1/completions."""

    choices: list[CompletionChoice] = Field(description="The new part of a text.")
    usage: Usage | None = optional("Only if asked for: at the end, or so far.")


class TopLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str = Field(description="The text of the token.")
    logprob: float = Field(description="The log-probability of the token.")
    bytes: list[int] | None = Field(description="The text of the token as bytes of UTF-8.")


class TokenLogprob(TopLogprob):
    """A token of the text."""

    top_logprobs: list[TopLogprob] = Field(description="The likeliest tokens of the same step.")


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of the text of a message."""

    content: list[TokenLogprob] | None = Field(description="One entry for each token.")
    refusal: None = optional("Always null.")


class FunctionCall(BaseModel):
    """A function with its arguments as JSON text."""

    name: str
    arguments: str = Field(description="JSON text.")


class MessageToolCall(BaseModel):
    """A call the model made."""

    id: str
    type: str = Field(examples=["function"])
    function: FunctionCall = Field(description="The function that is called.")


class OutputMessage(BaseModel):
    """The message the model wrote."""

    role: str = Field(examples=["assistant"])
    content: str | None = Field(description="The text.")
    refusal: None = optional("Always null.")
    reasoning_content: str | None = optional(
        "What the model thought. Left out where it did not think."
    )
    reasoning: str | None = optional("The same as `reasoning_content`.")
    tool_calls: list[MessageToolCall] = optional(
        "The calls that the model asks for. Left out when empty.", default=[]
    )


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: OutputMessage
    logprobs: ChoiceLogprobs | None = Field(description="Only if asked for.")
    finish_reason: str = Field(
        description="Why the message ended.", examples=["stop", "length", "tool_calls"]
    )
    stop_reason: StopReason = None
    token_ids: TokenIds = None


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions."""

    service_tier: Tier = None
    choices: list[ChatChoice] = Field(description="The messages.")
    usage: Usage = Field(description="How many tokens they took.")
    prompt_token_ids: PromptIds = None
    prompt_logprobs: PromptLogprobs = None


class FunctionDelta(BaseModel):
    """The new part of a function call: its name, or more of its arguments."""

    name: str | None = optional("Only in the first event of a call.")
    arguments: str = Field(description="More of the JSON text.")


class ToolCallDelta(BaseModel):
    """The new part of a call. `id` and `type` come only in its first event."""

    index: int = Field(description="Which call of the message it is.")
    id: str | None = None
    type: str | None = None
    function: FunctionDelta = Field(description="The new part of the function call.")


class MessageDelta(BaseModel):
    """The new part of a message. Fields without anything new are left out."""

    role: str | None = None
    content: str | None = optional("More of the text.")
    reasoning_content: str | None = optional("More of what the model thinks.")
    reasoning: str | None = optional("The same as `reasoning_content`.")
    tool_calls: list[ToolCallDelta] = optional("The new parts of calls.", default=[])


class ChatChunkChoice(BaseModel):
    """The new part of one message. `finish_reason` comes in a last event of its own."""

    index: int
    delta: MessageDelta = Field(description="The new part of the message.")
    logprobs: ChoiceLogprobs | None = Field(description="Only if asked for.")
    finish_reason: str | None = Field(description="Why the message ended.")
    stop_reason: StopReason = None
    token_ids: TokenIds = None


class ChatCompletionChunk(_Answer):
    """Event of /v1/chat/completions."""

    service_tier: Tier = None
    choices: list[ChatChunkChoice] = Field(description="The new parts of messages.")
    usage: Usage | None = optional("Only if asked for: at the end, or so far.")
    prompt_token_ids: PromptIds = None
