"""A request in flight: its state, its blocks, and its tokens on their way to the client as text."""

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from text_generation_router.errors import RouterError
from text_generation_router.request import (
    Ending,
    FinishReason,
    GeneratedText,
    GenerateResult,
    Pooling,
    PrefillOutput,
    Request,
    Token,
    TokenOutput,
)
from text_generation_router.text.tokenizer import Tokenizer

# The blocks of one request, in order of position; changed by the BlockAllocator alone. The first
# blocks can be in several tables: they are full and are not written any more.
BlockTable = list[int]
# The tokens of one full block, packed (`Entry.full_blocks`): the cache only compares them.
Tokens = bytes


@dataclass(slots=True)
class Chain:
    """How much of one request's text is in the cache; changed by the BlockAllocator alone."""

    # The last node, or the salt when there is none.
    tail: Hashable
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A complete stop string."""

    stop_string: str
    # Its end in the last piece, in characters.
    end: int


class StopStrings:
    """Finds the first stop string that is completed, however the text is cut into pieces.

    Keeps only the end of the text that may be the beginning of a stop string: later matches begin
    there or behind it.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        # Of several that end together the longest counts: it begins first.
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._unfinished = ""

    @property
    def num_unfinished(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        return len(self._unfinished)

    def search(self, piece: str) -> StopMatch | None:
        """The stop string that `piece` completes; None without one.

        Of several, the one that ends first counts: so the result does not depend on the pieces.
        Not to be called again after a match.
        """
        if not self._stop_strings or not piece:
            return None
        text = self._unfinished + piece
        starts = ((text.find(stop), stop) for stop in self._stop_strings)
        matches = [
            StopMatch(stop, max(0, start + len(stop) - len(self._unfinished)))
            for start, stop in starts
            if start >= 0
        ]
        if matches:
            return min(matches, key=lambda match: match.end)
        begins = min(_unfinished_start(text, stop) for stop in self._stop_strings)
        self._unfinished = text[begins:]
        return None


class EntryState(Enum):
    """State of an entry. Queued and running can alternate (preemption); ended is final."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Entry:
    """One accepted request, changed by Batcher and Planner. Its client iterates it for lists of
    outputs that became ready together.

    While it runs, the KV of its first `num_computed` tokens is written. Once its whole input is
    computed, that is all its tokens but the last.

    The texts of all tokens, joined, are the text of the model with special tokens, cut behind a
    stop string. The deltas, joined, are `GeneratedText.text`: the same without hidden special
    tokens and, where stop strings are left out, without the one that ended the text, of which no
    part was ever in a delta.
    """

    def __init__(
        self,
        entry_id: int,
        request: Request,
        tokenizer: Tokenizer,
        group: int | None = None,
        arrival: float | None = None,
        charge: Callable[[int, float], None] | None = None,
    ) -> None:
        """`arrival`: when its HTTP request came; None: now."""
        self.id = entry_id
        self.rank = (-request.priority, entry_id)
        """Order of entries: lower first, by priority, then age. Unique."""
        self.request = request
        self.prompt_ids = request.input_ids
        """The prompt as the model reads it."""
        self.prompt_tokens = len(request.input_ids)
        """Length of the prompt."""
        self.max_context = self.prompt_tokens + request.max_new_tokens
        """The most tokens it can ever have."""
        self.is_prompt_only = request.asked.is_prompt_only
        self.token_ids: list[int] = []
        """The generated tokens; one step ahead of the text while a reply is delivered."""
        self.num_tokens = self.prompt_tokens
        """Prompt and generated tokens."""
        self.state = EntryState.QUEUED
        self.group = group
        """Equal for all sequences of one prompt; None where there is only one."""
        self.block_table: BlockTable | None = None
        """From admission until no step can write to its blocks any more."""
        self.chain: Chain | None = None
        """How much of its text is in the prefix cache; None while it shares no blocks."""
        self.snapshot: int | None = None
        """The snapshot that its state begins from; None: its state begins empty."""
        self.stores: dict[int, int] = {}
        """By number of tokens: its state after them is stored as this snapshot."""
        self.num_inputs = 0
        """Its tokens when it was admitted; it decodes once all of them are computed."""
        self.num_cached_tokens = 0
        """Of `num_inputs`, those in shared blocks, or written there by its first step."""
        self.cached_tokens = 0
        """Cached prompt tokens at its first admission, which its client sees."""
        self.num_computed = 0
        self.is_shown = True
        """Whether its client sees each token at once, and not only the whole answer."""
        self.num_losses = 0
        """How often the shards were lost while it ran."""
        self.queued = time.perf_counter()
        self.arrival = self.queued if arrival is None else arrival
        self.charge = charge
        """Charges its caller for delivered tokens, at a time; None: they cost nothing."""
        self.started: float | None = None
        """When it was first admitted; preemption does not change it."""
        self.last_delivered: float | None = None
        """When the client last got a token."""
        self.ending: Ending | None = None
        """Set when the client has read the last output."""
        self.error: RouterError | None = None
        """The error that was raised to the client."""
        self.prefill: PrefillOutput | None = None
        """What was requested about its prompt, from its first output on."""
        # The text: how many tokens were delivered, what could be shown of them, and the end of the
        # visible text, held back because it may belong to a stop string.
        self._tokenizer, self._decoder = tokenizer, tokenizer.stream_decoder()
        self._stop_strings = StopStrings(request.asked.stop)
        self._num_delivered = 0
        self._deltas: list[str] = []
        self._held = ""
        self._outputs: list[TokenOutput] = []
        # Follows the unread outputs.
        self._failure: RouterError | None = None
        # The client awaits it while no output is ready; it is done if the client waits no longer.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The input of a prefill: the prompt, and after preemption the generated tokens too."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def wants_prefill_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are requested and not delivered yet."""
        return self.request.prefill_logprobs and not self.token_ids

    @property
    def needs_all_computed(self) -> bool:
        """Whether the result needs hidden states or scores of all tokens, which are not cached."""
        return self.wants_prefill_logprobs or self.request.asked.pooling is Pooling.MEAN

    def full_blocks(self, start: int, num_tokens: int, block_size: int) -> Iterator[Tokens]:
        """The packed tokens of each full block from `start` on, of its first `num_tokens`."""
        prompt, num_prompt = self.prompt_ids, self.prompt_tokens
        for first in range(start * block_size, num_tokens - block_size + 1, block_size):
            end = first + block_size
            tokens: Sequence[int] = prompt[first:end]
            if end > num_prompt:
                generated = self.token_ids[max(0, first - num_prompt) : end - num_prompt]
                tokens = (*tokens, *generated)
            yield array("I", tokens).tobytes()

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds generated tokens; the KV of all but the last is written."""
        self.token_ids += token_ids
        self.num_tokens += len(token_ids)
        self.num_computed = self.num_tokens - 1

    def deliver(self, outputs: Iterable[TokenOutput]) -> None:
        """Adds the outputs of one step; the client wakes up once for all of them."""
        self._outputs.extend(outputs)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: RouterError) -> None:
        """Ends with an error, which follows the unread outputs."""
        self._failure = error
        self.deliver(())

    def __aiter__(self) -> "Entry":
        return self

    async def __anext__(self) -> list[TokenOutput]:
        """All outputs that are ready, at least one; raises the error the entry ended with."""
        if self.ending is not None:
            raise StopAsyncIteration
        while not self._outputs:
            await self._change()
        outputs, self._outputs = self._outputs, []
        if (generated := outputs[-1].generated) is not None:
            self.ending = self._ended(generated)
        return outputs

    async def ready(self) -> None:
        """Returns when there is an output; raises the error the entry ended with."""
        while not self._outputs:
            await self._change()

    def _change(self) -> asyncio.Future[None]:
        """Done with the next output or error; raises the error the entry ended with."""
        if self._failure is not None:
            self.error = self._failure
            raise self.error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def collect(self) -> GenerateResult:
        """Reads it to the end, whole; raises its failure."""
        self.is_shown = False
        made = [output async for outputs in self for output in outputs]
        has_top_tokens = self.request.asked.top_n_tokens
        assert self.ending is not None
        return GenerateResult(
            prompt_ids=self.prompt_ids,
            cached_tokens=self.cached_tokens,
            prefill=self.prefill or PrefillOutput(()),
            tokens=tuple(output.token for output in made),
            top_tokens=tuple(output.top_tokens for output in made) if has_top_tokens else (),
            ending=self.ending,
        )

    def _ended(self, generated: GeneratedText) -> Ending:
        now, queued, started = time.perf_counter(), self.queued, self.started
        assert started is not None, "it has generated something"
        inference_s = now - started
        times = {
            "total_time": now - self.arrival,
            "validation_time": queued - self.arrival,
            "queue_time": started - queued,
            "inference_time": inference_s,
            "time_per_token": inference_s / max(1, generated.generated_tokens),
        }
        return Ending(generated, times)

    # ---- Its text ----

    def read_prompt(
        self,
        logprobs: Sequence[float],
        top_tokens: tuple[Sequence[int], Sequence[float]] = ((), ()),
        ranks: Sequence[int] = (),
    ) -> PrefillOutput:
        """The prompt's tokens, with one log-probability each. Arguments: see StepResult."""
        input_ids = self.request.input_ids
        best = self._tokens(*top_tokens)
        each = len(best) // max(1, len(logprobs) - 1)
        places = range(0, len(best), each) if best else ()
        tops = tuple(best[place : place + each] for place in places)
        tokens = self._tokens(input_ids, logprobs)
        return PrefillOutput(tokens, ((), *tops) if tops else (), (None, *ranks))

    def step(
        self,
        token_id: int,
        logprob: float,
        finish_reason: FinishReason | None,
        top_tokens: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> TokenOutput:
        """The output for the next token; `generated` is set if it is the last.

        `finish_reason` is the shard's. Where stop strings are kept, as in TGI, it wins over a stop
        string, which still cuts the text, and length wins over an end token that is the last one
        allowed. `top_tokens`: ids and log-probabilities.
        """
        self._num_delivered += 1
        if finish_reason is None and not self.request.asked.stop and not top_tokens[0]:
            # Nearly every token: whole characters, and no stop string to look for.
            plain = self._tokenizer.plain_text(token_id)
            if plain is not None and not self._decoder.is_inside_character:
                self._deltas.append(plain)
                return TokenOutput(Token(token_id, plain, _finite(logprob)), plain)
        asked = self.request.asked
        is_end = finish_reason is FinishReason.EOS_TOKEN
        is_full = self._num_delivered == self.request.max_new_tokens
        if is_end and is_full and asked.keeps_stop_sequence:
            is_end, finish_reason = False, FinishReason.LENGTH
        # The text of a token that ends the answer is not shown.
        is_out = (is_end or finish_reason is FinishReason.STOP_TOKEN) and not asked.includes_stop
        special = is_end or self._tokenizer.is_special(token_id)
        if special or is_out:
            # It interrupts an incomplete character.
            visible = self._decoder.flush()
            token_text = self._tokenizer.decode_each([token_id])[0]
            text = visible + token_text
            if not is_out and self._shows(token_text):
                visible = text
        else:
            text = visible = self._decoder.step(token_id)
            if finish_reason is not None:
                text = visible = visible + self._decoder.flush()
        match = self._search(text, visible, is_out)
        if match is not None:
            text, visible = text[: match.end], visible[: match.end]
            if finish_reason is None or not asked.keeps_stop_sequence:
                finish_reason = FinishReason.STOP_SEQUENCE
        delta = self._delta(visible, match, is_last=finish_reason is not None)
        self._deltas.append(delta)
        return TokenOutput(
            Token(token_id, text, _finite(logprob), special),
            delta,
            self._tokens(*top_tokens),
            None if finish_reason is None else self._generated(finish_reason, match, token_id),
        )

    def _shows(self, special_token: str) -> bool:
        asked = self.request.asked
        return asked.shows_special_tokens or special_token in asked.visible_special_tokens

    def _search(self, text: str, visible: str, is_out: bool) -> StopMatch | None:
        """The stop string that a token completes.

        Where stop strings are kept, all text is searched, as in TGI; where they are left out, the
        visible text, and a hidden special token that is a stop string as a whole.
        """
        if self._num_delivered <= self.request.asked.num_unstopped_tokens:
            return None
        if self.request.asked.keeps_stop_sequence:
            return self._stop_strings.search(text)
        match = self._stop_strings.search(visible)
        hidden = text[len(visible) :]
        if match is None and hidden and not is_out:
            stops = self.request.asked.stop
            match = StopMatch(hidden, len(text)) if hidden in stops else None
        return match

    def _delta(self, visible: str, match: StopMatch | None, is_last: bool) -> str:
        """The part of the held text and `visible` that can be shown now."""
        asked = self.request.asked
        if asked.keeps_stop_sequence or asked.includes_stop:
            return visible
        shown = self._held + visible
        num_held = 0
        if match is not None:
            # No change where a hidden token was the stop string.
            shown = shown.removesuffix(match.stop_string)
        elif not is_last:
            num_held = self._stop_strings.num_unfinished
        end = len(shown) - num_held
        self._held = shown[end:]
        return shown[:end]

    def _generated(
        self, finish_reason: FinishReason, match: StopMatch | None, token_id: int
    ) -> GeneratedText:
        sampling = self.request.sampling
        return GeneratedText(
            "".join(self._deltas),
            0 if self.request.asked.is_prompt_only else self._num_delivered,
            finish_reason,
            sampling.seed if sampling.is_sampling else None,
            None if match is None else match.stop_string,
            token_id if finish_reason is FinishReason.STOP_TOKEN else None,
        )

    def _tokens(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Token, ...]:
        texts = self._tokenizer.decode_each(token_ids)
        return tuple(
            Token(token_id, text, _finite(logprob), self._tokenizer.is_special(token_id))
            for token_id, text, logprob in zip(token_ids, texts, logprobs, strict=True)
        )


def _finite(logprob: float) -> float | None:
    """None in place of NaN and infinity, which JSON does not have."""
    return logprob if math.isfinite(logprob) else None


def _unfinished_start(text: str, stop: str) -> int:
    """Start of the longest end of `text` that is a beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
