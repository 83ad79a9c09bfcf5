"""From the scores of a step to its tokens: sampled, verified, settled and judged as endings."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from text_generation_shard.arrays import Ints
from text_generation_shard.engine.forward_batch import Choices
from text_generation_shard.engine.row_table import RowTable
from text_generation_shard.engine.step import FinishReason, StepResult
from text_generation_shard.grammars.masks import ConstrainedRow, GrammarMasks, StepGrammars
from text_generation_shard.sampling.params import Watermark
from text_generation_shard.sampling.sampler import (
    Choice,
    Sampler,
    Scores,
    TokenHistory,
    sample,
    top_tokens,
)

logger = logging.getLogger(__name__)

# What the client of such a request reads.
_NO_SCORES = "the model's scores for the next token are not numbers (NaN or infinite)"

_NONE, _LENGTH, _EOS_TOKEN, _ERROR = (int(reason) for reason in FinishReason)


class ChosenTokens(NamedTuple):
    """What came of a step's choices. Nothing of it is in the row table yet."""

    # Of the T tokens: whose row, how many are known before, and which token.
    rows: Ints
    positions: Ints
    token_ids: Ints
    # [R] of each row that chose: how many tokens.
    counts: Sequence[int]
    # Rows whose request has ended.
    ended: list[int]
    result: StepResult


class Chooser:
    """Chooses the tokens of a step. Owns nothing of a request; reads the row table."""

    def __init__(
        self, vocab_size: int, eos_ids: Sequence[int], watermark: Watermark, device: torch.device
    ) -> None:
        self._masks = GrammarMasks(vocab_size, device)
        self._end_ids: Ints = np.array(eos_ids, dtype=np.int64)
        self._ends = frozenset(eos_ids)
        self._watermark = watermark
        self._sample = _sampler(device)

    def start(self, table: RowTable, choices: Choices) -> StepGrammars | None:
        """Begin with what the device is not needed for; the table holds the guesses."""
        if not table.constraints:
            return None
        constrained = []
        places = zip(choices.owners.tolist(), choices.firsts.tolist(), strict=True)
        for (row, first), end in zip(places, choices.ends.tolist(), strict=True):
            if (constraint := table.constraints.get(row)) is not None:
                known = int(choices.known[first])
                guesses = table.token_ids[row, known : known + end - first - 1].tolist()
                constrained.append(ConstrainedRow(constraint, first, guesses))
        return self._masks.start(constrained)

    def choose(
        self, table: RowTable, choices: Choices, logits: Scores, grammars: StepGrammars | None
    ) -> ChosenTokens:
        """Choose at every place as if it were the only one, then see how far the guesses, which
        the table holds behind what is known, were right. logits [S, vocab] may be overwritten."""
        history = TokenHistory(
            table.token_ids, choices.rows, choices.known, table.prompt_lens, table.min_new_tokens
        )
        if grammars is not None:
            grammars.restrict(torch.as_tensor(logits))
        choice = self._sample(logits, table.sampling, history, self._end_ids, self._watermark)
        unsound = choice.unsound()
        if grammars is not None:
            grammars.settle(choice)
        counts, reasons = self._judge(table, choices, choice.token_ids.tolist())
        request_ids = table.ids(choices.owners.tolist())
        errors: list[tuple[int, str]] = []
        failed = _reached(unsound, choices, counts) if unsound else ()
        for row in failed:
            reasons[row] = _ERROR
            errors.append((request_ids[row], _NO_SCORES))
        if grammars is not None:
            failures, driven = grammars.failures(), set(grammars.driven())
            for row, first in enumerate(choices.firsts.tolist()):
                if row in failed:
                    continue
                if first in failures:
                    reasons[row] = _ERROR
                    errors.append((request_ids[row], failures[first]))
                elif first in driven and reasons[row] == _EOS_TOKEN:
                    # A text that was ended early for want of tokens is no natural ending either.
                    reasons[row] = _LENGTH
        result = StepResult(request_ids, reasons, [], [], errors=errors)
        return _chosen(table, choices, choice, counts, result)

    def _judge(
        self, table: RowTable, choices: Choices, token_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Of each row [R], how many tokens count, up to the first that is not as guessed or ends
        the text, and the FinishReason of the last of them.

        Row by row: for as few as a step has, a dozen operations on arrays take longer.
        """
        owners, known = choices.owners, choices.known.tolist()
        guesses: Sequence[int] = ()
        if not choices.is_single:
            guesses = table.token_ids[choices.rows, choices.known].tolist()
        counts, reasons = [], []
        for first, end, longest, ignores_end in zip(
            choices.firsts.tolist(),
            choices.ends.tolist(),
            table.longest[owners].tolist(),
            table.ignore_eos[owners].tolist(),
            strict=True,
        ):
            for place in range(first, end):
                is_end = token_ids[place] in self._ends and not ignores_end
                if is_end or place == end - 1 or token_ids[place] != guesses[place]:
                    break
            counts.append(place + 1 - first)
            # Length wins over an end token that arrives with the last one allowed, as in TGI.
            is_last = known[place] + 1 >= longest
            reasons.append(_LENGTH if is_last else _EOS_TOKEN if is_end else _NONE)
        return counts, reasons


def _reached(unsound: frozenset[int], choices: Choices, counts: Sequence[int]) -> Sequence[int]:
    """Of the rows [R] that choose, those with a place among their first `counts` where nothing can
    be chosen. What stands behind a wrong guess is computed from it, and says nothing of a row."""
    places = zip(choices.firsts.tolist(), counts, strict=True)
    failed = [
        row
        for row, (first, count) in enumerate(places)
        if not unsound.isdisjoint(range(first, first + count))
    ]
    if failed:
        logger.warning(
            "%d of %d requests failed in this step: %s; the checkpoint is damaged, or its values "
            "are too large for this type: try --dtype float32, or download the model again",
            len(failed),
            len(counts),
            _NO_SCORES,
        )
    return failed


def _sampler(device: torch.device) -> Sampler:
    """What chooses tokens from scores on this device."""
    if device.type != "cpu":
        return sample
    from text_generation_shard.device.cpu import sampler as compiled_sampling

    return compiled_sampling.sample


def _chosen(
    table: RowTable,
    choices: Choices,
    choice: Choice,
    counts: list[int],
    result: StepResult,
) -> ChosenTokens:
    """Of the tokens of all places [S] those that count, written into the result."""
    rows, positions = choices.rows, choices.known
    token_ids, logprobs = choice.token_ids, choice.logprobs
    places: Sequence[int] = range(len(rows))
    if not choices.is_single:
        pairs = zip(choices.firsts.tolist(), counts, strict=True)
        places = [place for first, count in pairs for place in range(first, first + count)]
        rows, positions = rows[places], positions[places]
        token_ids, logprobs = token_ids[places], logprobs[places]
        if len(places) > len(counts):
            result.token_counts = counts
    result.token_ids, result.logprobs = token_ids.tolist(), logprobs.tolist()
    if table.top_n_tokens:
        _add_top_tokens(result, table, rows.tolist(), places, choice)
    owners = choices.owners.tolist()
    ended = [row for row, why in zip(owners, result.finish_reasons, strict=True) if why]
    return ChosenTokens(rows, positions, token_ids, counts, ended, result)


def _add_top_tokens(
    result: StepResult, table: RowTable, rows: Sequence[int], places: Sequence[int], choice: Choice
) -> None:
    if not any(row in table.top_n_tokens for row in rows):
        return
    for row, place in zip(rows, places, strict=True):
        count = table.top_n_tokens.get(row, 0)
        ids, logprobs = top_tokens(choice, place, count) if count else ([], [])
        result.top_token_counts.append(len(ids))
        result.top_token_ids += ids
        result.top_token_logprobs += logprobs
