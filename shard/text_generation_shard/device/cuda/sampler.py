"""`sampling.sample` by our Triton kernels."""

import torch
import triton
from torch import Tensor

from text_generation_shard.arrays import Ints, Upload
from text_generation_shard.device.cuda.kernels import choice, launch
from text_generation_shard.sampling import (
    Allowed,
    SamplingColumns,
    SamplingTable,
    Scores,
    TokenHistory,
    Watermark,
    favour_green,
)

# Scores and biases per program.
_TILE, _BIASES = 1024, 128
# `choice.summarise`: scores per program. `choice.draw`: scores per tile, scores per tile of a
# search, and capacity for scores near the best one.
_PART = 8192
_DRAW_TILE, _FEW, _CAPACITY = 2048, 1024, 1 << 15


def begin(
    upload: Upload,
    logits: Scores,
    table: SamplingTable,
    history: TokenHistory,
    end_ids: Ints,
    watermark: Watermark,
    allowed: Allowed | None,
) -> Tensor:
    """Enqueue `sampling.sample` without waiting. Returns [3, S] float64: tokens, their
    log-probabilities, and the best scores. The choice in a row is bit for bit independent of the
    other rows."""
    own = torch.as_tensor(logits)
    assert own.dtype == torch.float32
    vocab = own.shape[1]
    columns = table.columns(history.rows, upload)
    if allowed is not None:
        places, masks = upload([allowed.places, allowed.masks().numpy()])
        launch(
            choice.keep_allowed,
            (len(masks), -(-vocab // _TILE)),
            (own, places, masks, masks.shape[1], vocab),
            TILE=_TILE,
        )
    for place in table.watermarked(history.rows):
        favour_green(own[place], watermark, history.previous(place))
    if len(columns.penalised_rows):
        _penalise(upload, own, columns, history)
    is_early = history.is_early
    biases = table.biases(history.rows, is_early)
    if len(biases.choices):
        given = upload([biases.choices, biases.token_ids, biases.values])
        count = len(biases.values)
        launch(
            choice.add_biases,
            (-(-count // _BIASES),),
            (own, *given, count, vocab),
            TILE=_BIASES,
        )
    if is_early.any():
        rows, token_ids = upload([is_early.nonzero()[0], end_ids])
        launch(choice.forbid, (len(rows),), (own, rows, token_ids, len(end_ids), vocab), TILE=16)
    lens = upload([history.lens])[0] if len(columns.sampling_rows) else None
    return choose(own, columns, lens)


def _penalise(upload: Upload, own: Tensor, columns: SamplingColumns, history: TokenHistory) -> None:
    rows, vocab = columns.penalised_rows, own.shape[1]
    own_rows, own_lens = history.rows[rows], history.lens[rows]
    places, known, lens, prompt_lens = upload(
        [
            rows,
            history.token_ids[own_rows, : int(own_lens.max())],
            own_lens,
            history.prompt_lens[own_rows],
        ]
    )
    counts = torch.zeros(len(rows), vocab, dtype=torch.int32, device=own.device)
    launch(
        choice.count_tokens,
        (len(rows), -(-known.shape[1] // _TILE)),
        (counts, known, lens, prompt_lens, known.shape[1], vocab),
        TILE=_TILE,
    )
    launch(
        choice.penalise,
        (len(rows), -(-vocab // _TILE)),
        (own, places, counts, columns.penalties, vocab),
        TILE=_TILE,
    )


def choose(own: Tensor, columns: SamplingColumns, lens: Tensor | None) -> Tensor:
    """The last part of `begin`: find the best tokens, and draw. lens [S] int64, on the device: see
    TokenHistory; None if nothing is drawn."""
    num_rows, vocab = own.shape
    num_parts = -(-vocab // _PART)
    best = own.new_empty(num_rows, num_parts)
    index, total = torch.empty_like(best, dtype=torch.int32), torch.empty_like(best)
    out = own.new_empty(3, num_rows, dtype=torch.float64)
    tile = min(_TILE, triton.next_power_of_2(vocab))
    launch(
        choice.summarise,
        (num_rows, num_parts),
        (own, best, index, total, vocab, num_parts),
        PART=_PART,
        TILE=tile,
    )
    launch(
        choice.take_best,
        (num_rows,),
        (best, index, total, out, num_rows, vocab, num_parts),
        PARTS_PAD=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    count = len(columns.sampling_rows)
    if count:
        tile = min(_DRAW_TILE, triton.next_power_of_2(vocab))
        launch(
            choice.draw,
            (count,),
            (
                own,
                columns.sampling_rows,
                columns.drawn,
                columns.seeds,
                lens,
                own.new_empty(count, _CAPACITY, dtype=torch.int32),
                out,
                num_rows,
                vocab,
            ),
            CAPACITY=_CAPACITY,
            TILE=tile,
            FEW=min(_FEW, tile),
            # Never more threads than scores, which are changed in place: see
            # `operators._num_warps`.
            num_warps=max(1, min(8, tile // 32)),
        )
    return out
