"""The launched server on a GPU: throughput with 64 clients compared with transformers' continuous
batching, and the time from the command to the first token."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from gpu_engine import Sizes, models_of
from gpu_timing import Bench, Figures
from make_checkpoint import VOCAB_SIZE, write_checkpoint

from integration_tests.server import LauncherHandle, running

HERE = Path(__file__).resolve().parent
# Variants of transformers, and the arguments of its manager.
PEERS: Mapping[str, Mapping[str, object]] = {
    "its graphs": {"use_cuda_graph": True},
    "its own choice": {},
}
# Seconds that a start needs after its files are written.
_START_S = 20.0
# Disk and memory to leave free.
_SPARE_BYTES = 8e9
_LOG_LINE = re.compile(r"(\S+Z) +[A-Z]+ +(\S+?): (.*)")


class Clients(NamedTuple):
    """A closed loop: processes, each with clients that send one request after the other."""

    processes: int
    clients: int
    requests: int
    prompt_tokens: int
    new_tokens: int


CLIENTS, TINY_CLIENTS = Clients(4, 16, 96, 512, 128), Clients(1, 2, 3, 8, 4)


def server(bench: Bench) -> None:
    """A model of 1 B, whose every token has a text."""
    sizes = models_of(bench)[-1]
    clients = TINY_CLIENTS if bench.is_dry else CLIENTS
    name, tokens_s = sizes.model.name, dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        shape = replace(sizes.shape(), vocab=VOCAB_SIZE)
        write_checkpoint(checkpoint, shape=shape, device=bench.torch_device.type)
        bench.release()

        def measure(label: str, work: Callable[[], dict[str, float]], is_own: bool) -> None:
            def figures() -> Figures:
                found = work()
                tokens_s[label] = found["tokens_s"]
                return found

            bench.measure(f"{name}, {label}", figures, is_own)

        measure("ours", partial(_ours, bench, checkpoint, clients), True)
        ways = list(PEERS)[: bench.size(len(PEERS), 1)]
        for number, way in enumerate(ways):
            # Limited, so that there is time for the next one.
            seconds = bench.left_s() / (len(ways) - number)
            work = partial(_theirs, bench, checkpoint, clients, PEERS[way], seconds)
            measure(f"transformers, {way}", work, False)
    ours = tokens_s.pop("ours", 0.0)
    if ours and tokens_s:
        bench.note(f"{name}, ours beside transformers", {"times": ours / max(tokens_s.values())})


def _flags(bench: Bench) -> Sequence[str]:
    if bench.is_dry:
        return ("--device", "cpu", "--dtype", "float32")
    return ("--device", "cuda", "--dtype", "bfloat16")


def _ours(bench: Bench, checkpoint: Path, clients: Clients) -> dict[str, float]:
    with running(checkpoint, *_flags(bench)) as handle:
        brief = clients._replace(requests=clients.clients, new_tokens=2)
        _load(handle.url, brief, 1000)
        return _load(handle.url, clients, 0)


def _load(url: str, clients: Clients, seed: int) -> dict[str, float]:
    """The figures of all client processes; their quantiles are averaged."""
    command = [sys.executable, str(HERE / "load.py"), "--url", url, "--api", "tgi"]
    command += ["--clients", str(clients.clients), "--requests", str(clients.requests)]
    command += ["--prompt-tokens", str(clients.prompt_tokens)]
    command += ["--new-tokens", str(clients.new_tokens)]
    begun = [
        subprocess.Popen(
            [*command, "--seed", str(seed + number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(clients.processes)
    ]
    said = [process.communicate()[0] for process in begun]
    if any(process.returncode for process in begun):
        raise RuntimeError("a process of clients failed: its words are in the log above")
    figures = [json.loads(text) for text in said]

    def mean_ms(name: str) -> float:
        return 1e3 * sum(float(one[name]) for one in figures) / len(figures)

    tokens = clients.processes * clients.requests * clients.new_tokens
    return {
        "tokens_s": tokens / max(one["elapsed_s"] for one in figures),
        "first_p50_ms": mean_ms("ttft_p50_s"),
        "between_p50_ms": mean_ms("itl_p50_s"),
        "between_p95_ms": mean_ms("itl_p95_s"),
    }


def _theirs(
    bench: Bench,
    checkpoint: Path,
    clients: Clients,
    options: Mapping[str, object],
    seconds: float,
) -> dict[str, float]:
    """Runs in a process of its own, which frees its memory."""
    own: dict[str, object] = {"max_requests_per_batch": clients.processes * clients.clients}
    if bench.is_dry:
        own |= {"num_blocks": 8, "max_batch_tokens": 32}
    asked = {
        "checkpoint": str(checkpoint),
        "device": bench.torch_device.type,
        "clients": clients._asdict(),
        "options": own | dict(options),
    }
    command = [sys.executable, str(HERE / "gpu_transformers.py"), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"transformers failed: {done.stderr[-250:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def start(bench: Bench) -> None:
    """A model of 8 B, whose files are in the page cache."""
    sizes = models_of(bench)[0]
    name, nbytes = sizes.model.name, _file_bytes(sizes)
    with tempfile.TemporaryDirectory() as folder:
        room = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)
        if room < nbytes + _SPARE_BYTES and not bench.is_dry:
            reason = f"{nbytes / 1e9:.0f} GB do not fit on the disk, or into the page cache"
            return bench.leave_out(name, reason)
        begun = time.monotonic()
        kind = bench.torch_device.type
        shape = replace(sizes.shape(), vocab=max(VOCAB_SIZE, sizes.model.vocab))
        write_checkpoint(Path(folder), shape=shape, device=kind, is_split=True)
        bench.release()
        bench.note(f"{name}, files written", {"seconds": time.monotonic() - begun})
        if bench.left_s() < _START_S and not bench.is_dry:
            return bench.leave_out(name, "writing its files took too long")
        bench.measure(name, partial(_start, bench, name, Path(folder)), is_own=True)


def _file_bytes(sizes: Sizes) -> int:
    tables = 1 if sizes.is_tied else 2
    return 2 * (sizes.layer_weights + tables * sizes.head_weights)


def _start(bench: Bench, name: str, checkpoint: Path) -> Figures:
    began, begun = time.time(), time.perf_counter()
    with running(checkpoint, *_flags(bench)) as handle:
        ready_s = time.perf_counter() - begun
        _wait_for_token(handle)
        first_token_s = time.perf_counter() - begun
        bench.note(f"{name}, log", log_seconds(handle.log, began))
    return {"ready_s": ready_s, "first_token_s": first_token_s}


def _wait_for_token(handle: LauncherHandle) -> None:
    body: dict[str, Any] = {"inputs": " abc abd", "parameters": {"max_new_tokens": 2}}
    with handle.client.stream("POST", "/generate_stream", json=body) as response:
        line = next(response.iter_lines())
    if '"token"' not in line:
        raise RuntimeError(f"the first event is {line!r}")


def log_seconds(log: str, began: float) -> Mapping[str, str]:
    """The launcher's log lines, by seconds since `began` (of time.time())."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        if match := _LOG_LINE.match(line):
            seconds = datetime.fromisoformat(match[1]).timestamp() - began
            key = f"{seconds:.2f} s"
            said = f"{match[2].removeprefix('text_generation_')}: {match[3]}"
            found[key] = f"{found[key]} | {said}" if key in found else said
    return found
