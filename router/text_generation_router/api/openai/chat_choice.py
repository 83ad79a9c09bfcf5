"""One choice of /v1/chat/completions, whole or as the chunks of a stream."""

import secrets
import string
from collections.abc import Iterable, Iterator, Sequence

from text_generation_router.api.logprobs import ScoredToken, TokenTrail, chat_logprobs, tokens_of
from text_generation_router.api.openai.schemas import ChatRequest
from text_generation_router.api.openai.stream import Chunk, Json, usage
from text_generation_router.chat.parser import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.service import ChatGeneration, ChatStep, message_of
from text_generation_router.infer import Ending
from text_generation_router.request import FinishReason
from text_generation_router.tokenizer import Tokenizer

# Templates of Mistral's models refuse ids of another length or with other characters.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def new_call_id() -> str:
    """An id for a tool call that every chat template takes."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


def choice(
    index: int, steps: Sequence[ChatStep], ending: Ending, body: ChatRequest, tokenizer: Tokenizer
) -> Json:
    """The choice of a generation that has ended."""
    message = message_of(list(steps))
    answer: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning is not None and body.include_reasoning is not False:
        answer |= _reasoning(message.reasoning)
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": new_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    logprobs: Json | None = None
    if body.logprobs:
        trail = TokenTrail(body.shows_special_tokens)
        scored = [one for step in steps for _, tokens in _scored(step, trail) for one in tokens]
        logprobs = _logprobs(scored, body, tokenizer)
    made: Json = {
        "index": index,
        "message": answer,
        "logprobs": logprobs,
        "finish_reason": _finish_reason(ending, bool(message.tool_calls)),
    }
    if body.tells_stop_reason:
        made["stop_reason"] = ending.generated.stop_reason
    if body.return_token_ids:
        made["token_ids"] = [output.token.id for output in message.outputs]
    return made


def _logprobs(scored: Sequence[ScoredToken], body: ChatRequest, tokenizer: Tokenizer) -> Json:
    as_ids = bool(body.return_tokens_as_token_ids)
    return chat_logprobs(scored, body.top_logprobs or 0, tokenizer, as_ids)


class ChoiceStream:
    """The chunks of one choice: the role, then an event each, then the reason to finish."""

    def __init__(
        self, index: int, body: ChatRequest, generation: ChatGeneration, tokenizer: Tokenizer
    ) -> None:
        self._index = index
        self._body = body
        self._generation = generation
        self._tokenizer = tokenizer
        self._trail = TokenTrail(body.shows_special_tokens)
        self._has_role = False
        self._num_tokens = 0
        # Ids of the tokens since the last chunk.
        self._new_ids: list[int] = []

    def chunks(self, steps: Sequence[ChatStep]) -> list[Chunk]:
        """What is new with the steps; nothing if all of it is reasoning that was not asked for."""
        chunks: list[Chunk] = []
        body = self._body
        if not self._has_role:
            self._has_role = True
            # With tools there may never be any content.
            content = None if body.tools else ""
            chunks.append(self._first({"role": "assistant", "content": content}))
        for step in steps:
            self._num_tokens += len(step.outputs)
            if body.return_token_ids:
                self._new_ids += [output.token.id for output in step.outputs]
            for event, scored in self._events(step):
                if body.include_reasoning is not False or not isinstance(event, ReasoningDelta):
                    chunks.append(self._chunk(self._choice(_delta(event), scored)))
        if (ending := self._generation.ending) is not None:
            reason = _finish_reason(ending, self._generation.has_tool_calls)
            last = self._choice({}, finish_reason=reason)
            if body.tells_stop_reason:
                last["stop_reason"] = ending.generated.stop_reason
            chunks.append(self._chunk(last))
        return chunks

    def _events(self, step: ChatStep) -> Iterable[tuple[ChatEvent, Sequence[ScoredToken]]]:
        if self._body.logprobs:
            return _scored(step, self._trail)
        return ((event, ()) for event in step.events)

    def _first(self, delta: Json) -> Chunk:
        """The chunk in front of all tokens."""
        more: Json = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._generation.prompt_ids
        return Chunk(self._choice(delta), more | self._usage())

    def _chunk(self, choice: Json) -> Chunk:
        """A chunk with the ids of all tokens since the previous chunk."""
        if self._body.return_token_ids:
            choice["token_ids"], self._new_ids = self._new_ids, []
        return Chunk(choice, self._usage())

    def _usage(self) -> Json:
        """That of this choice so far, if each chunk has it."""
        if not self._body.tells_usage:
            return {}
        made = self._generation
        return {"usage": usage(made.prompt_tokens, made.cached_tokens, self._num_tokens)}

    def _choice(
        self, delta: Json, scored: Sequence[ScoredToken] = (), finish_reason: str | None = None
    ) -> Json:
        logprobs: Json | None = None
        if self._body.logprobs and "content" in delta:
            logprobs = _logprobs(scored, self._body, self._tokenizer)
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def _scored(step: ChatStep, trail: TokenTrail) -> Iterator[tuple[ChatEvent, list[ScoredToken]]]:
    """The events of a step, those with content with the tokens that spell it."""
    for output in step.outputs:
        trail.add(output.token, output.top_tokens)
    for event in step.events:
        yield event, tokens_of(event, trail)


def _delta(event: ChatEvent) -> Json:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": new_call_id(), "type": "function", "function": function}
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def _reasoning(text: str) -> Json:
    """In both spellings that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _finish_reason(ending: Ending, has_tool_calls: bool) -> str:
    if ending.generated.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"
