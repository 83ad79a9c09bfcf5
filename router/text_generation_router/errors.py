"""Errors a client can see.

    RouterError
    ├── ValidationError            422 validation
    │   └── ContextLengthError     422 validation
    ├── AdapterNotFoundError       404 adapter_not_found
    ├── TemplateError              422 template_error
    ├── ToolError                  422 tool_error
    ├── OverloadedError            429 overloaded
    ├── GrammarsBusyError          429 overloaded
    ├── KeyLimitError              429 overloaded
    ├── GenerationError            424 generation
    ├── IncompleteGenerationError  500 incomplete_generation
    ├── UnhealthyError             503 healthcheck
    └── ShuttingDownError          503 shutting_down

Status codes and `error_type` words are TGI's (shared fact sheet http-api.md, "JSON error shape").
"""

from collections.abc import Mapping
from typing import ClassVar

# What nobody here can know: when shards that do not answer, or another server, will.
UNHEALTHY_RETRY_S = 5
SHUTDOWN_RETRY_S = 5


class RouterError(Exception):
    """A failure with a status, a type word and one sentence for the user."""

    status_code: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    # The `err` label of tgi_request_failure.
    metric_label: ClassVar[str] = "generation"
    # What the message begins with.
    prefix: ClassVar[str] = ""
    # The sentence for the log, where the message has text that a user wrote.
    logged: ClassVar[str] = ""
    retry_after_s: int | None = None
    """When the same request may be sent again; None where that does not help. Every 429 and 503 has
    it, and is found out before an answer begins."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that tell it, whatever form the body has."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, self.retry_after_s))}

    @property
    def message(self) -> str:
        """The sentence in the body's `error` field."""
        return f"{self.prefix}{self}"

    @property
    def log_message(self) -> str:
        """The sentence for the log, which has no text that a user wrote."""
        return self.logged or self.message


class ValidationError(RouterError):
    """The request asks for something that cannot be done; says what and what is allowed."""

    status_code = 422
    error_type = "validation"
    metric_label = "validation"
    prefix = "Input validation error: "


class ContextLengthError(ValidationError):
    """The prompt, or the prompt with its answer, is longer than the model can take."""


class GrammarError(ValidationError):
    """The grammar is wrong, too large, or not enabled."""

    logged = "Input validation error: the grammar can not be used"


class AdapterNotFoundError(RouterError):
    """The request names an adapter that is not served; the base model never answers instead."""

    status_code = 404
    error_type = "adapter_not_found"
    metric_label = "validation"
    logged = "`adapter_id` names an adapter that is not served"

    def __init__(self, adapter_id: str) -> None:
        super().__init__(
            f"`adapter_id` {adapter_id[:64]!r} is not served; this server has no adapters; "
            "remove `adapter_id`"
        )


class TemplateError(RouterError):
    """The chat template is missing or broken, or refuses these messages."""

    status_code = 422
    error_type = "template_error"
    metric_label = "validation"
    prefix = "Template error: "
    logged = "Template error: the chat template refuses the messages, or is broken"


class ToolError(RouterError):
    """The tools of a chat can not be used as they were given."""

    status_code = 422
    error_type = "tool_error"
    metric_label = "validation"
    prefix = "Tool error: "
    logged = "Tool error: the tools can not be used as they were given"


class OverloadedError(RouterError):
    """`max_concurrent_requests` requests are already in the house."""

    status_code = 429
    error_type = "overloaded"
    metric_label = "overloaded"

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("Model is overloaded")
        self.retry_after_s = retry_after_s


class KeyLimitError(RouterError):
    """An API key has used what each may; `reason` is the limit's name in the metrics."""

    status_code = 429
    error_type = "overloaded"
    metric_label = "overloaded"

    def __init__(self, sentence: str, reason: str, retry_after_s: int) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.retry_after_s = retry_after_s
        """When the same request would be let in, if the key is not used meanwhile."""


class GrammarsBusyError(RouterError):
    """The grammar is a large one, and enough of those are being compiled."""

    status_code = 429
    error_type = "overloaded"
    metric_label = "overloaded"

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(f"Model is overloaded: {reason}")
        self.retry_after_s = retry_after_s


class GenerationError(RouterError):
    """A shard failed while it computed this request.

    `str` of it has the detail: paths and exceptions, for whoever runs the server. Clients are not
    told.
    """

    status_code = 424
    error_type = "generation"
    metric_label = "generation"

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
    metric_label = "generation"
    retry_after_s = UNHEALTHY_RETRY_S

    def __init__(self) -> None:
        super().__init__("unhealthy")


class ShuttingDownError(RouterError):
    """The server was told to stop: what runs may end, but nothing begins any more."""

    status_code = 503
    error_type = "shutting_down"
    retry_after_s = SHUTDOWN_RETRY_S

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request to another")
