"""The bodies of /v1/completions and /v1/chat/completions."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import Field, ValidationInfo, field_validator

from text_generation_router.api.body import (
    IGNORED,
    Hint,
    ResponseFormatBody,
    ServiceTier,
    grammar_of,
    priority_of,
)
from text_generation_router.api.openai.sampling import VllmBody, VllmChatBody
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.messages import (
    MessageBody,
    ToolBody,
    ToolChoice,
    allowed_tools_of,
    to_messages,
    tool_choice_of,
)
from text_generation_router.fields import (
    MOST_TOP_LOGPROBS,
    NOT_SUPPORTED,
    Bounded,
    Items,
    Numbers,
    Refused,
    Uint32,
    optional,
    refuses,
)
from text_generation_router.validation import GenerateParameters

TokenId = Annotated[int, Field(ge=0, lt=2**32)]


Prompts = str | Items[str] | Numbers[TokenId] | Items[Numbers[TokenId]]


def prompts_of(given: Prompts) -> Sequence[str | list[int]]:
    """The prompts, texts or ids."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return cast("Sequence[str | list[int]]", given)


class CompletionRequest(VllmBody):
    """Body of /v1/completions."""

    prompt: Prompts = Field(
        description="A text, several, the ids of one, or the ids of several.",
        examples=["My name is Olivier and I"],
    )
    echo: bool | None = optional("Put the prompt before the text.")
    max_tokens: Uint32 | None = optional(
        "The most tokens to generate. null: as many as fit. 0 with `echo`: only the prompt.",
        default=16,
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = optional(
        "Return log-probabilities, and this many of the likeliest tokens at each step."
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = optional(
        "Generate this many texts and return the `n` likeliest."
    )
    suffix: Annotated[
        str | None,
        refuses(
            "",
            sentence="Suffix is not supported and can be achieved by preprocessing the prompt.",
        ),
        NOT_SUPPORTED,
    ] = None
    response_format: ResponseFormatBody | None = optional(
        "What the text has to look like, as in chats."
    )
    prompt_embeds: Refused = None

    @field_validator("prompt")
    @classmethod
    def _prompt_not_empty(cls, prompt: Any) -> Any:
        if prompt == []:
            raise ValueError("Empty array detected. Do not use an empty array for the prompt.")
        return prompt

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

    def parameters(self) -> GenerateParameters:
        """What is asked of the model, without a prompt."""
        return self.sampling(
            grammar=grammar_of(self.response_format),
            top_n_tokens=self.logprobs,
            # The one token that comes with the prompt's log-probabilities is thrown away.
            max_new_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            add_special_tokens=self.add_special_tokens is not False,
            decoder_input_details=bool(self.echo) and self.logprobs is not None,
        )

    @property
    def num_candidates(self) -> int:
        """How many texts are generated for one prompt; at least `num_sequences`."""
        return self.num_sequences if self.best_of is None else self.best_of


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
