"""The grammar masks of a step's rows, computed while the device computes the step."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from text_generation_shard.arrays import Ints
from text_generation_shard.grammars.constraint import Constraint
from text_generation_shard.grammars.grammar import sentence
from text_generation_shard.sampling.sampler import Choice


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of a step that must follow a grammar."""

    constraint: Constraint
    # Its first position among the step's sampled positions.
    place: int
    # The draft tokens at these positions, which the grammar allows; one more position follows.
    draft_tokens: Sequence[int] = ()


class GrammarMasks:
    """Owns the threads that compute masks, for one step at a time."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._executor = LLExecutor()
        octets, bits = torch.arange(256, device=device), torch.arange(8, device=device)
        # For each byte of a mask, eight bools packed into one int64.
        self._forbidden = ((octets[:, None] >> bits & 1) == 0).view(torch.int64)[:, 0]

    def start(self, rows: Sequence[ConstrainedRow]) -> "StepGrammars | None":
        """Start to compute a step's masks."""
        if not rows:
            return None
        num_masks = sum(len(row.draft_tokens) + 1 for row in rows)
        masks = torch.zeros(num_masks, -(-self._vocab_size // 32), dtype=torch.int32)
        job = self._thread.submit(self._fill, rows, masks)
        return StepGrammars(rows, job, self._vocab_size, self._device, self._forbidden)

    @torch.inference_mode()
    def _fill(self, rows: Sequence[ConstrainedRow], masks: Tensor) -> Tensor:
        """Fill the masks of all positions; a row without a mask gets all bits."""
        firsts = list(accumulate((len(row.draft_tokens) + 1 for row in rows), initial=0))
        work = [
            (matcher, first, list(row.draft_tokens))
            for row, first in zip(rows, firsts, strict=False)
            if (matcher := row.constraint.matcher) is not None and not row.constraint.failure
        ]
        drafted = [item for item in work if item[2]]
        plain = [(matcher, first) for matcher, first, draft_tokens in work if not draft_tokens]
        memory = masks.data_ptr(), masks.shape[1] * 4, masks.shape[0]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *memory)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
        for row, first in zip(rows, firsts, strict=False):
            item, own = row.constraint, masks[first : first + len(row.draft_tokens) + 1]
            if not item.failure and item.matcher is not None and item.matcher.is_error():
                item.failure = sentence(item.matcher.get_error())
            if not item.failure and not own[0].any():
                item.failure = "the grammar allows no token to follow"
            if item.failure:
                own.fill_(-1)
                continue
            for place, mask in enumerate(own):
                if not item.may_end_after(place):
                    _without(mask, item.eos_ids)
        return masks


def _without(mask: Tensor, tokens: Sequence[int]) -> None:
    """Clear the bits of `tokens`, unless no other bit is set."""
    rest = mask.clone()
    for token in tokens:
        rest[token // 32] &= ~torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
    if rest.any():
        mask.copy_(rest)


class StepGrammars:
    """The constrained rows of one step; see `sampler.Allowed`."""

    def __init__(
        self,
        rows: Sequence[ConstrainedRow],
        job: "Future[Tensor]",
        vocab_size: int,
        device: torch.device,
        forbidden: Tensor,
    ) -> None:
        """`forbidden` [256]: for each byte of a mask, which of 8 tokens are forbidden."""
        self._forbidden = forbidden
        self._rows = rows
        self.places: Ints = np.array(
            [row.place + index for row in rows for index in range(len(row.draft_tokens) + 1)]
        )
        self._job = job
        self._vocab_size = vocab_size
        self._device = device

    def masks(self) -> Tensor:
        """See `sampler.Allowed`."""
        return self._job.result()

    def restrict(self, logits: Tensor) -> None:
        """See `sampler.Allowed`."""
        octets = self.masks().view(torch.uint8).to(self._device)
        # A lookup per byte is faster than shifting out every bit.
        forbidden = self._forbidden.index_select(0, octets.flatten().int())
        is_out = forbidden.view(torch.bool).view(len(octets), -1)[:, : self._vocab_size]
        first = 0
        for row in self._rows:
            count = len(row.draft_tokens) + 1
            logits[row.place : row.place + count].masked_fill_(
                is_out[first : first + count], float("-inf")
            )
            first += count

    def keep(self, places: Sequence[int]) -> None:
        """The step keeps only these sampled positions, in this order; they include those of all
        constrained rows."""
        index = {place: number for number, place in enumerate(places)}
        self._rows = [replace(row, place=index[row.place]) for row in self._rows]

    def settle(self, choice: Choice) -> Choice:
        """Advance each row's grammar by its chosen tokens: those that equal their draft tokens, and
        one more. Returns the choice with tokens that grammars replaced."""
        forced: dict[int, int] = {}
        for row in self._rows:
            for place, draft in enumerate((*row.draft_tokens, None), row.place):
                chosen = int(choice.token_ids[place])
                token = row.constraint.settle(chosen)
                if token != chosen:
                    forced[place] = token
                if token != draft or row.constraint.failure:
                    break
        return choice.force(forced) if forced else choice

    def abandon(self, why: str) -> None:
        """Fail all rows: their grammars have advanced, but the step is undone."""
        for row in self._rows:
            row.constraint.failure = row.constraint.failure or why

    def failures(self) -> dict[int, str]:
        """First position → sentence, for the rows that failed."""
        failed = ((row.place, row.constraint.failure) for row in self._rows)
        return {place: why for place, why in failed if why}

    def driven(self) -> list[int]:
        """The first positions of the rows whose grammar has replaced a token."""
        return [row.place for row in self._rows if row.constraint.is_driven]
