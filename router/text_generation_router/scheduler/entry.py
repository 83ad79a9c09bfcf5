"""A request in flight: its state, its blocks, and its outputs on their way to the client."""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

from text_generation_router.errors import RouterError
from text_generation_router.request import (
    Ending,
    GeneratedText,
    GenerateResult,
    Pooling,
    PrefillOutput,
    Request,
    TokenOutput,
)
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.blocks import BlockTable, Chain, Tokens


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
    """

    def __init__(
        self,
        entry_id: int,
        request: Request,
        answer: Answer,
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
        self.answer = answer
        """The text side: what has been delivered so far."""
        self.token_ids: list[int] = []
        """The generated tokens; one step ahead of `answer` while a reply is delivered."""
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
