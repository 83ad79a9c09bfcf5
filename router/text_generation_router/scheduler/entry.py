"""A request in flight: where it is, what it holds, and the way its outputs take to the client."""

import asyncio
import time
from collections.abc import Iterator
from enum import Enum

from text_generation_router.errors import RouterError
from text_generation_router.request import Output, Pooling, Request, Timings
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.blocks import BlockTable
from text_generation_router.scheduler.prefix_cache import Chain, Tokens


class EntryState(Enum):
    """Where an entry is. Queued and running can alternate (preemption); ended is for good."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Entry:
    """One accepted request, changed by Batcher and Planner; clients only await `next_outputs`.

    While it runs, the KV of its first `num_computed` tokens is written. When its whole input is,
    that is all its tokens but the last.
    """

    def __init__(
        self, entry_id: int, request: Request, answer: Answer, group: int | None = None
    ) -> None:
        self.id = entry_id
        self.request = request
        self.answer = answer
        """The text side: what has been delivered so far."""
        self.token_ids: list[int] = []
        """What the shard has generated; one step ahead of `answer` while a reply is delivered."""
        self.state = EntryState.QUEUED
        self.group = group
        """The same for all sequences of one prompt; None where there is only one."""
        self.block_table: BlockTable | None = None
        """Held from admission until no step can write to it any more."""
        self.chain: Chain | None = None
        """How far its text is in the prefix cache; None while it shares with nobody."""
        self.num_inputs = 0
        """How many tokens it had when it was admitted; it decodes once all of them are computed."""
        self.num_cached_tokens = 0
        """How many of those were in shared blocks, or are written there by its first step."""
        self.num_reused_tokens: int | None = None
        """How many of its prompt were cached when it was first admitted: what its client is told.
        None before."""
        self.chunk_len = 0
        """How many tokens behind those its first step computes."""
        self.num_computed = 0
        self.queued = time.perf_counter()
        self.timings: Timings | None = None
        """When it was queued and first admitted; a preemption does not change it."""
        self.last_delivered: float | None = None
        """When the client was last given a token."""
        self._outputs: list[Output] = []
        self._error: RouterError | None = None
        # What the client waits on while nothing is ready.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.input_ids) + len(self.token_ids)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """What a prefill computes: the prompt, and after a preemption the generated tokens too."""
        return (*self.request.input_ids, *self.token_ids)

    @property
    def wants_prefill_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities were asked for and are still owed."""
        return self.request.prefill_logprobs and not self.token_ids

    @property
    def needs_all_computed(self) -> bool:
        """Whether something is owed that cached tokens do not have."""
        return self.wants_prefill_logprobs or self.request.pooling is Pooling.MEAN

    @property
    def max_context(self) -> int:
        """The most tokens it can ever have."""
        return len(self.request.input_ids) + self.request.stopping.max_new_tokens

    def full_blocks(self, start: int, num_tokens: int, block_size: int) -> Iterator[Tokens]:
        """The tokens of the blocks from block `start` on that its first `num_tokens` fill."""
        prompt, num_prompt = self.request.input_ids, len(self.request.input_ids)
        for first in range(start * block_size, num_tokens - block_size + 1, block_size):
            end = first + block_size
            if end <= num_prompt:
                yield prompt[first:end]
            else:
                generated = self.token_ids[max(0, first - num_prompt) : end - num_prompt]
                yield (*prompt[first:], *generated)

    def deliver(self, *outputs: Output) -> None:
        """Hands over the outputs of one step; the client wakes up once for all of them."""
        self._outputs.extend(outputs)
        self._wake()

    def fail(self, error: RouterError) -> None:
        """Ends the client's wait with an error, after the outputs that are still unread."""
        self._error = error
        self._wake()

    async def next_outputs(self) -> list[Output]:
        """All outputs that are ready, at least one; raises the error the entry ended with.

        The last output of a good ending is the TokenOutput whose `generated` is set: do not call
        again after it.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
