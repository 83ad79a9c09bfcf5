"""What comes back for a prompt."""

from dataclasses import dataclass
from typing import Any

from text_generation_router.chat.service import ToolCall
from text_generation_router.errors import RouterError
from text_generation_router.request import Token


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    """Each with its id, text and log-probability."""
    top_tokens: tuple[tuple[Token, ...], ...]
    """The best tokens at each position, if `logprobs` asked for them."""
    finish_reason: str
    """`stop` for an end token, a stop string or the end of a grammar, else `length`."""
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended it."""
    reasoning: str | None = None
    """Only in chats: what the model wrote before its answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only in chats: the functions that the model calls."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of `tokens`."""
        return tuple(token.id for token in self.tokens)

    @property
    def cumulative_logprob(self) -> float:
        """The sum over `tokens`."""
        return sum(token.logprob or 0.0 for token in self.tokens)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything about one prompt: its answers, or the error it ended with."""

    prompt: Any
    """As it was given: a text, token ids or messages."""
    num_prompt_tokens: int = 0
    prompt_tokens: tuple[Token, ...] = ()
    """The prompt's tokens with their log-probabilities, if `prompt_logprobs` asked for them."""
    completions: tuple[CompletionOutput, ...] = ()
    """Empty where there is an error."""
    error: RouterError | None = None

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The `n` answers. Raises `error` if there is one, so that a failure can not be missed."""
        if self.error is not None:
            raise self.error
        return self.completions
