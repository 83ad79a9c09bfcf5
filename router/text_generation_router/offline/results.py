"""The result of a prompt."""

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
    """The most likely tokens at each position, if `logprobs` is set."""
    finish_reason: str
    """`stop` for an end token, a stop string or the end of a grammar, else `length`."""
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended it."""
    reasoning: str | None = None
    """Only in chats: the reasoning before the answer."""
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
    """The answers to one prompt, or its error."""

    prompt: Any
    """As given: text, token ids or messages."""
    num_prompt_tokens: int = 0
    prompt_tokens: tuple[Token, ...] = ()
    """The prompt's tokens with their log-probabilities, if `prompt_logprobs` is set."""
    completions: tuple[CompletionOutput, ...] = ()
    """Empty if there is an error."""
    error: RouterError | None = None

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """The `n` answers. Raises `error` if it is set, so that a failure is not overlooked."""
        if self.error is not None:
            raise self.error
        return self.completions
