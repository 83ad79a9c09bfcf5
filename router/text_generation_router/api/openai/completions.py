"""POST /v1/completions: continuations of prompts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from text_generation_router.api.body import ResponseFormatBody, grammar_of
from text_generation_router.api.errors import OPENAI_ERRORS, RequestError
from text_generation_router.api.logprobs import ScoredToken, completion_logprobs, prompt_logprobs
from text_generation_router.api.models import check_model
from text_generation_router.api.openai import answers
from text_generation_router.api.openai.sampling import Prompts, VllmBody, prompts_of
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.fields import NOT_SUPPORTED, Refused, Uint32, optional, refuses
from text_generation_router.infer import gather_or_cancel
from text_generation_router.request import FinishReason, GenerateResult, TokenOutput
from text_generation_router.scheduler.entry import Entry
from text_generation_router.services import Services
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.validation import GenerateParameters

Json = dict[str, Any]
PATH = "/v1/completions"
# More ids are decoded in a thread.
_FEW_IDS = 8192

router = post_router("OpenAI", OPENAI_ERRORS)


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


class CompletionLogprobs(BaseModel):
    """All lists have one entry a token; offsets count characters."""

    tokens: list[str] = Field(description="The text of each token.")
    token_logprobs: list[float | None] = Field(description="The log-probability of each token.")
    top_logprobs: list[dict[str, float] | None] | None = Field(
        description="For each token the likeliest ones of its step."
    )
    text_offset: list[int] = Field(description="Where each token begins in the text.")


class CompletionChoice(BaseModel):
    """One text."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = Field(description="Only if asked for.")
    finish_reason: str | None = Field(
        description="Why the text ended.", examples=["stop", "length"]
    )
    stop_reason: answers.StopReason = None
    prompt_token_ids: answers.PromptIds = None
    token_ids: answers.TokenIds = None
    prompt_logprobs: answers.PromptLogprobs = None


class Completion(answers.AnswerBody):
    """Answer of /v1/completions."""

    choices: list[CompletionChoice] = Field(description="The texts.")
    usage: answers.Usage = Field(description="How many tokens they took.")


class CompletionChunk(answers.AnswerBody):
    """Event of /v1/completions."""

    choices: list[CompletionChoice] = Field(description="The new part of a text.")
    usage: answers.Usage | None = optional("Only if asked for: at the end, or so far.")


@router.post(
    PATH,
    summary="Generate tokens",
    response_model=Completion | CompletionChunk,
    responses=events(answers.STREAM, CompletionChunk),
)
async def completions(body: CompletionRequest, services: ServicesDependency) -> Response:
    """Generate tokens after one or several prompts."""
    check_model(body.model, services)
    prompts = await _prompts(body, services)
    services.metrics.request_count.inc()
    characters = sum(len(prompt.inputs) for prompt in prompts)
    head = answers.envelope("cmpl", "text_completion", services, body.request_id)
    if body.stream:
        return await answers.stream_response(
            PATH,
            head,
            body,
            _started(body, prompts, services),
            lambda writers: _usage(body, [writer.made for writer in writers]),
            characters,
            services,
        )
    field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    entries = answers.PromptEntries(prompts[0], body.num_sequences, field)
    work = (
        services.infer.generate_many(prompt, body.num_candidates, services.options, entries.add)
        for prompt in prompts
    )
    results = await gather_or_cancel(work)

    def whole() -> Response:
        choices: list[Json] = []
        for prompt, candidates in zip(prompts, results, strict=True):
            chosen = candidates
            if body.num_candidates > body.num_sequences:
                likeliest = sorted(candidates, key=lambda one: one.mean_logprob, reverse=True)
                chosen = likeliest[: body.num_sequences]
            for result in chosen:
                writer = _ChoiceWriter(len(choices), body, prompt, result, services.tokenizer)
                choices.append(writer.whole(result))
        made = list(chain(*results))
        answer = head | {"choices": choices, "usage": _usage(body, made)}
        endings = [result.ending for result in made]
        return answers.whole_response(answer, body, endings, characters, services)

    return await entries.answered(whole)


def _usage(body: CompletionRequest, made: Sequence[Entry | GenerateResult]) -> Json:
    """The usage of all generations, which have ended; each prompt is counted once."""
    firsts = made[:: body.num_candidates]
    return answers.usage(
        sum(first.prompt_tokens for first in firsts),
        sum(first.cached_tokens for first in firsts),
        0 if body.max_tokens == 0 else answers.generated_tokens(one.ending for one in made),
    )


async def _prompts(body: CompletionRequest, services: Services) -> list[GenerateParameters]:
    """The parameters of each prompt; `inputs` is its text, even where it is given as ids. Raises
    RequestError for more than the server allows."""
    several = "best_of" if body.best_of else "n" if body.n else "prompt"
    given = prompts_of(body.prompt)
    answers.check_num_sequences(len(given) * body.num_candidates, several, services)
    asked = body.parameters()
    prompts: list[GenerateParameters] = []
    for prompt in given:
        if prompt == "":
            ids = await first_ids(services.tokenizer)
            prompts.append(replace(asked, input_ids=ids))
        elif isinstance(prompt, str):
            prompts.append(replace(asked, inputs=prompt))
        else:
            # What is too long, and not to be cut, is refused later.
            is_read = len(prompt) <= services.limits.max_input_tokens or asked.truncate is not None
            shown = prompt if is_read else ()
            if len(shown) <= _FEW_IDS:
                text = _text(shown, services.tokenizer)
            else:
                text = await asyncio.to_thread(_text, shown, services.tokenizer)
            prompts.append(replace(asked, inputs=text, input_ids=prompt))
    return prompts


async def first_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """The tokens that replace an empty prompt: those that the tokenizer puts before every text, or
    the token that starts or ends a sequence. Raises RequestError for a model without any."""
    if tokens := await tokenizer.token_ids(""):
        return tuple(tokens)
    named = [name for name in (tokenizer.bos_token, tokenizer.eos_token) if name is not None]
    known = tokenizer.special_ids(named)
    for name in named:
        if name in known:
            return [known[name]]
    raise RequestError(
        "`prompt` cannot be empty: this model has no token that starts or ends a sequence, from "
        "which to start",
        "prompt",
    )


def _text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Ids that the model does not have are refused later."""
    known = (i for i in ids if i < tokenizer.vocab_size)
    return b"".join(map(tokenizer.token_bytes, known)).decode(errors="replace")


def _prompt_tokens(
    prompt: GenerateParameters, result: GenerateResult, tokenizer: Tokenizer
) -> list[ScoredToken]:
    """The tokens of the prompt, without the special ones that the tokenizer put before its text."""
    found = result.prefill
    tokens = list(zip(found.tokens, found.top_tokens or ((),) * len(found.tokens), strict=True))
    if prompt.input_ids is None or not prompt.inputs:
        while tokens and tokens[0][0].special and not prompt.inputs.startswith(tokens[0][0].text):
            del tokens[0]
    decoder = tokenizer.stream_decoder()
    return [ScoredToken(decoder.step(token.id), token, tops) for token, tops in tokens]


class _ChoiceWriter(answers.ChoiceWriter):
    """One choice, whole or in chunks."""

    body: CompletionRequest

    def __init__(
        self,
        index: int,
        body: CompletionRequest,
        prompt: GenerateParameters,
        made: Entry | GenerateResult,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(index, body, made, tokenizer)
        self._prompt = prompt
        self._prompt_ids = made.prompt_ids if body.return_token_ids else None
        self._echoed = prompt.inputs if body.echo else ""
        self._offset = len(self._echoed)

    def whole(self, result: GenerateResult) -> Json:
        """The choice of a generation that has ended."""
        generated, body = result.ending.generated, self.body
        text = "" if body.max_tokens == 0 else generated.text
        logprobs: Json | None = None
        if body.logprobs is not None:
            prompt = _prompt_tokens(self._prompt, result, self.tokenizer) if body.echo else []
            self._offset -= sum(len(scored.text) for scored in prompt)
            logprobs = self._logprobs(prompt, self._answer_tokens(result, text))
        choice = self._choice(text, logprobs, is_last=True)
        if body.return_token_ids:
            shown = () if body.max_tokens == 0 else result.tokens
            choice["token_ids"] = [token.id for token in shown]
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(result.prefill, body.prompt_logprobs)
        return choice

    def chunks(self, outputs: Sequence[TokenOutput]) -> list[Json]:
        """What is new with the outputs: no chunk where all of it is held back."""
        chunks: list[Json] = []
        for output in outputs:
            if self.body.logprobs is not None:
                self.trail.add(output.token, output.top_tokens)
            text = ""
            if self.body.max_tokens != 0:
                text = output.delta
                self.count((output,))
            if self._echoed or text:
                logprobs: Json | None = None
                if self.body.logprobs is not None and text:
                    scored = self.trail.take(text)
                    logprobs = self._logprobs([], scored)
                    self._offset += sum(len(one.text) for one in scored)
                chunks.append(self.chunk(self._choice(text, logprobs)))
            if output.generated is not None:
                chunks.append(self.chunk(self._choice("", None, is_last=True)))
        return chunks

    def _choice(self, text: str, logprobs: Json | None, is_last: bool = False) -> Json:
        """The next text. The first has the ids of the prompt."""
        echoed, self._echoed = self._echoed, ""
        choice: Json = {
            "text": echoed + text,
            "index": self.index,
            "logprobs": logprobs,
            **(self.ended() if is_last else {"finish_reason": None}),
        }
        if self._prompt_ids is not None:
            choice["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        return choice

    def _logprobs(self, prompt: Sequence[ScoredToken], answer: Sequence[ScoredToken]) -> Json:
        num_top = self.body.logprobs or 0
        return completion_logprobs(
            prompt, answer, num_top, self.tokenizer, self._offset, self.as_ids
        )

    def _answer_tokens(self, result: GenerateResult, text: str) -> list[ScoredToken]:
        """The tokens that spell the text. After an echoed prompt all tokens are listed, including
        those without a text: evaluations find the last token of the prompt by counting from the
        end."""
        found = zip(result.tokens, result.top_tokens or ((),) * len(result.tokens), strict=True)
        is_cut = result.ending.generated.finish_reason is FinishReason.STOP_SEQUENCE
        if self.body.echo and self.body.max_tokens != 0 and not is_cut:
            return [ScoredToken("" if t.special else t.text, t, tops) for t, tops in found]
        for token, tops in found:
            self.trail.add(token, tops)
        return self.trail.take(text)


@asynccontextmanager
async def _started(
    body: CompletionRequest, prompts: Sequence[GenerateParameters], services: Services
) -> AsyncIterator[list[_ChoiceWriter]]:
    """The choices, which run in the block. Raises RouterError."""
    async with AsyncExitStack() as stack:
        writers: list[_ChoiceWriter] = []
        for prompt in prompts:
            started = services.infer.start_many(prompt, body.num_sequences, services.options)
            for entry in await stack.enter_async_context(started):
                writers.append(_ChoiceWriter(len(writers), body, prompt, entry, services.tokenizer))
        yield writers
