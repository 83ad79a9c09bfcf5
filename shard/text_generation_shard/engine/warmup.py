"""The first passes of a shard: they warm its kernels, and tell what steps cost."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from text_generation_shard.engine.step import NewRequest, StepInput, StepOutput
from text_generation_shard.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

# Rows of the full batch whose step is measured, tokens that they know, and of a prompt.
_MOST_ROWS = 32
_CONTEXT = 128
_PROMPT = 64
# Tokens in front of a part of a prompt, and for how many of these it is told what they cost.
_FRONT = 2048
_CONTEXT_UNIT = 1024
# Steps of each kind that are measured; the fastest counts.
_TRIES = 2


# Every way to choose a token.
_EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    typical_p=0.9,
    do_sample=True,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    watermark=True,
    logit_bias=((0, 1.0),),
)


class Costs(NamedTuple):
    """What steps take, in nanoseconds: of one row, of a full batch, of each token more, and of
    each for every 1024 tokens in front of it."""

    single_ns: int
    full_ns: int
    token_ns: int
    context_ns: int


class Steps(Protocol):
    """The part of the engine that is rehearsed with. Nothing else may run meanwhile."""

    @property
    def block_size(self) -> int:
        """See Engine."""

    def step(self, step: StepInput) -> StepOutput:
        """See Engine."""

    def clear(self) -> None:
        """See Engine."""


def rehearse(engine: Steps, num_tokens: int, max_total: int) -> None:
    """One prompt of `num_tokens` and, if there is room, one step more, in the first blocks."""
    _steps(engine, [_request(engine, 0, num_tokens, 0, min(2, max_total - num_tokens))])


def measure(engine: Steps, max_prefill_tokens: int, max_rows: int, max_total: int) -> Costs:
    """Run each kind of step once to warm it, then to measure it.

    All rows share the first blocks: what they compute means nothing.
    """
    length = max(1, min(_PROMPT, max_prefill_tokens, max_total - 1 - _TRIES))
    new = min(1 + _TRIES, max_total - length)
    request = _request(engine, 0, length, 0, new)
    _steps(engine, [request])
    # What is compiled at its first use must not be compiled while somebody waits.
    _steps(engine, [replace(request, sampling=_EVERYTHING, min_new_tokens=1)])
    prompt, others = _fastest(engine, _request(engine, 0, length, 0, new))
    single = others or prompt
    token = max(1, (prompt - single) // max(1, length - 1))
    in_front = _time_in_front(engine, length, max_total, prompt)
    context = max(1, min(_CONTEXT, max_total - 1 - _TRIES))
    new = min(1 + _TRIES, max_total - context)
    rows = min(max_rows, _MOST_ROWS)
    first, others = _steps(
        engine, [_request(engine, row, context, context - 1, new) for row in range(rows)]
    )
    full = others or first
    # Of a prompt of one or two tokens the difference is noise: a token costs at most a step.
    costs = Costs(single, full, min(token, full), in_front)
    logger.info(
        "a step of one request takes %.2f ms, of %d %.2f ms, a prompt token adds %.3f ms, and %.3f "
        "ms for %d tokens in front of it",
        costs.single_ns / 1e6,
        rows,
        costs.full_ns / 1e6,
        costs.token_ns / 1e6,
        costs.context_ns / 1e6,
        _CONTEXT_UNIT,
    )
    return costs


def _time_in_front(engine: Steps, length: int, max_total: int, prompt_ns: int) -> int:
    """What _CONTEXT_UNIT tokens in front of a prompt of `length` tokens add to each of these; alone
    it takes `prompt_ns`."""
    front = min(_FRONT, max_total - length)
    if front < length:
        return 0  # the difference would be noise
    request = _request(engine, 0, front + length, front, 0)
    _steps(engine, [request])
    behind_ns, _ = _fastest(engine, request)
    return max(0, behind_ns - prompt_ns) * _CONTEXT_UNIT // (front * length)


def _fastest(engine: Steps, request: NewRequest) -> tuple[int, int]:
    """The better of `_steps`, tried several times."""
    first, others = zip(*(_steps(engine, [request]) for _ in range(_TRIES)), strict=True)
    return min(first), min(others)


def _steps(engine: Steps, requests: Sequence[NewRequest]) -> tuple[int, int]:
    """Time of the first step of these requests, and of the fastest of the others; 0: there is
    none."""
    last = first = engine.step(StepInput(requests))
    others: list[int] = []
    # Rows end early where a damaged checkpoint gives them no scores.
    while last.running_ids and len(others) < requests[0].max_new_tokens - 1:
        last = engine.step(StepInput())
        others.append(last.total_ns)
    engine.clear()
    return first.total_ns, min(others, default=0)


def _request(engine: Steps, number: int, known: int, cached: int, new: int) -> NewRequest:
    blocks = range(-(-(known + new) // engine.block_size))
    ids = [0] * known
    return NewRequest(
        number, ids, known, cached, blocks, SamplingParams(), new, ignore_eos_token=True
    )
