"""Grammars: compiled beside the device's work, matched beside the sampling, and always ended.

A `Grammar` is compiled once and shared; each row that carries it owns a `Constraint`, its place in
the text. While the device computes a step, `GrammarMasks` finds out which tokens each constrained
row may get. The chosen tokens move the constraints on; near `max_new_tokens` a token after which
the text could no longer be ended in time is replaced by the next one of a known ending.
"""

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from text_generation_shard.ending import EndingSearch, ends
from text_generation_shard.sampling import Choice

# What one grammar may cost. Fuel and items are llguidance's units: a compilation stays below about
# a second, a mask below some tens of milliseconds, and a lexer below about 100 MB.
_LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=5_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_CACHED_GRAMMARS = 64
_COMPILING_THREADS = 2
# A grammar whose shortest text is longer is refused.
_LONGEST_ENDING = 4096
# States followed at once in a search: from the start of a text, and on the way.
_THOROUGH, _QUICK = 8, 3
# Tokens of an ending for which a better one is looked for, and of one the quick search missed.
_LONGEST_THOROUGH, _LONGEST_HIDDEN = 64, 512
# Tokens that the quick search puts before an old ending: at most, and in place of its first ones.
_QUICK_DEPTH, _REPLACED = 32, 3
# With fewer tokens to spare than this a new ending is not even looked for.
_LEAST_SPARE = 2
# Tokens by which one more token is taken to prolong the shortest ending at most. The ending of a
# text is looked for so seldom that it still fits if that is so.
_GROWTH = 64
# Characters of an error that are shown.
_LONGEST_ERROR = 400
# Numbered lines of a grammar, and what points into them.
_SOURCE_LINE = re.compile(r"\s*(\d+ \|.*|\^+\s*)$")
_PLACE = re.compile(r"at \d+\(\d+\): ")


class GrammarError(ValueError):
    """This request can not go on; one sentence for its user. Others are not affected."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, or the reason why it can not be used."""

    error: str = ""
    start: LLMatcher | None = None
    search: EndingSearch | None = None
    eos_ids: tuple[int, ...] = ()
    # The tokens of a short text.
    ending: tuple[int, ...] = ()

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest text known, its end token counted."""
        return 0 if self.error else len(self.ending) + 1


class GrammarCompiler:
    """Owns the tokenizer as llguidance sees it, compiled grammars and the threads that make them.

    `compile` is called from one event loop.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = model_path / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._search: tuple[LLTokenizer, EndingSearch] | None = None
        self._known: OrderedDict[str, Future[Grammar]] = OrderedDict()

    async def compile(self, text: str) -> Grammar:
        """The grammar of a text in llguidance's form; known ones are there at once."""
        if text not in self._known:
            self._known[text] = self._threads.submit(self.compile_now, text)
            if len(self._known) > _CACHED_GRAMMARS:
                self._known.popitem(last=False)
        self._known.move_to_end(text)
        # A caller that gives up does not take the grammar from the others.
        return await asyncio.shield(asyncio.wrap_future(self._known[text]))

    def compile_now(self, text: str) -> Grammar:
        """The same in this thread, remembered by nobody."""
        try:
            tokenizer, search = self._load()
        except (OSError, ValueError) as error:
            return Grammar(f"grammars do not work with this model's {self._path.name}: {error}")
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            return Grammar(_sentence(matcher.get_error()))
        # The first search is cheap, but may miss what the second finds.
        ending = search.find(matcher, _LONGEST_ENDING, _QUICK)
        if ending is None:
            ending = search.find(matcher, _LONGEST_HIDDEN, _THOROUGH)
        elif len(ending) <= _LONGEST_THOROUGH:
            ending = search.find(matcher, len(ending) - 1, _THOROUGH) or ending
        if ending is None:
            # A limit that is met behind what must come first has a sentence of its own.
            if matcher.consume_tokens(matcher.compute_ff_tokens()):
                matcher.compute_bitmask()
                if matcher.is_error():
                    return Grammar(_sentence(matcher.get_error()))
            return Grammar(
                f"no text was found that matches, or the shortest has more than {_LONGEST_ENDING} "
                "tokens; make the grammar smaller"
            )
        return Grammar("", matcher, search, tuple(tokenizer.eos_tokens), tuple(ending))

    def prepare(self) -> None:
        """Load the tokenizer in a thread: half a second with large vocabularies, so better done
        before anything runs. A failure is told to those who compile."""
        self._threads.submit(self._load)

    def close(self) -> None:
        """Take no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> tuple[LLTokenizer, EndingSearch]:
        with self._lock:
            if self._search is None:
                tokenizer = LLTokenizer(
                    self._path.read_text(encoding="utf-8"),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_ids or None,
                )
                self._search = (tokenizer, EndingSearch(tokenizer))
            return self._search


class Constraint:
    """One request's place in its grammar. Changed between two forward passes only.

    Promises: with room for `Grammar.min_tokens` from the start, the text is complete and the end
    token chosen within `max_new_tokens`, or the request fails with a GrammarError.
    """

    def __init__(
        self, grammar: Grammar, generated: Sequence[int], max_new_tokens: int, min_new_tokens: int
    ) -> None:
        """`generated`: what was chosen before a preemption; the same states are gone through.

        An end token that is not the only choice is not offered before `min_new_tokens`.
        """
        self.failure = grammar.error
        """Why this request can not go on."""
        self.is_driven = False
        """Whether a token was forced, so that the text could end in time."""
        self.eos_ids = grammar.eos_ids
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._num_tokens = 0
        # An ending of the text as it was after `_ending_at` tokens.
        self._ending, self._ending_at = list(grammar.ending), 0
        self._growth = _GROWTH
        self._next_check = 0
        if grammar.start is None or grammar.search is None:
            return
        self._search = grammar.search
        self.matcher = grammar.start.deep_copy()
        for token in generated:
            if self.settle(token) != token and not self.failure:
                self.failure = "what was generated before does not follow the grammar"

    def may_end_after(self, count: int) -> bool:
        """Whether an end token may stand among other choices once `count` more are written."""
        return self._num_tokens + count >= self._min_new_tokens

    def allowed(self, guesses: Sequence[int]) -> Sequence[int]:
        """As many of the guessed tokens as may follow one another, none of them an end token."""
        ends = [place for place, token in enumerate(guesses) if token in self.eos_ids]
        if self.failure or not guesses:
            return ()
        return guesses[: self.matcher.validate_tokens(list(guesses[: ends[0] if ends else None]))]

    def settle(self, token: int) -> int:
        """Write `token`, or the one that must be written in its place; returns which.

        Sets `failure` if neither can be.
        """
        if self.failure:
            return token
        try:
            if self._num_tokens >= self._next_check and token not in self.eos_ids:
                token = self._checked(token)
        except GrammarError as error:
            self.failure = str(error)
            return token
        if not self.matcher.consume_token(token):
            self.failure = _sentence(self.matcher.get_error())
        self._num_tokens += 1
        return token

    def _checked(self, token: int) -> int:
        """`token` if the text can still be ended after it, else the first token of the ending."""
        # For this token, all others and an end token.
        room = self._max_new_tokens - self._num_tokens
        ending = self._ending_after(token, room - 2)
        if ending is None:
            if self._ending_at != self._num_tokens:
                found = self._search.find(self.matcher, room - 1, _THOROUGH, self._ending)
                if found is None:
                    raise GrammarError(
                        f"the text can not be completed in the {room} tokens that are left; "
                        "increase max_new_tokens or make the grammar simpler"
                    )
                self._ending = found
            self.is_driven = True
            token, ending = [*self._ending, self.eos_ids[0]][0], self._ending[1:]
        self._growth = max(self._growth, len(ending) - len(self._ending))
        self._ending, self._ending_at = ending, self._num_tokens + 1
        slack = room - 2 - len(ending)
        self._next_check = self._ending_at + max(0, slack) // (self._growth + 1)
        return token

    def _ending_after(self, token: int, limit: int) -> list[int] | None:
        """At most `limit` tokens that end the text once `token` is written."""
        ending = self._ending
        # Most tokens leave it as it is, or take the place of its first ones.
        for start in range(max(0, len(ending) - limit), min(_REPLACED, len(ending)) + 1):
            if ends(self.matcher, [token, *ending[start:]], self.eos_ids[0]):
                return ending[start:]
        spare = limit - len(ending)
        after = self.matcher.deep_copy()
        if spare < _LEAST_SPARE or not after.consume_token(token):
            return None
        # Enough to close what the token has opened, and then go on as before.
        depth = min(_QUICK_DEPTH, spare + _REPLACED)
        return self._search.find(after, limit, _QUICK, ending, depth)


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of a step that must follow a grammar."""

    constraint: Constraint
    # The first of its places among those of the step.
    place: int
    # What was guessed to be chosen there; `allowed` by the grammar. One more place follows.
    guesses: Sequence[int] = ()


class GrammarMasks:
    """Owns the threads that compute masks; for one step at a time."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._executor = LLExecutor()
        octets, bits = torch.arange(256, device=device), torch.arange(8, device=device)
        # Eight bools in one word.
        self._forbidden = ((octets[:, None] >> bits & 1) == 0).view(torch.int64)[:, 0]

    def start(self, rows: Sequence[ConstrainedRow]) -> "StepGrammars | None":
        """Begin with a step's masks."""
        if not rows:
            return None
        num_masks = sum(len(row.guesses) + 1 for row in rows)
        masks = torch.zeros(num_masks, -(-self._vocab_size // 32), dtype=torch.int32)
        job = self._thread.submit(self._fill, rows, masks)
        return StepGrammars(rows, job, self._vocab_size, self._device, self._forbidden)

    @torch.inference_mode()
    def _fill(self, rows: Sequence[ConstrainedRow], masks: Tensor) -> Tensor:
        """Bits of the allowed tokens, place by place; all set where there are none."""
        firsts = list(accumulate((len(row.guesses) + 1 for row in rows), initial=0))
        work = [
            (row.constraint.matcher, first, list(row.guesses))
            for row, first in zip(rows, firsts, strict=False)
            if not row.constraint.failure
        ]
        guessed = [item for item in work if item[2]]
        plain = [(matcher, first) for matcher, first, guesses in work if not guesses]
        memory = masks.data_ptr(), masks.shape[1] * 4, masks.shape[0]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *memory)
        if guessed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *memory)
        for row, first in zip(rows, firsts, strict=False):
            item, own = row.constraint, masks[first : first + len(row.guesses) + 1]
            if not item.failure and item.matcher.is_error():
                item.failure = _sentence(item.matcher.get_error())
            elif not item.failure and not own[0].any():
                item.failure = "the grammar allows no token to follow"
            if item.failure:
                own.fill_(-1)
                continue
            for place, mask in enumerate(own):
                if not item.may_end_after(place):
                    _without(mask, item.eos_ids)
        return masks


def _without(mask: Tensor, tokens: Sequence[int]) -> None:
    """Clear the bits of `tokens`, unless no other is set."""
    rest = mask.clone()
    for token in tokens:
        rest[token // 32] &= ~torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
    if rest.any():
        mask.copy_(rest)


class StepGrammars:
    """The constrained rows of one step."""

    def __init__(
        self,
        rows: Sequence[ConstrainedRow],
        job: "Future[Tensor]",
        vocab_size: int,
        device: torch.device,
        forbidden: Tensor,
    ) -> None:
        """`forbidden`: for each of 256 bytes of a mask, which of 8 tokens are not allowed [256]."""
        self._forbidden = forbidden
        self._rows = rows
        self._job = job
        self._vocab_size = vocab_size
        self._device = device

    def restrict(self, logits: Tensor) -> None:
        """-inf for what the grammars do not allow; logits [S, vocab] are overwritten."""
        octets = self._job.result().view(torch.uint8).to(self._device)
        # A table of what each byte forbids is ten times as fast as shifting every bit out.
        forbidden = self._forbidden.index_select(0, octets.flatten().int())
        is_out = forbidden.view(torch.bool).view(len(octets), -1)[:, : self._vocab_size]
        first = 0
        for row in self._rows:
            count = len(row.guesses) + 1
            logits[row.place : row.place + count].masked_fill_(
                is_out[first : first + count], float("-inf")
            )
            first += count

    def settle(self, choice: Choice) -> None:
        """Write the chosen tokens [S] into the texts, of each row as many as are as
        guessed and the one behind them; forced ones replace them."""
        for row in self._rows:
            for place, guess in enumerate((*row.guesses, None), row.place):
                chosen = int(choice.token_ids[place])
                token = row.constraint.settle(chosen)
                if token != chosen:
                    choice.force(place, token)
                if token != guess or row.constraint.failure:
                    break

    def failures(self) -> dict[int, str]:
        """First place → sentence, of the rows that can not go on."""
        failed = (row for row in self._rows if row.constraint.failure)
        return {row.place: row.constraint.failure for row in failed}

    def driven(self) -> list[int]:
        """The first places of the rows whose text was brought to its end."""
        return [row.place for row in self._rows if row.constraint.is_driven]


def _sentence(error: str) -> str:
    """An error of llguidance in one line, without where in its code or in our Lark it arose."""
    plain = error.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    plain = _PLACE.sub("", plain)
    told = [line for line in plain.splitlines() if not _SOURCE_LINE.match(line)]
    return " ".join(" ".join(told).split())[:_LONGEST_ERROR] or "the grammar has failed"
