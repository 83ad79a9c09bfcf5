"""An engine under random requests, with all its blocks in use, for the time that is left."""

import logging
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_caller import Caller, NewRequest
from gpu_engine import Sizes, grammars_of, load, models_of, write_files
from gpu_engine_tokens import SAMPLINGS
from gpu_timing import Bench, Figures
from text_generation_proto import pb
from text_generation_shard.engine import warmup
from text_generation_shard.engine.engine import Engine
from text_generation_shard.engine.warmup import warm_up
from text_generation_shard.grammars.grammar import Grammar

# Seconds at the end of the section, to end and count running requests.
_END_S = 5.0
_ROWS, _LONGEST, _PREFILL = 256, 8192, 4096
# The least number of waiting requests.
_QUEUE = 4
_DRY_STEPS = 120
# Steps per cancelled request.
_STEPS_A_CANCEL = 30
# Steps between two checks of memory and blocks.
_LOOK_EACH = 50
# Weights of SAMPLINGS; a watermark costs the host at least one launch per row.
_SHARES = (6, 6, 4, 4, 4, 1)
_LEDGER_LINE = re.compile(r"memory: (.*?) +([\d.]+) GB")


class Loaded(NamedTuple):
    """A warm engine, the lines of its memory ledger in GB, and its compiled grammars."""

    engine: Engine
    ledger: Mapping[str, float]
    num_blocks: int
    grammars: Mapping[str, Grammar]


def soak(bench: Bench) -> None:
    """The large model, with all free memory."""
    sizes = models_of(bench)[0]
    before = _used_bytes(bench)
    loaded = bench.prepare(f"{sizes.model.name} engine", partial(_load, bench, sizes))
    if loaded is not None:
        work = partial(_soak, bench, loaded, before)
        bench.measure(sizes.model.name, work, is_own=True)


def _load(bench: Bench, sizes: Sizes) -> Loaded:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(sizes, folder)
        rows = bench.size(_ROWS, 4)
        engine = load(bench, sizes, folder, None)
        longest = bench.size(_LONGEST, 96)
        most = 12 * engine.block_size if bench.is_dry else None
        limits = pb.WarmupRequest(
            max_prefill_tokens=bench.size(_PREFILL, 64),
            max_batch_size=rows,
            max_total_tokens=longest,
            max_batch_total_tokens=most,
        )
        with ledger_lines() as ledger:
            num_blocks = warm_up(engine, limits).num_blocks
        return Loaded(engine, ledger, num_blocks, grammars_of(engine, folder))


@contextmanager
def ledger_lines() -> Iterator[Mapping[str, float]]:
    """The memory ledger that the engine logs at warm-up, in GB by line."""
    found: dict[str, float] = {}

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if line := _LEDGER_LINE.match(record.getMessage()):
                found[line[1]] = float(line[2])

    logger, reader = warmup.logger, Reader()
    level = logger.level
    logger.addHandler(reader)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(reader)
        logger.setLevel(level)


class Draws:
    """Random requests: of any length that fits, with every sampling, some with a grammar."""

    def __init__(self, bench: Bench, loaded: Loaded) -> None:
        self.number = 0
        """The number of requests."""
        self.num_guided = 0
        """The number of requests with a grammar."""
        self.random = random.Random(2026)
        self._grammars = list(loaded.grammars.values())
        size, rows = loaded.engine.block_size, bench.size(_ROWS, 4)
        self._longest = min(bench.size(_LONGEST, 96), loaded.num_blocks * size)
        self._most_new = bench.size(512, 30)
        self._requests_a_time = bench.size(64, 4)
        # Prompts of this average length use up the blocks before the rows.
        average = loaded.num_blocks * size / rows
        self._most_prompt = int(min(self._longest - self._most_new, 2.2 * average))

    def request(self) -> NewRequest:
        """The next request."""
        draw, number = self.random, self.number
        self.number += 1
        length = draw.randint(1, self._most_prompt)
        new = draw.randint(1, self._most_new)
        grammar = None
        # Only at times: a step with a grammar waits for the previous step.
        if number // self._requests_a_time % 4 == 3 and draw.random() < 0.5:
            grammar, new = draw.choice(self._grammars), self._most_new
            self.num_guided += 1
        return NewRequest(
            id=number,
            input_ids=draw.choices(range(1, 300), k=length),
            num_prompt_tokens=length,
            block_table=(),
            sampling=draw.choices(SAMPLINGS, _SHARES)[0],
            max_new_tokens=new,
            ignore_eos_token=draw.random() < 0.9,
            prefill_logprobs=draw.random() < 0.02,
            top_n_tokens=3 if draw.random() < 0.05 else 0,
            grammar=grammar,
        )


def _soak(bench: Bench, loaded: Loaded, before: int) -> Figures:
    engine, draws = loaded.engine, Draws(bench, loaded)
    rows, prefill = bench.size(_ROWS, 4), bench.size(_PREFILL, 64)
    caller = Caller(engine, loaded.num_blocks, rows, prefill)
    most_used = cancelled = 0
    steps_a_cancel = bench.size(_STEPS_A_CANCEL, 15)
    before_ooms = _num_ooms(bench)
    while bench.left_s() > _END_S and not (bench.is_dry and caller.num_steps >= _DRY_STEPS):
        while caller.num_waiting < _QUEUE:
            caller.ask(draws.request())
        caller.advance()
        if draws.random.randrange(steps_a_cancel) == 0 and caller.running_ids:
            caller.cancel(draws.random.choice(caller.running_ids))
            cancelled += 1
        if caller.num_steps % _LOOK_EACH == 0:
            caller.check()
            most_used = max(most_used, _used_bytes(bench) - before)
    caller.end()
    answers = caller.answers.values()
    failed = sum(answer.reason == pb.FINISH_REASON_ERROR for answer in answers)
    most_used = max(most_used, _used_bytes(bench) - before)
    figures: dict[str, float | str] = {
        "requests": len(answers),
        "with_grammar": draws.num_guided,
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "steps": caller.num_steps,
        "preempted": caller.num_preempted,
        "cancelled": cancelled,
        "blocks": loaded.num_blocks,
        "most_blocks_share": caller.most_blocks / loaded.num_blocks,
    }
    if ooms := _num_ooms(bench) - before_ooms:
        figures["broken"] = f"there was no memory {ooms} times"
    if failed:
        figures["broken"] = f"{failed} requests have failed"
    return figures | _memory(loaded.ledger, most_used)


def _memory(ledger: Mapping[str, float], used: int) -> dict[str, float | str]:
    """The memory in use by the ledger, against the driver's."""
    said = sum(size for name, size in ledger.items() if name != "left")
    figures: dict[str, float | str] = {f"ledger_{name}_gb": size for name, size in ledger.items()}
    if not said:
        raise RuntimeError("the engine says nothing of its memory")
    if used:
        agrees = min(said, used / 1e9) / max(said, used / 1e9)
        figures |= {"driver_gb": used / 1e9, "ledger_gb": said, "ledger_agrees": agrees}
        figures["nvidia_smi"] = _nvidia_smi()
    return figures


def _num_ooms(bench: Bench) -> int:
    """The number of failed allocations, including those that were retried."""
    return 0 if bench.is_dry else int(torch.cuda.memory_stats().get("num_ooms", 0))


def _used_bytes(bench: Bench) -> int:
    """Memory of the device in use by all processes; 0 in a dry run."""
    if bench.is_dry:
        return 0
    free, total = torch.cuda.mem_get_info(bench.torch_device)
    return total - free


def _nvidia_smi() -> str:
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()
