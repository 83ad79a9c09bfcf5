"""`sampling.sample` on a GPU, by our own Triton kernels."""

import numpy as np
import torch
import triton
from torch import Tensor

from text_generation_shard.arrays import Floats, Ints, Tokens
from text_generation_shard.device.cuda.kernels import choice, launch, scores
from text_generation_shard.sampling.sampler import (
    Allowed,
    Choice,
    Scores,
    TokenHistory,
    favour_green,
)
from text_generation_shard.sampling.table import SamplingColumns, SamplingTable, Watermark

# Scores that one program of a kernel over all of them takes.
_TILE = 1024
# Of `choice.summarise`: scores of a program; of `choice.draw`: those looked at together, in a
# search, and how many near the best one are remembered.
_PART = 8192
_DRAW_TILE, _FEW, _CAPACITY = 2048, 1024, 1 << 15


def sample(
    logits: Scores,
    table: SamplingTable,
    history: TokenHistory,
    end_ids: Ints,
    watermark: Watermark,
    allowed: Allowed | None = None,
) -> Choice:
    """See `sampling.sample`. What is chosen in a row depends on that row alone, bit for bit."""
    own = torch.as_tensor(logits)
    found = begin(own, table, history, end_ids, watermark, allowed).cpu().numpy()
    return Choice(found[0].astype(np.int64), found[1].astype(np.float32), own)


def begin(
    own: Tensor,
    table: SamplingTable,
    history: TokenHistory,
    end_ids: Ints,
    watermark: Watermark,
    allowed: Allowed | None,
) -> Tensor:
    """Give the device all that `sample` does to the scores `own`, and wait for none of it. Answers
    [3, S] float64: the tokens, their log-probabilities, and the best scores."""
    assert own.dtype == torch.float32 and own.is_contiguous()
    columns = table.columns(history.rows, own.device)
    if allowed is not None:
        _restrict(own, allowed)
    for place in table.watermarked(history.rows):
        favour_green(own[place], watermark, history.previous(place))
    if len(columns.penalised_rows):
        _penalise(own, columns, history)
    biases = table.biases(history.rows)
    if len(biases.choices):
        _add_biases(own, biases.choices, biases.token_ids, biases.values)
    if (is_early := history.is_early).any():
        _forbid(own, is_early.nonzero()[0], end_ids)
    return choose(own, columns, _sent(history.lens, own, torch.int64))


def _sent(values: Ints | Floats | Tokens, like: Tensor, dtype: torch.dtype) -> Tensor:
    """On the device of `like`."""
    return torch.from_numpy(values).to(dtype).to(like.device)


def _restrict(own: Tensor, allowed: Allowed) -> None:
    masks = allowed.masks().to(own.device)
    launch(
        scores.keep_allowed,
        (len(masks), -(-own.shape[1] // _TILE)),
        *(own, _sent(allowed.places, own, torch.int32), masks, masks.shape[1], own.shape[1]),
        TILE=_TILE,
    )


def _penalise(own: Tensor, columns: SamplingColumns, history: TokenHistory) -> None:
    places, vocab = columns.penalised_rows, own.shape[1]
    lens, prompt_lens = history.lens[places], history.prompt_lens[history.rows[places]]
    known = _sent(history.token_ids[history.rows[places], : int(lens.max())], own, torch.int32)
    counts = torch.zeros(len(places), vocab, dtype=torch.int32, device=own.device)
    launch(
        scores.count_tokens,
        (len(places), -(-known.shape[1] // _TILE)),
        *(counts, known, _sent(lens, own, torch.int32), _sent(prompt_lens, own, torch.int32)),
        *(known.shape[1], vocab),
        TILE=_TILE,
    )
    launch(
        scores.penalise,
        (len(places), -(-vocab // _TILE)),
        *(own, _sent(places, own, torch.int32), counts, columns.penalties, vocab),
        TILE=_TILE,
    )


def _add_biases(own: Tensor, places: Ints, token_ids: Ints, values: Floats) -> None:
    tile = min(_TILE, triton.next_power_of_2(len(places)))
    launch(
        scores.add_biases,
        (-(-len(places) // tile),),
        *(own, _sent(places, own, torch.int32), _sent(token_ids, own, torch.int32)),
        *(_sent(values, own, torch.float32), len(places), own.shape[1]),
        TILE=tile,
    )


def _forbid(own: Tensor, places: Ints, token_ids: Ints) -> None:
    launch(
        scores.forbid,
        (len(places),),
        *(own, _sent(places, own, torch.int32), _sent(token_ids, own, torch.int32)),
        *(len(token_ids), own.shape[1]),
        TILE=16,
    )


def choose(own: Tensor, columns: SamplingColumns, lens: Tensor) -> Tensor:
    """The last part of `begin`: what is best, and what is drawn. lens [S] int64, on the device: see
    TokenHistory."""
    num_rows, vocab = own.shape
    num_parts = -(-vocab // _PART)
    best = own.new_empty(num_rows, num_parts)
    index, total = torch.empty_like(best, dtype=torch.int32), torch.empty_like(best)
    out = own.new_empty(3, num_rows, dtype=torch.float64)
    tile = min(_TILE, triton.next_power_of_2(vocab))
    launch(
        choice.summarise,
        (num_rows, num_parts),
        *(own, best, index, total, vocab, num_parts),
        PART=_PART,
        TILE=tile,
    )
    launch(
        choice.take_best,
        (num_rows,),
        *(best, index, total, out, num_rows, vocab, num_parts),
        PARTS_PAD=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    count = len(columns.sampling_rows)
    if count:
        tile = min(_DRAW_TILE, triton.next_power_of_2(vocab))
        launch(
            choice.draw,
            (count,),
            *(own, columns.sampling_rows, columns.drawn, columns.seeds, lens),
            own.new_empty(count, _CAPACITY, dtype=torch.int32),
            *(out, num_rows, vocab),
            CAPACITY=_CAPACITY,
            TILE=tile,
            FEW=min(_FEW, tile),
            num_warps=8,
        )
    return out
