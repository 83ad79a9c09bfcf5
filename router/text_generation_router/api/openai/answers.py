"""Parts that the answers of /v1/completions and /v1/chat/completions share."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import Response
from pydantic import BaseModel, Field

from text_generation_router.api.answers import (
    DONE,
    event,
    json_response,
    open_stream,
    timing_headers,
)
from text_generation_router.api.body import warning
from text_generation_router.api.errors import RequestError, end_as_openai
from text_generation_router.api.logprobs import TokenTrail
from text_generation_router.api.openai.sampling import VllmBody
from text_generation_router.config import VERSION
from text_generation_router.fields import optional
from text_generation_router.request import Ending, FinishReason, GenerateResult, TokenOutput
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.validation import GenerateParameters

Item = TypeVar("Item")
Json = dict[str, Any]
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


class AnswerBody(BaseModel):
    id: str = Field(description="A new id for each request.")
    object: str
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The served model.")
    system_fingerprint: str = Field(description="The version of the server.")


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


def envelope(prefix: str, kind: str, services: Services, request_id: str | None = None) -> Json:
    """The first fields of every answer and chunk; `request_id`: the client's."""
    return {
        "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": services.config.model_names[0],
        "system_fingerprint": f"{VERSION}-native",
    }


def usage(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0
) -> Json:
    """The `usage` object. There are no predicted and no audio tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_tokens": 0,
        },
    }


class ChoiceWriter(ABC):
    """Writes one choice. Owns the ids of its tokens since the last chunk, and their number."""

    def __init__(
        self,
        index: int,
        body: VllmBody,
        made: Entry | GenerateResult,
        tokenizer: Tokenizer,
    ) -> None:
        self.index = index
        self.body = body
        self.made = made
        self.parts: Any = made
        """What becomes ready of the choice, in turn."""
        self.tokenizer = tokenizer
        self.trail = TokenTrail(body.shows_special_tokens)
        self.as_ids = bool(body.return_tokens_as_token_ids)
        # As they are needed for each token.
        self._tells_ids, self._tells_usage = bool(body.return_token_ids), body.tells_usage
        self._num_tokens = 0
        self._new_ids: list[int] = []

    @abstractmethod
    def chunks(self, part: Any) -> list[Json]:
        """What is new with one of `parts`; nothing where all of it is held back."""

    def count(self, outputs: Sequence[TokenOutput]) -> None:
        """More tokens, of which the next chunk tells."""
        self._num_tokens += len(outputs)
        if self._tells_ids:
            self._new_ids += [output.token.id for output in outputs]

    def chunk(self, choice: Json) -> Json:
        """A chunk, with the ids of all tokens since the previous one."""
        if self._tells_ids:
            choice["token_ids"], self._new_ids = self._new_ids, []
        return self.told({"choices": [choice]})

    def ended(self, otherwise: str = "stop") -> Json:
        """Why the choice, which has ended, did, in OpenAI's words; `otherwise` than by its
        length."""
        assert self.made.ending is not None
        generated = self.made.ending.generated
        is_full = generated.finish_reason is FinishReason.LENGTH
        end: Json = {"finish_reason": "length" if is_full else otherwise}
        # Only where there is something that could have ended it.
        if self.body.stop_token_ids or self.body.stop:
            end["stop_reason"] = generated.stop_reason
        return end

    def told(self, chunk: Json) -> Json:
        """The chunk, with the usage of this choice so far if each chunk has it."""
        if self._tells_usage:
            made = self.made
            chunk["usage"] = usage(made.prompt_tokens, made.cached_tokens, self._num_tokens)
        return chunk


async def stream_response(
    path: str,
    head: Json,
    body: VllmBody,
    started: AbstractAsyncContextManager[Sequence[ChoiceWriter]],
    total: Callable[[Sequence[Any]], Json],
    characters: int,
    services: Services,
) -> Response:
    """The chunks of all choices, which run at the same time, each behind the fields of `head`. In
    the block of `started` they run; `total` is the usage once they have ended."""

    tells_total = body.stream_options is not None and bool(body.stream_options.include_usage)
    if tells_total and not body.tells_usage:
        head = head | {"usage": None}

    async def stream() -> AsyncGenerator[bytes]:
        """Chunks that are ready together are one piece; the fields of `head` are encoded once."""
        before = b"data: " + orjson.dumps(head)[:-1] + b","
        async with started as writers, aclosing(merged([one.parts for one in writers])) as parts:
            async for index, part in parts:
                if chunks := writers[index].chunks(part):
                    yield b"".join([before + orjson.dumps(one)[1:] + b"\n\n" for one in chunks])
        last = event(head | {"choices": [], "usage": total(writers)}) if tells_total else b""
        yield last + DONE

    headers = {
        "x-compute-type": services.compute_type,
        "x-compute-characters": str(characters),
        **warning(body),
    }
    return await open_stream(stream(), headers, partial(end_as_openai, path))


def whole_response(
    answer: Json, body: VllmBody, endings: Sequence[Ending], characters: int, services: Services
) -> Response:
    """The answer of generations that have ended so."""
    prompt_tokens = answer["usage"]["prompt_tokens"]
    times = timing_headers(endings, prompt_tokens, characters, services)
    return json_response(answer, warning(body) | times)


def generated_tokens(endings: Iterable[Ending | None]) -> int:
    """Tokens of all generations, which have ended."""
    return sum(ending.generated.generated_tokens for ending in endings if ending is not None)


def check_num_sequences(num: int, field: str, services: Services) -> None:
    """Raises RequestError for more sequences than can ever run at the same time."""
    config = services.config
    limit, name = config.max_concurrent_requests, "--max-concurrent-requests"
    of_a_key = config.max_concurrent_requests_per_key
    if of_a_key is not None and of_a_key < limit:
        limit, name = of_a_key, "--max-concurrent-requests-per-key"
    if num > limit:
        raise RequestError(
            f"`{field}` asks for {num} sequences in one request; this server takes at most {limit} "
            f"({name})",
            field,
        )


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """The items of all streams in order of arrival, each with the index of its stream. Raises the
    first failure."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# Bounds the memory and the time of one answer.
MOST_PROMPT_ENTRIES = 2**19
_FEW_ENTRIES = 4096


class PromptEntries:
    """Counts the log-probabilities of prompts that one answer has, each choice with its own."""

    def __init__(self, asked: GenerateParameters, num_choices: int, field: str) -> None:
        """`num_choices`: of each prompt; `field`: the one that requests them."""
        tokens_each = 1 + (asked.top_n_tokens or 0)
        self._per_token = num_choices * tokens_each if asked.decoder_input_details else 0
        self._field = field
        self._num = 0

    async def answered(self, make: Callable[[], Item]) -> Item:
        """The answer; a thread makes one with many entries, so that streams do not wait."""
        return make() if self._num <= _FEW_ENTRIES else await asyncio.to_thread(make)

    def add(self, prompt_tokens: int) -> None:
        """One more prompt. Raises RequestError where the answer would have too many."""
        self._num += prompt_tokens * self._per_token
        if self._num > MOST_PROMPT_ENTRIES:
            raise RequestError(
                f"`{self._field}` asks for at least {self._num} log-probabilities of prompts; one "
                f"answer can have {MOST_PROMPT_ENTRIES}: send fewer prompts, or ask for fewer of "
                "the best tokens or of the answers",
                self._field,
            )
