"""The state of each constrained row, and the grammar masks of a step, which are computed while the
device computes the step.

A `Grammar` is compiled once and shared; each row with a grammar owns a `Constraint`, its state.
Chosen tokens advance the constraint. Near `max_new_tokens`, a token after which the text could no
longer end in time is replaced by the next token of a known ending.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from text_generation_shard.arrays import Ints
from text_generation_shard.grammars.ending import EndingSearch, ends
from text_generation_shard.grammars.grammar import (
    LONGEST_ENDING,
    Grammar,
    GrammarError,
    sentence,
)
from text_generation_shard.sampling import Choice

# Steps of a search for an ending during generation, which take about 20 us each.
_NUM_STEPS = 150
# Most searches without success during a generation: each delays other requests.
_MOST_FAILED = 8
# _FEW: with no more tokens left, a text fails if no ending is known. _NEAR: with no more tokens
# left than this beyond twice a known ending, the text follows it and does not go on without one.
_FEW, _NEAR = 8, 64
# Parts of an ending that are tried in other states.
_MOST_PARTS = 100
# A new token may replace up to this many tokens of the known ending.
_REPLACED = 3


class Constraint:
    """The state of one request in its grammar. Changed only between two forward passes.

    If `max_new_tokens` is at least `Grammar.min_tokens`, the text is complete within
    `max_new_tokens`, or the request fails. It fails only where no ending is found and few tokens
    are left: a text may go on to where one is.

    If the grammar is followed elsewhere, every token is accepted.
    """

    def __init__(
        self, grammar: Grammar, generated: Sequence[int], max_new_tokens: int, min_new_tokens: int
    ) -> None:
        """`generated`: the tokens chosen before a preemption.

        Before `min_new_tokens` an end token is allowed only if no other token is.
        """
        self.failure = grammar.error
        """Why this request can not go on."""
        self.is_driven = False
        """Whether a token was replaced so that the text ends in time."""
        self.eos_ids = grammar.eos_ids
        self.matcher: LLMatcher | None = None
        """None: the grammar has failed, or is followed elsewhere."""
        self._max_new_tokens, self._min_new_tokens = max_new_tokens, min_new_tokens
        self._num_tokens = 0
        # An ending of the text; None: not known.
        self._ending: Sequence[int] | None = grammar.ending
        # With more tokens left, the text needs no known ending.
        self._far = grammar.far
        self._num_failed = 0
        self._shortest = grammar.ending
        if grammar.start is None or grammar.search is None:
            return
        self._search = grammar.search
        self.matcher = grammar.start.deep_copy()
        for token in generated:
            if self.settle(token) != token and not self.failure:
                self.failure = "what was generated before does not follow the grammar"

    def may_end_after(self, count: int) -> bool:
        """Whether an end token is allowed beside other tokens after `count` more tokens."""
        return self._num_tokens + count >= self._min_new_tokens

    def allowed(self, draft_tokens: Sequence[int]) -> Sequence[int]:
        """The longest allowed prefix of the draft tokens, without end tokens."""
        if self.failure:
            return ()
        if self.matcher is None or not draft_tokens:
            return draft_tokens
        ends = [place for place, token in enumerate(draft_tokens) if token in self.eos_ids]
        return draft_tokens[
            : self.matcher.validate_tokens(list(draft_tokens[: ends[0] if ends else None]))
        ]

    def settle(self, token: int) -> int:
        """Write `token`, or the one that must replace it; returns the written token.

        Sets `failure` if neither is possible.
        """
        if self.failure or self.matcher is None:
            return token
        try:
            if token not in self.eos_ids:
                token = self._steered(self.matcher, self._search, token)
        except GrammarError as error:
            self.failure = str(error)
            return token
        if not self.matcher.consume_token(token):
            self.failure = sentence(self.matcher.get_error())
        self._num_tokens += 1
        return token

    def _steered(self, matcher: LLMatcher, search: EndingSearch, token: int) -> int:
        """`token` if the text can still end after it, else the first token of the ending."""
        room = self._max_new_tokens - self._num_tokens
        ending = self._ending
        if ending is not None:
            # Most tokens keep the ending, or replace its first tokens.
            for place in range(max(0, len(ending) - room + 1), min(_REPLACED, len(ending)) + 1):
                if ends(matcher, [token, *ending[place:]], self.eos_ids[0]):
                    self._ending = ending[place:]
                    return token
        if room > self._far:
            self._ending = None
            return token
        after = matcher.deep_copy()
        if after.consume_token(token):
            self._ending = search.find(after, room - 1, _NUM_STEPS, self._known())
            if self._ending is not None:
                return token
            # An ending that is too long says that this token is wrong; none at all says nothing.
            if ending and room > 2 * len(ending) + _NEAR and not self._ends_late(after, search):
                return token
        if ending is None:
            ending = search.find(matcher, room, _NUM_STEPS, self._known())
        if ending is None:
            self._num_failed += 1
            if room > _FEW and self._num_failed < _MOST_FAILED:
                self._far = room // 2
                return token
            raise GrammarError(
                f"the text can not be completed in the {room} tokens that are left; "
                "increase max_new_tokens or make the grammar simpler"
            )
        self.is_driven = True
        token, self._ending = [*ending, self.eos_ids[0]][0], ending[1:]
        return token

    def _ends_late(self, matcher: LLMatcher, search: EndingSearch) -> bool:
        """Whether there is an ending of any length."""
        return search.find(matcher, LONGEST_ENDING, 4 * _NUM_STEPS, self._known()) is not None

    def _known(self) -> list[Sequence[int]]:
        """Parts of the known ending and of the shortest text, which often end other states too."""
        both = self._ending or (), self._shortest
        return [tokens[at:] for tokens in both for at in range(min(len(tokens), _MOST_PARTS))]


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
        self.vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._executor = LLExecutor()
        octets, bits = torch.arange(256, device=device), torch.arange(8, device=device)
        self.forbidden = ((octets[:, None] >> bits & 1) == 0).view(torch.int64)[:, 0]
        """For each byte of a mask, which of 8 tokens are forbidden: bools packed into one int64."""

    def start(self, rows: Sequence[ConstrainedRow]) -> "StepGrammars | None":
        """Start to compute a step's masks."""
        if not rows:
            return None
        num_masks = sum(len(row.draft_tokens) + 1 for row in rows)
        masks = torch.zeros(num_masks, -(-self.vocab_size // 32), dtype=torch.int32)
        job = self._thread.submit(self._fill, rows, masks)
        return StepGrammars(self, rows, job)

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
    """The constrained rows of one step; see `sampling.Allowed`."""

    def __init__(
        self, owner: GrammarMasks, rows: Sequence[ConstrainedRow], job: "Future[Tensor]"
    ) -> None:
        self._owner, self._rows, self._job = owner, rows, job
        self.places: Ints = np.array(
            [row.place + index for row in rows for index in range(len(row.draft_tokens) + 1)]
        )

    def masks(self) -> Tensor:
        """See `sampling.Allowed`."""
        return self._job.result()

    def restrict(self, logits: Tensor) -> None:
        """See `sampling.Allowed`."""
        table = self._owner.forbidden
        octets = self.masks().view(torch.uint8).to(table.device)
        # A lookup per byte is faster than shifting out every bit.
        forbidden = table.index_select(0, octets.flatten().int())
        is_out = forbidden.view(torch.bool).view(len(octets), -1)[:, : self._owner.vocab_size]
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
