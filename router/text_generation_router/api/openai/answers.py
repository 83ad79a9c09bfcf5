"""The answers of OpenAI's routes, for the documentation."""

from typing import Any

from pydantic import BaseModel, Field


def stream_of(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The documentation of a route that answers with JSON or with a stream of chunks."""
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    return {
        200: {
            "description": "JSON, or with `stream` lines `data: {…}` up to `data: [DONE]`; what "
            'goes wrong after the first one is a line `data: {"error": {…}}`.',
            "content": {"text/event-stream": {"schema": schema}},
        }
    }


class PromptTokensDetails(BaseModel):
    """Tokens of the prompt that an earlier request had computed already."""

    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(BaseModel):
    """Which of the generated tokens are no text of the answer. Nothing is predicted here."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    audio_tokens: int


class Usage(BaseModel):
    """Tokens of the prompt, counted once, and of all that was generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class _Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(BaseModel):
    """All lists have one entry a token; offsets count characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None = Field(examples=["stop", "length"])


class Completion(_Answer):
    """Answer of /v1/completions."""

    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Answer):
    """Event of /v1/completions."""

    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, description="Only if asked for, at the end.")


class TopLogprob(BaseModel):
    """A token that could have been taken."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the text."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of the text of a message."""

    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCall(BaseModel):
    """A function with its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A call the model made."""

    id: str
    type: str = Field(examples=["function"])
    function: FunctionCall


class OutputMessage(BaseModel):
    """The message the model wrote."""

    role: str = Field(examples=["assistant"])
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(default=None, description="Left out where there is none.")
    tool_calls: list[MessageToolCall] = Field(default=[], description="Left out when empty.")


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: OutputMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str = Field(examples=["stop", "length", "tool_calls"])


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(BaseModel):
    """What is new of a function: its name, or more of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What is new of a call; `id` and `type` come once."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class MessageDelta(BaseModel):
    """What is new of a message; what is not is left out."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(BaseModel):
    """What is new of one message; the reason to finish comes last, by itself."""

    index: int
    delta: MessageDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(_Answer):
    """Event of /v1/chat/completions."""

    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(default=None, description="Only if asked for, at the end.")
