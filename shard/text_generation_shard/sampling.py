"""From scores to tokens, for all choices of a step at once.

The order is TGI's: grammar mask, watermark, repetition penalty, frequency and presence penalty,
logit bias, early end tokens, temperature, min_p (vLLM's), top_k, top_p, typical_p, choice.
Frequency and presence penalties are OpenAI's: they consider the output only. Log-probabilities are
the log-softmax of the scores after all of that; with a grammar, among the tokens it allows.

A draw is a function of (seed, position) and the row's own scores, regardless of batch composition.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from text_generation_process.sampling import DRAWING, NUMBERS, PENALTIES, Sampling
from torch import Tensor

from text_generation_shard.arrays import (
    Array,
    Flags,
    Floats,
    Ints,
    Tokens,
    Upload,
    plain_upload,
)

SAMPLING_ROW = np.dtype(
    [
        *((name, np.float32) for name in NUMBERS),
        # uint64 seeds as the int64 of the same bits.
        ("seed", np.int64),
        ("is_sampling", np.bool_),
        ("is_penalising", np.bool_),
    ],
    align=True,
)
"""What kernels read of a row: the numbers of `Sampling`, of min_p its logarithm."""

# A smaller temperature or penalty could become 0 in float32, and the reciprocal of a larger penalty
# infinite. float32 holds integers up to 2^24 exactly; no vocabulary is larger.
_COLUMNS: dict[str, Callable[[float], float]] = {
    "temperature": lambda value: max(value, 1e-30),
    "top_k": lambda value: min(value, 1 << 24),
    "min_p": lambda value: math.log(value) if value > 0 else -math.inf,
    "repetition_penalty": lambda value: min(max(value, 1e-30), 1e30),
}


@dataclass(frozen=True, slots=True)
class Watermark:
    """The green share of the vocabulary (gamma), and the bias of green tokens (delta)."""

    gamma: float
    delta: float


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters of the choices of a step, on a device."""

    # [n] the choices that are drawn, and their numbers [n, DRAWING] float32 and seeds [n] int64.
    sampling_rows: Tensor
    drawn: Tensor
    seeds: Tensor
    # [m] the penalised choices, on the host, and their numbers [m, PENALTIES] float32.
    penalised_rows: Ints
    penalties: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Additions to the scores of a step, [b] each, on the host."""

    choices: Ints
    token_ids: Ints
    values: Floats


class SamplingTable:
    """Owns the sampling parameters of every row, on the host."""

    def __init__(self, capacity: int) -> None:
        self.rows: Array = np.zeros(capacity, dtype=SAMPLING_ROW)
        # By row, if it has any: token ids and what is added to their scores.
        self._biases: dict[int, tuple[Ints, Floats]] = {}
        self._watermarked: set[int] = set()
        # By row, if it has any: tokens that end its text beside the model's end tokens.
        self.stop_token_ids: dict[int, frozenset[int]] = {}
        # The last columns and their rows: most steps have the rows of the previous step.
        self._last: tuple[Ints, SamplingColumns] | None = None
        self._last_biases: tuple[Ints, bytes, Biases] | None = None

    def set(self, row: int, params: Sampling, stop_token_ids: Sequence[int] = ()) -> None:
        """Set the parameters and stop tokens of a row."""
        self._last = self._last_biases = None
        numbers = [_COLUMNS.get(name, float)(getattr(params, name)) for name in NUMBERS]
        seed = params.seed - 2**64 if params.seed >= 2**63 else params.seed
        self.rows[row] = (*numbers, seed, params.is_sampling, params.is_penalising)
        self._biases.pop(row, None)
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias, strict=True)
            self._biases[row] = np.array(token_ids), np.array(values, dtype=np.float32)
        self._watermarked.discard(row)
        if params.watermark:
            self._watermarked.add(row)
        self.stop_token_ids.pop(row, None)
        if stop_token_ids:
            self.stop_token_ids[row] = frozenset(stop_token_ids)

    def columns(self, rows: Ints, upload: Upload) -> SamplingColumns:
        """The columns of a step whose choices [S] belong to `rows`; a row may have several.

        `rows` must not be modified afterwards: results are cached by its identity.
        """
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, self._gather(rows, upload))
        return self._last[1]

    def _gather(self, rows: Ints, upload: Upload) -> SamplingColumns:
        own = self.rows[rows]
        sampling, penalised = own["is_sampling"].nonzero()[0], own["is_penalising"].nonzero()[0]
        drawn, penalties = _numbers(own[sampling], DRAWING), _numbers(own[penalised], PENALTIES)
        places, drawn_there, seeds, penalties_there = upload(
            [sampling, drawn, own["seed"][sampling], penalties]
        )
        return SamplingColumns(
            sampling_rows=places,
            drawn=drawn_there,
            seeds=seeds,
            penalised_rows=penalised,
            penalties=penalties_there,
        )

    def depends_on_tokens(self, rows: Ints) -> bool:
        """Whether the choice of one of these rows depends on its earlier tokens."""
        return bool(self.rows["is_penalising"][rows].any()) or bool(self.watermarked(rows))

    def watermarked(self, rows: Ints) -> Sequence[int]:
        """The watermarked choices of a step."""
        if not self._watermarked:
            return ()
        return [place for place, row in enumerate(rows.tolist()) if row in self._watermarked]

    def biases(self, rows: Ints, is_early: Flags) -> Biases:
        """The biases of a step's choices; see `columns`. Stop tokens get -inf where `is_early`
        [S]."""
        if not self._biases and not self.stop_token_ids:
            return _NO_BIASES
        early = is_early.tobytes() if self.stop_token_ids else b""
        last = self._last_biases
        if last is None or last[0] is not rows or last[1] != early:
            last = self._last_biases = (rows, early, self._biases_of(rows.tolist(), is_early))
        return last[2]

    def _biases_of(self, own: list[int], is_early: Flags) -> Biases:
        found = [(place, self._biases[row]) for place, row in enumerate(own) if row in self._biases]
        for place in np.flatnonzero(is_early).tolist():
            if stops := sorted(self.stop_token_ids.get(own[place], ())):
                found.append((place, (np.array(stops), np.full(len(stops), -np.inf, np.float32))))
        if not found:
            return _NO_BIASES
        places, kept = zip(*found, strict=True)
        token_ids, values = zip(*kept, strict=True)
        return Biases(
            np.repeat(places, [len(ids) for ids in token_ids]),
            np.concatenate(token_ids),
            np.concatenate(values),
        )


_NO_BIASES = Biases(
    np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
)


def _numbers(rows: Array, names: Sequence[str]) -> Floats:
    return np.stack([rows[name] for name in names], axis=1)


def keep_likely(scores: Tensor, columns: SamplingColumns) -> Tensor:
    """Scores [n, vocab] with -inf for tokens that can not be drawn. The best score must be 0.

    The reference, which sorts; `kernels.choice` computes the same without sorting.
    """
    nothing = float("-inf")
    vocab = scores.shape[1]
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    drawn = dict(zip(DRAWING, torch.split(columns.drawn, 1, dim=1), strict=True))
    ranked = ranked.masked_fill(ranked < drawn["min_p"], nothing)
    k = torch.where(drawn["top_k"] > 0, drawn["top_k"].long(), vocab).clamp(max=vocab)
    # Ties with the k-th best stay.
    ranked = ranked.masked_fill(ranked < ranked.gather(1, k - 1), nothing)
    probabilities = torch.softmax(ranked, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The smallest set that reaches top_p; it always contains the best token.
    is_out = before >= torch.where(drawn["top_p"] < 1.0, drawn["top_p"], 2.0)
    is_out[:, 0] = False
    ranked = ranked.masked_fill(is_out, nothing)
    kept = torch.full_like(scores, nothing).scatter_(1, order, ranked)
    return _keep_typical(kept, drawn["typical_p"])


def _keep_typical(scores: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep tokens whose surprisal is closest to the
    entropy."""
    logprobs = torch.log_softmax(scores, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    deviation, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
    reached = probabilities.gather(1, order).cumsum(dim=-1) < typical_p
    last = reached.sum(dim=-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    is_out = (deviation > deviation.gather(1, last)) & (typical_p < 1.0)
    return scores.masked_fill(torch.zeros_like(is_out).scatter_(1, order, is_out), float("-inf"))


# The prime TGI seeds green lists with (utils/watermark.py).
_WATERMARK_PRIME = 15485863


Scores = Tensor | Floats
"""[S, vocab] float32: on a device, or an array on the host."""


class TokenHistory(NamedTuple):
    """The tokens before each of the S choices of a step, on the host."""

    # [*, width] token ids of rows; undefined beyond the known tokens.
    token_ids: Tokens
    # [S] the row of each choice in token_ids.
    rows: Ints
    # [S] the number of known tokens, and the position of the token to choose.
    lens: Ints
    # [*] the prompt's tokens, and the least number of new tokens, of each row.
    prompt_lens: Ints
    min_new_tokens: Ints

    @property
    def is_early(self) -> Flags:
        """[S] Whether end tokens are still forbidden."""
        return self.lens - self.prompt_lens[self.rows] < self.min_new_tokens[self.rows]

    def previous(self, place: int) -> int:
        """The token before a choice."""
        return int(self.token_ids[self.rows[place], self.lens[place] - 1])


class Choice(NamedTuple):
    """The chosen tokens [S] and their log-probabilities [S], on the host, and their scores.

    Where nothing can be chosen, the log-probability is NaN and the token is arbitrary: if a score
    is NaN or +inf, or all are -inf.
    """

    token_ids: Ints
    logprobs: Floats
    scores: Scores
    # Rows whose token was set by their grammar.
    forced: frozenset[int] = frozenset()

    def unsound(self) -> frozenset[int]:
        """The rows where nothing can be chosen."""
        # With the few rows of a step, summing a list is faster than an array.
        if not math.isnan(sum(self.logprobs.tolist())):
            return frozenset()
        return frozenset(np.flatnonzero(np.isnan(self.logprobs)).tolist())

    def force(self, token_ids: Mapping[int, int]) -> "Choice":
        """Set these tokens, by row, with probability 1. The scores are not written: the next step
        may already use their memory."""
        rows = list(token_ids)
        self.token_ids[rows], self.logprobs[rows] = list(token_ids.values()), 0.0
        return self._replace(forced=frozenset(rows))


class Allowed(Protocol):
    """The grammar masks of a step."""

    # [C] the constrained choices among the S.
    places: Ints

    def masks(self) -> Tensor:
        """Wait for the masks [C, words] int32, on the host. Bit t % 32 of word t // 32: token t."""

    def restrict(self, logits: Tensor) -> None:
        """Write -inf into logits [S, vocab] for forbidden tokens."""


def sample(
    logits: Scores,
    table: SamplingTable,
    history: TokenHistory,
    end_ids: Ints,
    watermark: Watermark,
    allowed: Allowed | None = None,
) -> Choice:
    """Choose a token for each row of history from logits [S, vocab] float32, which are overwritten.
    `end_ids` and a row's stop tokens are forbidden where `history.is_early`.

    The reference in torch operators, against which the samplers of devices are tested.
    """
    logits = torch.as_tensor(logits)
    if allowed is not None:
        allowed.restrict(logits)
    columns = table.columns(history.rows, plain_upload(logits.device))
    for place in table.watermarked(history.rows):
        favour_green(logits[place], watermark, history.previous(place))
    if len(columns.penalised_rows):
        _penalise(logits, columns, history)
    is_early = history.is_early
    biases = table.biases(history.rows, is_early)
    if len(biases.choices):
        choices, token_ids, values = (
            torch.from_numpy(item).to(logits.device)
            for item in (biases.choices, biases.token_ids, biases.values)
        )
        logits.index_put_((choices, token_ids), values, accumulate=True)
    if is_early.any():
        early, ends = (
            torch.from_numpy(item).to(logits.device) for item in (is_early.nonzero()[0], end_ids)
        )
        logits[early[:, None], ends] = float("-inf")
    token_ids = best = logits.argmax(dim=-1)
    if len(columns.sampling_rows):
        scores = logits[columns.sampling_rows]
        # Relative to the best score, so that the smallest temperatures overflow to -inf, not NaN.
        temperature = columns.drawn[:, DRAWING.index("temperature"), None]
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
        logits[columns.sampling_rows] = scores = keep_likely(scores, columns)
        token_ids = best.clone()
        positions = torch.from_numpy(history.lens[columns.sampling_rows.cpu().numpy()])
        token_ids[columns.sampling_rows] = _draw(scores, uniform(columns.seeds, positions))
    scores = logits.log_softmax(dim=-1).gather(1, token_ids[:, None])
    return Choice(token_ids.cpu().numpy(), scores[:, 0].cpu().numpy(), logits)


Chosen = TypeVar("Chosen")
Sampler = Callable[[Scores, SamplingTable, TokenHistory, Ints, Watermark, Allowed | None], Chosen]
"""`sample`, or a device's version of it."""


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position), float64: splitmix64 (Steele et al. 2014)."""
    state = _mix(seeds.cpu()) + positions.cpu() * -0x61C8864680B583EB
    return ((_mix(state) >> 11) & (2**53 - 1)).double() / 2**53


def _mix(bits: Tensor) -> Tensor:
    # int64 products wrap like uint64 ones; right shifts must drop the copied sign bits.
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """The tokens at `numbers` [R] of the cumulative distributions of scores [R, vocab]."""
    cumulative = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = numbers.to(scores.device)[:, None] * total
    # Below the total even after rounding, so that a token of probability 0 is never drawn.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return drawn.clamp_(max=scores.shape[1] - 1)


def _penalise(logits: Tensor, columns: SamplingColumns, history: TokenHistory) -> None:
    own, device = columns.penalised_rows, logits.device
    lens, prompt_lens = history.lens[own][:, None], history.prompt_lens[history.rows[own]][:, None]
    places = np.arange(lens.max())
    is_in = places < lens, (places < lens) & (places >= prompt_lens)
    is_known, is_output = (torch.from_numpy(item).to(device, torch.float32) for item in is_in)
    known = history.token_ids[history.rows[own], : len(places)]
    token_ids, rows = (
        torch.from_numpy(known).to(device, torch.int64),
        torch.from_numpy(own).to(device),
    )
    scores = logits[rows]
    occurs = torch.zeros_like(scores).scatter_add_(1, token_ids, is_known) > 0
    counts = torch.zeros_like(scores).scatter_add_(1, token_ids, is_output)
    penalties = dict(zip(PENALTIES, torch.split(columns.penalties, 1, dim=1), strict=True))
    repetition, frequency = penalties["repetition_penalty"], penalties["frequency_penalty"]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(occurs, repeated, scores)
    scores -= frequency * counts + penalties["presence_penalty"] * (counts > 0)
    logits[rows] = scores


def favour_green(scores: Tensor, watermark: Watermark, previous: int) -> None:
    """Kirchenbauer et al. 2023: the previous token seeds which part of the vocabulary is green.

    As in TGI, it uses torch's generator of the device: a GPU's lists differ from a CPU's.
    """
    vocab, device = scores.shape[0], scores.device
    generator = torch.Generator(device).manual_seed(_WATERMARK_PRIME * previous)
    order = torch.randperm(vocab, generator=generator, device=device)
    scores[order[: int(vocab * watermark.gamma)]] += watermark.delta


def top_tokens(choice: Choice, row: int, count: int) -> tuple[list[int], list[float]]:
    """The `count` best tokens of a row and all ties with the last of them, best first.

    There may be fewer, as forbidden tokens are left out. Falls back to the host if the device is
    out of memory, as the step can not be computed again.
    """
    if row in choice.forced:
        return [int(choice.token_ids[row])], [0.0]
    scores = torch.as_tensor(choice.scores[row])
    try:
        return _best_tokens(scores, count)
    except torch.OutOfMemoryError:
        return _best_tokens(scores.cpu(), count)


def _best_tokens(scores: Tensor, count: int) -> tuple[list[int], list[float]]:
    least = scores.topk(min(count, scores.shape[0])).values[-1]
    candidates = ((scores >= least) & (scores > float("-inf"))).nonzero()[:, 0]
    values, order = scores[candidates].sort(descending=True, stable=True)
    return candidates[order].tolist(), (values - scores.logsumexp(dim=-1)).tolist()
