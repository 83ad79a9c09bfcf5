"""POST /v1/chat/completions, the next message of a conversation, and /chat_tokenize, its prompt."""

import secrets
import string
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import orjson
from fastapi import Response
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from text_generation_router.api.answers import TokenizedToken, render_tokens, token_answer
from text_generation_router.api.body import (
    IGNORED,
    Hint,
    ResponseFormatBody,
    ServiceTier,
    grammar_of,
    priority_of,
    tier_of,
)
from text_generation_router.api.errors import OPENAI_ERRORS, TGI_ERRORS
from text_generation_router.api.logprobs import (
    ScoredToken,
    chat_logprobs,
    prompt_logprobs,
    scored_events,
)
from text_generation_router.api.models import check_model
from text_generation_router.api.openai import answers
from text_generation_router.api.openai.sampling import VllmChatBody
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.chat.conversation import Conversation, tool_call
from text_generation_router.chat.messages import (
    MessageBody,
    ToolBody,
    ToolChoice,
    allowed_tools_of,
    to_messages,
    tool_choice_of,
)
from text_generation_router.chat.parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.service import ChatGeneration, ChatMessage, ChatStep
from text_generation_router.fields import (
    MOST_TOP_LOGPROBS,
    NOT_SUPPORTED,
    Bounded,
    Items,
    Refused,
    Uint32,
    optional,
    refuses,
)
from text_generation_router.infer import gather_or_cancel
from text_generation_router.services import Services
from text_generation_router.text.encoding import Encoding
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]
PATH = "/v1/chat/completions"
# Templates of Mistral's models refuse ids of another length or with other characters.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
# Arguments of `ChatTemplate.render` that a request does not give as template variables.
_OWN_VARIABLES = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "name"}
)


class ChatRequest(VllmChatBody):
    """Body of /v1/chat/completions. OpenAI does not have `tool_prompt`, which is TGI's, nor
    `chat_template_kwargs`."""

    messages: Annotated[Annotated[list[MessageBody], Field(min_length=1)], Bounded()] = Field(
        description="The conversation so far."
    )
    max_tokens: Uint32 | None = optional(
        "The most tokens to generate. Default: as many as fit after the prompt.", examples=[32]
    )
    max_completion_tokens: Uint32 | None = optional(
        "The same as `max_tokens`. If both are given, this one counts."
    )
    logprobs: bool | None = optional("Return the log-probabilities of the tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = optional(
        "Return this many of the likeliest tokens at each step. Needs `logprobs`."
    )
    response_format: ResponseFormatBody | None = optional(
        "The form that the answer must have, as OpenAI or as TGI writes it."
    )
    tools: Items[ToolBody] | None = optional("The functions that the model may call.")
    tool_choice: ToolChoice | None = optional(
        "`auto`, `none`, `required`, the function that must be called, or the only ones that may "
        "be.",
        examples=["auto"],
    )
    parallel_tool_calls: bool | None = optional(
        "Whether one answer may have several calls. Default: true."
    )
    tool_prompt: str | None = optional(
        "Text that is put behind the last message if there are tools."
    )
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Variables for the chat template, for example `enable_thinking`."
    )
    audio: Refused = None
    functions: Annotated[Any, refuses([]), NOT_SUPPORTED] = None
    function_call: Annotated[Any, refuses("none"), NOT_SUPPORTED] = None
    modalities: Annotated[Any, refuses(["text"]), NOT_SUPPORTED] = None
    prediction: Annotated[Any, Hint(), IGNORED] = None
    reasoning_effort: Annotated[Any, Hint(), IGNORED] = None
    service_tier: ServiceTier = None
    store: Annotated[Any, Hint(False), IGNORED] = None
    verbosity: Annotated[Any, Hint("medium"), IGNORED] = None
    web_search_options: Refused = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and not info.data.get("logprobs"):
            raise ValueError("needs `logprobs` to be true")
        return top_logprobs

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_ours_alone(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted(_OWN_VARIABLES & set(given or ())):
            raise ValueError(f"must not set `{taken[0]}`")
        return given

    def to_conversation(self) -> Conversation:
        """The same without pydantic."""
        limit = self.max_completion_tokens
        variables = self.chat_template_kwargs or {}
        if self.documents is not None:
            variables = variables | {"documents": self.documents}
        parameters = self.sampling(
            grammar=grammar_of(self.response_format),
            top_n_tokens=self.top_logprobs,
            max_new_tokens=self.max_tokens if limit is None else limit,
            priority=priority_of(self.service_tier),
        )
        return Conversation(
            messages=to_messages(self.messages),
            parameters=parameters,
            tools=tuple(tool.to_spec() for tool in self.tools or ()),
            tool_choice=tool_choice_of(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            tool_prompt=self.tool_prompt,
            template_kwargs=variables,
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            num_sequences=self.num_sequences,
            allowed_tools=allowed_tools_of(self.tool_choice),
        )


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
    logprobs: answers.ChoiceLogprobs | None = Field(description="Only if asked for.")
    finish_reason: str = Field(
        description="Why the message ended.", examples=["stop", "length", "tool_calls"]
    )
    stop_reason: answers.StopReason = None
    token_ids: answers.TokenIds = None


class ChatCompletion(answers.AnswerBody):
    """Answer of /v1/chat/completions."""

    service_tier: answers.Tier = None
    choices: list[ChatChoice] = Field(description="The messages.")
    usage: answers.Usage = Field(description="How many tokens they took.")
    prompt_token_ids: answers.PromptIds = None
    prompt_logprobs: answers.PromptLogprobs = None


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
    logprobs: answers.ChoiceLogprobs | None = Field(description="Only if asked for.")
    finish_reason: str | None = Field(description="Why the message ended.")
    stop_reason: answers.StopReason = None
    token_ids: answers.TokenIds = None


class ChatCompletionChunk(answers.AnswerBody):
    """Event of /v1/chat/completions."""

    service_tier: answers.Tier = None
    choices: list[ChatChunkChoice] = Field(description="The new parts of messages.")
    usage: answers.Usage | None = optional("Only if asked for: at the end, or so far.")
    prompt_token_ids: answers.PromptIds = None


def new_call_id() -> str:
    """An id for a tool call that every chat template takes."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


class ChoiceWriter(answers.ChoiceWriter):
    """The choice of a generation that has ended; or its chunks: the role, then an event each, then
    the reason to finish."""

    body: ChatRequest
    _has_role = False

    def __init__(
        self, index: int, body: ChatRequest, generation: ChatGeneration, tokenizer: Tokenizer
    ) -> None:
        super().__init__(index, body, generation.entry, tokenizer)
        self.parts = self.generation = generation

    def whole(self, message: ChatMessage) -> Json:
        """The choice, with its message."""
        body = self.body
        answer: Json = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning is not None and body.include_reasoning is not False:
            answer |= _reasoning(message.reasoning)
        if message.tool_calls:
            answer["tool_calls"] = [
                tool_call(new_call_id(), call.name, call.arguments) for call in message.tool_calls
            ]
        logprobs: Json | None = None
        if body.logprobs:
            told = (scored_events(step, self.trail, body.logprobs) for step in message.steps)
            logprobs = self._logprobs([one for step in told for _, some in step for one in some])
        made = {"index": self.index, "message": answer, "logprobs": logprobs, **self._end()}
        if body.return_token_ids:
            made["token_ids"] = [output.token.id for output in message.outputs]
        return made

    def chunks(self, steps: Sequence[ChatStep]) -> list[Json]:
        """What is new with the steps; nothing if all of it is reasoning that was not asked for."""
        chunks: list[Json] = []
        body = self.body
        if not self._has_role:
            self._has_role = True
            # With tools there may never be any content.
            content = None if body.tools else ""
            first: Json = {"choices": [self._choice({"role": "assistant", "content": content})]}
            if body.return_token_ids:
                first["prompt_token_ids"] = self.made.prompt_ids
            chunks.append(self.told(first))
        for step in steps:
            self.count(step.outputs)
            for event, scored in scored_events(step, self.trail, body.logprobs):
                if body.include_reasoning is not False or not isinstance(event, ReasoningDelta):
                    chunks.append(self.chunk(self._choice(_delta(event), scored)))
        if self.generation.entry.ending is not None:
            chunks.append(self.chunk(self._choice({}) | self._end()))
        return chunks

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json:
        return chat_logprobs(scored, self.body.top_logprobs or 0, self.tokenizer, self.as_ids)

    def _choice(self, delta: Json, scored: Sequence[ScoredToken] = ()) -> Json:
        has_logprobs = self.body.logprobs and "content" in delta
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": self._logprobs(scored) if has_logprobs else None,
            "finish_reason": None,
        }

    def _end(self) -> Json:
        return self.ended("tool_calls" if self.generation.has_tool_calls else "stop")


def _delta(event: ChatEvent) -> Json:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart(index, name):
            call = {"index": index, **tool_call(new_call_id(), name, "")}
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def _reasoning(text: str) -> Json:
    """In both spellings that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


# Characters of a prompt that /chat_tokenize writes in one go, in less than a millisecond.
_SLICE = 16 * 1024

router = post_router("OpenAI", OPENAI_ERRORS)
tokenize_router = post_router("Text Generation Inference", TGI_ERRORS)


@router.post(
    PATH,
    summary="Generate tokens",
    response_model=ChatCompletion | ChatCompletionChunk,
    responses=events(answers.STREAM, ChatCompletionChunk),
)
async def chat_completions(body: ChatRequest, services: ServicesDependency) -> Response:
    """Generate the next message of a conversation."""
    check_model(body.model, services)
    answers.check_num_sequences(body.num_sequences, "n", services)
    services.metrics.request_count.inc()
    conversation = body.to_conversation()
    characters = sum(len(message["content"]) for message in conversation.messages)
    started = _started(body, conversation, services)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = answers.envelope("chatcmpl", kind, services, body.request_id)
    if body.service_tier is not None:
        head["service_tier"] = tier_of(body.service_tier)
    if body.stream:
        return await answers.stream_response(
            PATH, head, body, started, _usage, characters, services
        )
    entries = answers.PromptEntries(conversation.parameters, 1, "prompt_logprobs")
    async with started as writers:
        entries.add(writers[0].made.prompt_tokens)
        messages = await gather_or_cancel(writer.generation.collect() for writer in writers)

    def whole() -> Response:
        told = [writer.whole(message) for writer, message in zip(writers, messages, strict=True)]
        answer = head | {"choices": told, "usage": _usage(writers)}
        first = writers[0].generation.entry
        if body.return_token_ids:
            answer["prompt_token_ids"] = first.prompt_ids
        if body.prompt_logprobs is not None and first.prefill is not None:
            answer["prompt_logprobs"] = prompt_logprobs(first.prefill, body.prompt_logprobs)
        endings = [writer.made.ending for writer in writers if writer.made.ending is not None]
        return answers.whole_response(answer, body, endings, characters, services)

    return await entries.answered(whole)


@asynccontextmanager
async def _started(
    body: ChatRequest, conversation: Conversation, services: Services
) -> AsyncIterator[list[ChoiceWriter]]:
    """The choices, which run in the block. Raises RouterError."""
    async with services.chat.start(conversation, services.options) as generations:
        yield [
            ChoiceWriter(index, body, generation, services.tokenizer)
            for index, generation in enumerate(generations)
        ]


def _usage(writers: Sequence[ChoiceWriter]) -> Json:
    """The usage of all generations, which have ended; they have one prompt."""
    return answers.usage(
        writers[0].made.prompt_tokens,
        writers[0].made.cached_tokens,
        answers.generated_tokens(writer.made.ending for writer in writers),
        sum(writer.generation.reasoning_tokens for writer in writers),
    )


class ChatTokenizeResponse(BaseModel):
    """The rendered template, and its tokens with their byte offsets into it."""

    tokenize_response: list[TokenizedToken] = Field(description="The tokens of the prompt.")
    templated_text: str = Field(description="The prompt, as the chat template makes it.")


@tokenize_router.post(
    "/chat_tokenize",
    summary="Template and tokenize ChatRequest",
    response_model=ChatTokenizeResponse,
)
async def get_chat_tokenize(body: ChatRequest, services: ServicesDependency) -> Response:
    """The text that /v1/chat/completions would send to the model. Nothing is added to it."""
    services.metrics.request_count.inc()
    with services.infer.admitted(1, services.options):
        text = await services.chat.render(body.to_conversation())
        special = bool(body.add_special_tokens)
        encoding = await services.tokenizer.encode(text, add_special_tokens=special)
    return token_answer(text, encoding, _pieces(text, encoding), services)


def _pieces(text: str, encoding: Encoding) -> Iterator[bytes]:
    yield b'{"tokenize_response":'
    yield from render_tokens(text, encoding)
    yield b',"templated_text":"'
    for start in range(0, len(text), _SLICE):
        yield orjson.dumps(text[start : start + _SLICE])[1:-1]
    yield b'"}'
