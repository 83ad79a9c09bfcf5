"""From the scores of a step to its tokens: sampled, verified, settled and judged as endings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_shard.columns import Watermark
from text_generation_shard.grammar import ConstrainedRow, GrammarMasks, StepGrammars
from text_generation_shard.ragged import Choices, repeated
from text_generation_shard.rows import RowTable
from text_generation_shard.sampling import Choice, TokenHistory, sample, top_tokens
from text_generation_shard.step import FinishReason, StepResult


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """What came of a step's choices. Nothing of it is in the row table yet."""

    # [S] whether what was chosen at a place counts: guesses before it were right, none ended.
    is_taken: Tensor
    token_ids: Tensor
    # [R] of each row: how many tokens, how many are known with them, and the FinishReason.
    counts: Tensor
    known: Tensor
    reasons: Tensor
    result: StepResult


class Chooser:
    """Chooses the tokens of a step. Owns nothing of a request; reads the row table."""

    def __init__(
        self, vocab_size: int, eos_ids: Sequence[int], watermark: Watermark, device: torch.device
    ) -> None:
        self._masks = GrammarMasks(vocab_size, device)
        self._eos = torch.tensor(eos_ids, dtype=torch.int64)
        self._watermark = watermark
        self._device = device

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
        self, table: RowTable, choices: Choices, logits: Tensor, grammars: StepGrammars | None
    ) -> ChosenTokens:
        """Choose at every place as if it were the only one, then see how far the guesses, which
        the table holds behind what is known, were right. logits [S, vocab] may be overwritten."""
        rows, known = choices.rows, choices.known
        prompt_lens = table.prompt_lens[rows]
        generated = known - prompt_lens
        history = TokenHistory(table.token_ids, rows, known, prompt_lens)
        if grammars is not None:
            grammars.restrict(logits)
        choice = sample(
            logits,
            table.sampling.columns(rows),
            history,
            self._forbidden(generated < table.min_new_tokens[rows]),
            self._watermark,
        )
        token_ids = choice.token_ids.cpu()
        if grammars is not None:
            grammars.settle(choice, token_ids)
        is_eos = torch.isin(token_ids, self._eos) & ~table.ignore_eos[rows]
        lasts = choices.firsts
        if not choices.is_single:
            is_wrong = (token_ids != table.token_ids[rows, known]) | is_eos
            lasts = _first_in_each(is_wrong, choices)
        reasons = torch.where(is_eos[lasts], int(FinishReason.EOS_TOKEN), int(FinishReason.NONE))
        # Length wins over an end token that arrives with the last one allowed, as in TGI.
        is_last = generated[lasts] + 1 >= table.max_new_tokens[choices.owners]
        failures: dict[int, str] = {}
        if grammars is not None:
            failures = grammars.failures()
            # A text that was ended early for want of tokens is no natural ending either.
            is_driven = torch.isin(choices.firsts, torch.tensor(grammars.driven()))
            is_last |= is_eos[lasts] & is_driven
        reasons[is_last] = int(FinishReason.LENGTH)
        reasons[torch.isin(choices.firsts, torch.tensor(list(failures)))] = int(FinishReason.ERROR)
        return self._chosen(table, choices, choice, token_ids, lasts, reasons, failures)

    def _chosen(
        self,
        table: RowTable,
        choices: Choices,
        choice: Choice,
        token_ids: Tensor,
        lasts: Tensor,
        reasons: Tensor,
        failures: dict[int, str],
    ) -> ChosenTokens:
        counts = lasts - choices.firsts + 1
        logprobs = choice.logprobs.cpu()
        if choices.is_single:
            is_taken = torch.ones_like(choices.rows, dtype=torch.bool)
        else:
            widths = choices.ends - choices.firsts
            is_taken = torch.arange(len(choices.rows)) <= repeated(lasts, widths)
            token_ids, logprobs = token_ids[is_taken], logprobs[is_taken]
        request_ids = table.ids(choices.owners.tolist())
        by_first = dict(zip(choices.firsts.tolist(), request_ids, strict=True))
        result = StepResult(
            request_ids=request_ids,
            finish_reasons=reasons.tolist(),
            token_ids=token_ids.tolist(),
            logprobs=logprobs.tolist(),
            token_counts=[] if len(token_ids) == len(request_ids) else counts.tolist(),
            errors=[(by_first[first], sentence) for first, sentence in failures.items()],
        )
        _add_top_tokens(result, table, choices.rows, is_taken, choice)
        return ChosenTokens(is_taken, token_ids, counts, choices.known[lasts] + 1, reasons, result)

    def _forbidden(self, is_early: Tensor) -> Tensor | None:
        """(place, end token) pairs of the places where a text must not end yet."""
        early = is_early.nonzero()[:, 0]
        if not len(early) or not len(self._eos):
            return None
        return torch.cartesian_prod(early, self._eos).to(self._device)


def _first_in_each(flags: Tensor, choices: Choices) -> Tensor:
    """The first flagged place of each row, or its last place: [R]."""
    flags = flags.clone()
    flags[choices.ends - 1] = True
    places = flags.nonzero()[:, 0]
    # Every row has one, so that the first not before its first place is its own.
    return places[torch.searchsorted(places, choices.firsts)]


def _add_top_tokens(
    result: StepResult, table: RowTable, rows: Tensor, is_taken: Tensor, choice: Choice
) -> None:
    wanted = table.top_n_tokens[rows]
    if not bool(wanted.any()):
        return
    for place in is_taken.nonzero()[:, 0].tolist():
        count = int(wanted[place])
        ids, logprobs = top_tokens(choice, place, count) if count else ([], [])
        result.top_token_counts.append(len(ids))
        result.top_token_ids += ids
        result.top_token_logprobs += logprobs
