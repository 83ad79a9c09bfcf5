"""The body of /v1/chat/completions, with OpenAI's fields and TGI's."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from text_generation_router.api.grammars import ResponseFormatBody
from text_generation_router.api.hints import IGNORED, Hint
from text_generation_router.api.openai.schemas import SamplingBody
from text_generation_router.api.openai.vllm import VllmChatBody
from text_generation_router.api.tiers import ServiceTier, priority_of
from text_generation_router.bounded import IN_SLICES, Items
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.messages import (
    MessageBody,
    ToolBody,
    ToolChoice,
    allowed_tools_of,
    to_messages,
    tool_choice_of,
)
from text_generation_router.fields import MOST_TOP_LOGPROBS, NOT_SUPPORTED, Refused, Uint32, refuses

# Arguments of `ChatTemplate.render` that a request does not give as template variables.
_OWN_VARIABLES = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "name"}
)


class ChatRequest(VllmChatBody, SamplingBody):
    """Body of /v1/chat/completions. OpenAI does not have `tool_prompt`, which is TGI's, nor
    `chat_template_kwargs`."""

    messages: Annotated[Annotated[list[MessageBody], Field(min_length=1)], IN_SLICES] = Field(
        description="The conversation so far."
    )
    max_tokens: Uint32 | None = Field(
        default=None,
        description="The most tokens to generate. Default: as many as fit after the prompt.",
        examples=[32],
    )
    max_completion_tokens: Uint32 | None = Field(
        default=None, description="The same as `max_tokens`. If both are given, this one counts."
    )
    logprobs: bool | None = Field(
        default=None, description="Return the log-probabilities of the tokens."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Return this many of the likeliest tokens at each step. Needs `logprobs`.",
    )
    response_format: ResponseFormatBody | None = Field(
        default=None,
        description="The form that the answer must have, as OpenAI or as TGI writes it.",
    )
    tools: Items[ToolBody] | None = Field(
        default=None, description="The functions that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        default=None,
        description="`auto`, `none`, `required`, the function that must be called, or the only "
        "ones that may be.",
        examples=["auto"],
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether one answer may have several calls. Default: true."
    )
    tool_prompt: str | None = Field(
        default=None, description="Text that is put behind the last message if there are tools."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables for the chat template, for example `enable_thinking`."
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

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        given = self.chat_template_kwargs or {}
        return given if self.documents is None else given | {"documents": self.documents}

    def to_conversation(self) -> Conversation:
        """The same without pydantic."""
        limit = self.max_completion_tokens
        parameters = replace(
            self.sampling(),
            max_new_tokens=self.max_tokens if limit is None else limit,
            top_n_tokens=self.top_logprobs,
            grammar=None if self.response_format is None else self.response_format.to_grammar(),
            priority=priority_of(self.service_tier),
        )
        return Conversation(
            messages=to_messages(self.messages),
            parameters=self.extended(parameters),
            tools=tuple(tool.to_spec() for tool in self.tools or ()),
            tool_choice=tool_choice_of(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            tool_prompt=self.tool_prompt,
            template_kwargs=self._template_kwargs,
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            num_sequences=self.num_sequences,
            allowed_tools=allowed_tools_of(self.tool_choice),
        )
