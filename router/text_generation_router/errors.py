"""Errors a client can see. Status codes and `error_type` words are TGI's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

# The time until silent shards, or another server, answer is not known: often enough for a person.
RETRY_S = 5


class RouterError(Exception):
    """A failure with a status, a type word and one sentence for the user."""

    status_code: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    # The `err` label of tgi_request_failure.
    metric_label: ClassVar[str] = "generation"
    # Start of the message.
    prefix: ClassVar[str] = ""
    # The sentence for the log, where the message quotes user text.
    logged: ClassVar[str] = ""
    retry_after_s: int | None = None
    """When the same request may be sent again; None where that does not help. Every 429 and 503 has
    it, and is raised before an answer begins."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The `retry-after` header, in all dialects."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, self.retry_after_s))}

    @property
    def message(self) -> str:
        """The sentence in the body's `error` field."""
        return f"{self.prefix}{self}"

    @property
    def log_message(self) -> str:
        """The sentence for the log, without user text."""
        return self.logged or self.message


class BadRequestError(RouterError):
    """The request is wrong, and would be at any other time."""

    status_code = 422
    error_type = "validation"
    metric_label = "validation"


class ValidationError(BadRequestError):
    """A parameter is out of range; the sentence says which, and what is allowed."""

    prefix = "Input validation error: "


@dataclass(eq=False, kw_only=True)
class ContextLengthError(ValidationError):
    """The prompt, or the prompt with its answer, exceeds the context length.

    The numbers, for the API that was asked: each has a sentence of its own, which clients read.
    `str` is TGI's.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    """0 if nothing follows the prompt."""
    max_input_tokens: int
    max_total_tokens: int
    is_least: bool = False
    """The prompt was not tokenized, and has this many tokens or more."""

    def __str__(self) -> str:
        given = f"at least {self.num_prompt_tokens}" if self.is_least else self.num_prompt_tokens
        if not self.is_total_exceeded:
            return f"`inputs` must have less than {self.max_input_tokens} tokens. Given: {given}"
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {self.max_total_tokens}. "
            f"Given: {given} `inputs` tokens and {self.max_new_tokens} `max_new_tokens`"
        )

    @property
    def is_total_exceeded(self) -> bool:
        """Whether the answer does not fit behind the prompt; else the prompt alone is too long."""
        total = self.num_prompt_tokens + self.max_new_tokens
        return self.max_new_tokens > 0 and total > self.max_total_tokens


class GrammarError(ValidationError):
    """The grammar is wrong, too large, or not enabled."""

    logged = "Input validation error: the grammar can not be used"


class AdapterNotFoundError(BadRequestError):
    """The request names an adapter that is not served. The base model does not answer instead."""

    status_code = 404
    error_type = "adapter_not_found"
    logged = "`adapter_id` names an adapter that is not served"

    def __init__(self, adapter_id: str) -> None:
        super().__init__(
            f"`adapter_id` {adapter_id[:64]!r} is not served; this server has no adapters; "
            "remove `adapter_id`"
        )


class TemplateError(BadRequestError):
    """The chat template is missing or broken, or refuses these messages."""

    error_type = "template_error"
    prefix = "Template error: "
    logged = "Template error: the chat template refuses the messages, or is broken"


class RefusedByTemplateError(TemplateError):
    """The chat template says what is wrong with these messages."""


class NoTemplateError(TemplateError):
    """The model has no chat template."""

    logged = "Template error: the model has no chat template"

    def __init__(self) -> None:
        super().__init__(
            "template not found; the model has no chat template, so it can not chat; "
            "start the server with --tokenizer-config-path and a file that has one"
        )


class ToolError(BadRequestError):
    """The tools of a chat are invalid."""

    error_type = "tool_error"
    prefix = "Tool error: "
    logged = "Tool error: the tools can not be used as they were given"


class OverloadedError(RouterError):
    """There is no place for the request now: `max_concurrent_requests` are running, or another
    bound is reached, which the sentence names."""

    status_code = 429
    error_type = "overloaded"
    metric_label = "overloaded"

    def __init__(self, retry_after_s: int, sentence: str = "Model is overloaded") -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class KeyLimitError(OverloadedError):
    """An API key has reached a limit; `reason` is the limit's name in the metrics. `retry_after_s`:
    when the same request will be admitted, if the key sends no other."""

    def __init__(self, sentence: str, reason: str, retry_after_s: int) -> None:
        super().__init__(retry_after_s, sentence)
        self.reason = reason


class QueueWaitError(OverloadedError):
    """The request has reached --max-queue-wait."""

    status_code = 503
    metric_label = "queue_wait"

    def __init__(self, seconds: float, retry_after_s: int) -> None:
        super().__init__(
            retry_after_s,
            f"Model is overloaded: the request has waited {seconds:g} s for its turn "
            f"(--max-queue-wait); try again in {retry_after_s} s",
        )


class DeadlineError(RouterError):
    """The answer has not ended within the time that the request or the server gave it."""

    status_code = 504
    error_type = "timeout"
    metric_label = "timeout"

    def __init__(self, seconds: float, source: str) -> None:
        super().__init__(
            f"The answer has not ended within {seconds:g} s ({source}); give it more time, ask for "
            "fewer tokens, or try again later"
        )


class GenerationError(RouterError):
    """A shard failed while it computed this request.

    `str` of it has the detail for the log: paths and exceptions. Clients do not see it.
    """

    status_code = 424
    error_type = "generation"

    def __init__(self, sentence: str, detail: str = "") -> None:
        super().__init__(sentence, detail)

    def __str__(self) -> str:
        return ": ".join(filter(None, self.args))

    @property
    def message(self) -> str:
        sentence, detail = self.args
        behind = "; the server's log says why" if detail else ""
        return f"Request failed during generation: {sentence}{behind}"

    @property
    def log_message(self) -> str:
        return f"Request failed during generation: {self}"


class GrammarFailedError(GenerationError):
    """The request's grammar can not be followed any further."""


class IncompleteGenerationError(RouterError):
    """The server stopped before the generation ended."""

    status_code = 500
    error_type = "incomplete_generation"
    metric_label = "incomplete"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class UnhealthyError(RouterError):
    """The shards do not answer."""

    status_code = 503
    error_type = "healthcheck"
    retry_after_s = RETRY_S

    def __init__(self) -> None:
        super().__init__("unhealthy")


class ShuttingDownError(RouterError):
    """The server is stopping: running requests may end, new ones are refused."""

    status_code = 503
    error_type = "shutting_down"
    retry_after_s = RETRY_S

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request to another")


class StartingError(RouterError):
    """The server has not started yet."""

    status_code = 503
    error_type = "starting"
    retry_after_s = RETRY_S

    def __init__(self, phase: str) -> None:
        super().__init__(f"The server is starting ({phase}); send the request again later")
