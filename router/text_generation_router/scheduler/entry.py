"""A request in flight: where it is, what it holds, and the way its outputs take to the client."""

import asyncio
import time
from collections.abc import Sequence
from enum import Enum

from text_generation_router.errors import RouterError
from text_generation_router.request import Output, Request, Timings
from text_generation_router.scheduler.answer import Answer
from text_generation_router.scheduler.blocks import BlockTable


class EntryState(Enum):
    """Where an entry is. Queued and running can alternate (preemption); ended is for good."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Entry:
    """One accepted request, changed by the Batcher alone; clients only await `next_outputs`."""

    def __init__(self, entry_id: int, request: Request, answer: Answer) -> None:
        self.id = entry_id
        self.request = request
        self.answer = answer
        """The text side: what has been delivered so far."""
        self.token_ids: list[int] = []
        """What the shard has generated; one step ahead of `answer` while a reply is delivered."""
        self.state = EntryState.QUEUED
        self.siblings: Sequence[Entry] = ()
        """All sequences of the same prompt, itself among them; empty: there are no others."""
        self.block_table: BlockTable | None = None
        """Held from admission until no step can write to it any more."""
        self.num_cached_tokens = 0
        """How many leading tokens are in blocks shared with a sibling, which computes them."""
        self.queued = time.perf_counter()
        self.timings: Timings | None = None
        """When it was queued and first admitted; a preemption does not change it."""
        self.last_delivered: float | None = None
        """When the client was last given a token."""
        self._outputs: list[Output] = []
        self._error: RouterError | None = None
        self._wake = asyncio.Event()

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
    def sharing_table(self) -> BlockTable | None:
        """The table of a sibling that holds the prompt; None if this entry must compute it."""
        tables = (sibling.block_table for sibling in self.siblings)
        return next((table for table in tables if table is not None), None)

    def num_shareable_blocks(self, block_size: int) -> int:
        """How many leading blocks siblings share: those that hold nothing but prompt.

        The prompt's last token is never shared: its output is this entry's own first token.
        """
        return (len(self.request.input_ids) - 1) // block_size

    def deliver(self, *outputs: Output) -> None:
        """Hands over the outputs of one step; the client wakes up once for all of them."""
        self._outputs.extend(outputs)
        self._wake.set()

    def fail(self, error: RouterError) -> None:
        """Ends the client's wait with an error, after the outputs that are still unread."""
        self._error = error
        self._wake.set()

    async def next_outputs(self) -> list[Output]:
        """All outputs that are ready, at least one; raises the error the entry ended with.

        The last output of a good ending is the TokenOutput whose `generated` is set: do not call
        again after it.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            await self._wake.wait()
            self._wake.clear()
        outputs, self._outputs = self._outputs, []
        return outputs
