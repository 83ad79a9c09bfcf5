"""`sampling.sample` on the CPU, by one compiled kernel."""

import numpy as np
import torch

from text_generation_shard.arrays import Ints
from text_generation_shard.device.cpu.kernels.choice import Choices, choose
from text_generation_shard.sampling.sampler import (
    Allowed,
    Choice,
    Scores,
    TokenHistory,
    favour_green,
)
from text_generation_shard.sampling.table import SamplingTable, Watermark

_NO_MASKS = np.empty((0, 0), np.int32)


def sample(
    logits: Scores,
    table: SamplingTable,
    history: TokenHistory,
    end_ids: Ints,
    watermark: Watermark,
    allowed: Allowed | None = None,
) -> Choice:
    """See `sampling.sample`. The choice in a row is bit for bit independent of the other rows."""
    masks, mask_of = _NO_MASKS, np.full(len(history.rows), -1)
    if allowed is not None:
        masks = allowed.masks().numpy()
        assert len(masks) == len(allowed.places), "masks of another step"
        mask_of[allowed.places] = np.arange(len(masks))
    for place in table.watermarked(history.rows):
        favour_green(torch.as_tensor(logits[place]), watermark, history.previous(place))
    biases, count = table.biases(history.rows, history.is_early), len(history.rows)
    token_ids, logprobs = np.empty(count, np.int64), np.empty(count, np.float32)
    choices = Choices(
        scores=logits if isinstance(logits, np.ndarray) else logits.numpy(),
        rows=history.rows,
        lens=history.lens,
        token_ids=history.token_ids,
        prompt_lens=history.prompt_lens,
        min_new_tokens=history.min_new_tokens,
        flags=table.flags,
        values=table.values,
        seeds=table.seeds,
        biased=biases.choices,
        bias_ids=biases.token_ids,
        biases=biases.values,
        end_ids=end_ids,
        masks=masks,
        mask_of=mask_of,
        chosen_ids=token_ids,
        logprobs=logprobs,
    )
    choose(choices)
    # An exception in a kernel's thread would be lost.
    assert min(token_ids.tolist()) >= 0, "the kernel has chosen nothing"
    return Choice(token_ids, logprobs, logits)
