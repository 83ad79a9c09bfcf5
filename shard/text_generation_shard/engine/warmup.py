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
# Steps of each kind that are measured; the fastest counts. A device that records steps does so when
# it has computed a few of a kind: only those behind are as fast as in service.
_TRIES, _TRIES_RECORDED = 2, 6
# Alternatives of a token, as many as a router asks for by default.
_TOP_TOKENS = 5
# Every way to choose a token.
_EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    typical_p=0.9,
    min_p=0.01,
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


class LargestStep(NamedTuple):
    """A step as large as there can be: inputs of `num_tokens` in all, each at the end of its
    context, beside rows that decode at the end of theirs."""

    num_rows: int
    # Of these, the rows with inputs.
    num_prompts: int
    num_tokens: int
    # Tokens of each row.
    context: int


class Steps(Protocol):
    """The part of the engine whose steps are measured. Nothing else may run meanwhile."""

    @property
    def records_steps(self) -> bool:
        """See Engine."""

    @property
    def block_size(self) -> int:
        """See Engine."""

    def step(self, step: StepInput) -> StepOutput:
        """See Engine."""

    def clear(self) -> None:
        """See Engine."""


class Result(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """See StepHandle."""


class Launches(Steps, Protocol):
    """The part of the engine that is rehearsed with. Nothing else may run meanwhile."""

    def launch(self, step: StepInput) -> Result:
        """See Engine."""


def largest_steps(
    num_rows: int, num_tokens: int, longest: int, heaviest_keys: int | None
) -> list[LargestStep]:
    """Those of which one takes the most memory: with all contexts as long as can be; and, where
    attention takes most for `heaviest_keys` of prompts, with as many of these as can be."""
    least = min(num_rows, -(-num_tokens // max(1, longest - 2)))
    found = [LargestStep(num_rows, least, num_tokens, longest)]
    if heaviest_keys is not None:
        num_prompts = min(num_rows, max(least, -(-heaviest_keys // longest)))
        context = max(2, min(longest, heaviest_keys // num_prompts))
        found.append(LargestStep(num_rows, num_prompts, num_tokens, context))
    return [step for index, step in enumerate(found) if step not in found[:index]]


def rehearse(engine: Launches, largest: LargestStep) -> None:
    """Three steps, each behind the other where a device allows it: rows decode; the largest step;
    all decode. Every choice is made with everything, and each prompt has log-probabilities.

    All rows share the first block: what they compute means nothing. Grammars are not rehearsed:
    their masks are gone when penalties take 32 times their memory.
    """
    num_rows, num_prompts, num_tokens, context = largest
    share, more = divmod(num_tokens, num_prompts)
    prompts = _demanding(engine, [share + (n < more) for n in range(num_prompts)], context, 2)
    others = _demanding(engine, [1] * (num_rows - num_prompts), context, 3)
    others = [replace(item, id=num_prompts + item.id, prefill_logprobs=False) for item in others]
    handles = []
    if others:
        handles.append(engine.launch(StepInput(others, runs_on=False)))
    handles.append(engine.launch(StepInput(prompts, runs_on=bool(others))))
    if context > 2:
        handles.append(engine.launch(StepInput()))
    for handle in handles:
        handle.result()
    engine.clear()


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
    tries = _TRIES_RECORDED if engine.records_steps else _TRIES
    context = max(1, min(_CONTEXT, max_total - 1 - tries))
    new = min(1 + tries, max_total - context)
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


def _demanding(
    engine: Steps, counts: Sequence[int], context: int, most_new: int
) -> list[NewRequest]:
    """Requests of which `counts` tokens are to be computed, before up to `most_new` new ones that
    make them a whole context."""
    new = min(most_new, context - 1)
    # Shared by all: there may be many, and long ones.
    ids, blocks = [0] * (context - new), [0] * -(-context // engine.block_size)
    first = NewRequest(
        *(0, ids, len(ids), 0, blocks, _EVERYTHING, new),
        min_new_tokens=new,
        ignore_eos_token=True,
        prefill_logprobs=True,
        top_n_tokens=_TOP_TOKENS,
    )
    return [
        replace(first, id=number, num_cached_tokens=max(0, len(ids) - count))
        for number, count in enumerate(counts)
    ]


def _request(engine: Steps, number: int, known: int, cached: int, new: int) -> NewRequest:
    blocks = range(-(-(known + new) // engine.block_size))
    ids = [0] * known
    return NewRequest(
        number, ids, known, cached, blocks, SamplingParams(), new, ignore_eos_token=True
    )
