"""The self-check before serving: our attention gives the scores that transformers' own gives.

It finds what reading a configuration can not: masks and biases that are not passed to the
attention, layers that can not continue a text, and faults of ours.
"""

import logging

import torch
from torch import Tensor

from text_generation_shard.device.forward import ForwardBatch, RowState
from text_generation_shard.device.reference.device import Device
from text_generation_shard.errors import ModelError
from text_generation_shard.models.hugging_face.model import TransformersModel

logger = logging.getLogger(__name__)

# Tokens of the checked text; more if a window is not much longer, so that most tokens are behind
# it. Measured: every fault in shard/tests/models/test_self_check.py is found with these.
_TOKENS, _LONGEST, _SHORTEST = 48, 192, 8
# Largest error of a token's scores, in standard deviations of all scores, and of which share of the
# tokens: rounding can make the others choose another expert. In float32 (True) that is rare. With
# 16 bits, rounding makes errors of 0.02 to 0.22 in tiny random models, and faults above 0.4.
_LIMITS = {True: (1e-3, 0.9), False: (0.25, 0.5)}


@torch.inference_mode()
def check(model: TransformersModel, device: Device) -> None:
    """ModelError, if the scores of a random text in one pass, or in several, differ."""
    windows = [window for window in model.layers.windows if window]
    count = max([_TOKENS, *(3 * window for window in windows if 3 * window <= _LONGEST)])
    count = min(count, model.config.max_position)
    if count < _SHORTEST:
        raise ModelError(
            f"`max_position_embeddings` of {model.config.architecture} is {count}; expected at "
            f"least {_SHORTEST}"
        )
    here = device.torch_device
    ids = torch.randint(
        model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(0)
    )
    ids = ids.to(here)
    theirs = model.theirs(ids)
    size = model.attention.block_size
    num_blocks = -(-count // size)
    model.attention.allocate(model.cache_shape, num_blocks + device.num_spare_blocks)
    model.make_states(1, 0)
    # Blocks in reverse order, as a cache in use has them in any.
    table = torch.arange(num_blocks, device=here).flip(0)[None]

    def scores(start: int, end: int) -> Tensor:
        positions = torch.arange(start, end, device=here)
        batch = ForwardBatch(
            input_ids=ids[start:end],
            positions=positions,
            rope_lens=None,
            slots=table[0, positions // size] * size + positions % size,
            block_tables=table,
            context_lens=torch.tensor([end], device=here),
            cu_seqlens_q=(0, end - start),
            host_context_lens=(end,),
            logits_indices=None,
            is_decode=end == start + 1,
            states=(RowState(0, is_first=start == 0),) if model.state_bytes else None,
        )
        return model.logits(model.forward(batch))

    ends = [count // 3, count // 2, count // 2 + 1, count // 2 + 2, count]
    parts = [scores(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    scale = theirs.std().clamp(min=1e-6)
    limit, share = _LIMITS[device.dtype is torch.float32]
    errors = [
        float(((found - theirs).abs().amax(dim=1) / scale).quantile(share))
        for found in (scores(0, count), torch.cat(parts))
    ]
    whole, cut = errors
    name = model.config.architecture
    logger.info("self-check of %s: errors of %.1e in one pass, %.1e in several", name, whole, cut)
    if not max(errors) <= limit:
        raise ModelError(
            f"{name} can not be served: its scores differ from those of transformers by "
            f"{whole:.1e} of their deviation in one pass and by {cut:.1e} in several; "
            f"{limit:.1e} is allowed"
        )
