"""Checks that an engine with CUDA graphs and one without give the same tokens."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_caller import Answer, Caller, NewRequest
from gpu_engine import Sizes, grammars_of, load, models_of, write_files
from gpu_timing import Bench, Figures
from text_generation_process.sampling import Sampling
from text_generation_proto import pb
from text_generation_shard.engine.warmup import warm_up
from text_generation_shard.grammars.grammar import Grammar

# Sizes of the recorded steps; other numbers of rows are padded.
_GRAPHS = (1, 2, 4, 8)
# Tolerances of log-probabilities, and of the difference between two tokens of which either may win.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
_GREEDY = Sampling()
SAMPLINGS = (
    _GREEDY,
    Sampling(do_sample=True, temperature=0.9, seed=1),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.4),
    Sampling(do_sample=True, temperature=1.1, top_k=50, top_p=0.9, seed=2),
    Sampling(presence_penalty=0.5, logit_bias=((7, 2.0), (9, -3.0))),
    Sampling(do_sample=True, typical_p=0.9, watermark=True, seed=3),
)


class Case(NamedTuple):
    """Requests, by the step in which they arrive."""

    name: str
    turns: Sequence[Sequence[NewRequest]]


@dataclass(slots=True)
class Replays:
    """The number of graph launches."""

    count: int = 0


@contextmanager
def counted_replays(bench: Bench) -> Iterator[Replays]:
    """Counts the launches of all CUDA graphs created from now on, or of their dry-run stand-ins."""
    kind: Any = torch.cuda.CUDAGraph
    if bench.is_dry:
        kind = import_module("shard.tests.stream_device").Recording
    seen, replay = Replays(), kind.replay

    def counted(graph: Any) -> None:
        seen.count += 1
        replay(graph)

    with mock.patch.object(kind, "replay", counted):
        yield seen


def tokens(bench: Bench) -> None:
    """Both in float32 and in bfloat16."""
    sizes = models_of(bench)[-1]
    with tempfile.TemporaryDirectory() as folder:
        write_files(sizes, Path(folder))
        for dtype in _TOLERANCES:
            _compare(bench, sizes, Path(folder), dtype)
            bench.release()


class Run(NamedTuple):
    """The results of one engine for a case."""

    answers: dict[int, Answer]
    # Requests with greedy decoding and no penalties.
    greedy: set[int]
    num_steps: int
    num_replays: int


def _compare(bench: Bench, sizes: Sizes, folder: Path, dtype: str) -> None:
    both: list[dict[str, Run] | None] = []
    for graphs in ((), _GRAPHS):
        kind = "graphs" if graphs else "eager"
        work = partial(_answers, bench, sizes, folder, dtype, graphs)
        both.append(bench.prepare(f"{dtype}, {kind}", work))
        bench.release()
    eager, recorded = both
    if eager is None or recorded is None:
        return
    for name, run in eager.items():
        figures = partial(compared, run, recorded[name], dtype)
        bench.measure(f"{dtype}, {name}", figures, is_own=True)


def _answers(
    bench: Bench, sizes: Sizes, folder: Path, dtype: str, graphs: Sequence[int]
) -> dict[str, Run]:
    """Of one engine, by the name of the case."""
    with counted_replays(bench) as replays:
        engine = load(bench, sizes, folder, graphs, dtype)
        size, rows, length = engine.block_size, 2 * max(_GRAPHS), bench.size(512, 64)
        num_blocks = rows * -(-length // size)
        limits = pb.WarmupRequest(
            max_prefill_tokens=bench.size(1024, 64),
            max_batch_size=rows,
            max_total_tokens=length,
            max_batch_total_tokens=num_blocks * size,
        )
        warm_up(engine, limits)
        found = {}
        for case in _cases(bench, grammars_of(engine, folder)):
            caller = Caller(engine, num_blocks, rows, limits.max_prefill_tokens)
            before = replays.count
            for turn in case.turns:
                for request in turn:
                    caller.ask(request)
                caller.advance()
            caller.run()
            asked = [request for turn in case.turns for request in turn]
            greedy = {request.id for request in asked if request.sampling == _GREEDY}
            counts = caller.num_steps, replays.count - before
            found[case.name] = Run(caller.answers, greedy, *counts)
    return found


def _cases(bench: Bench, grammars: dict[str, Grammar]) -> Iterator[Case]:
    new = bench.size(48, 4)

    def request(number: int, sampling: Sampling, **options: Any) -> NewRequest:
        length = 3 + (number * 37) % bench.size(200, 20)
        ids = [1 + (number * 101 + at * 7) % 300 for at in range(length)]
        asked = {"max_new_tokens": new, **options}
        return NewRequest(number, ids, (), sampling, num_prompt_tokens=length, **asked)

    every_way = [
        request(number, sampling, max_new_tokens=new // 2 + number)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    yield Case("chosen in every way", [every_way[:2], [], every_way[2:5], [], every_way[5:]])
    guided = [
        request(number, SAMPLINGS[number % 2], grammar=grammar, max_new_tokens=24)
        for number, grammar in enumerate(grammars.values())
    ]
    yield Case("grammars", [[*guided, request(9, _GREEDY)]])
    for rows in bench.sizes(_GRAPHS, (2,)):
        yield Case(f"rows: {rows}", [[request(row, _GREEDY) for row in range(rows)]])


def compared(eager: Run, recorded: Run, dtype: str) -> Figures:
    """Compares the answers; `broken` says what is wrong.

    Up to the first token that differs, log-probabilities may differ by rounding. That token is
    accepted in greedy decoding if both tokens are equally good, and in bfloat16 also if tokens are
    sampled or penalised.
    """
    tolerance, wrong = _TOLERANCES[dtype], ""
    num_same = num_tokens = 0
    for number, answer in eager.answers.items():
        other, worst = recorded.answers[number], 0.0
        pairs = list(zip(answer.token_ids, other.token_ids, strict=False))
        same = next((at for at, (one, two) in enumerate(pairs) if one != two), len(pairs))
        num_same, num_tokens = num_same + same, num_tokens + len(answer.token_ids)
        is_whole = same == len(answer.token_ids) == len(other.token_ids)
        # Scores are compared for greedy tokens, not for sampled ones.
        is_best = number in eager.greedy
        for at in range(min(same + is_best, len(pairs))):
            worst = max(worst, abs(answer.logprobs[at] - other.logprobs[at]))
        is_excused = same < len(pairs) and (is_best or dtype == "bfloat16")
        if worst > tolerance or not (is_whole or is_excused):
            wrong = wrong or (
                f"request {number}: {same} of {len(answer.token_ids)} tokens are the same, the "
                f"log-probabilities differ by {worst:.2g}"
            )
    figures: dict[str, float | str] = {
        "tokens": num_tokens,
        "same": num_same,
        "steps": recorded.num_steps,
        "replays": recorded.num_replays,
    }
    if not wrong and (eager.num_replays or not recorded.num_replays):
        wrong = "no step was a graph, or one was that should not be"
    return figures | ({"broken": wrong} if wrong else {})
