"""Measures the router alone: a fake shard answers every step at once, thousands of clients stream.

Prints for each number of streams: events per second of the router's processor time (one core's
capacity, independent of other load), events per second of wall time, the time of an event, the time
to first token, and the latency of `/health` or another path (`--probe`). With more than one core
the router has one for itself; clients, shard and probe share the others.
"""

import argparse
import asyncio
import importlib.metadata
import multiprocessing
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import tokenizers
from machine import heading, results, write
from streams import Control, Streams, Tally, run
from text_generation_benchmark.http import HttpClient, RequestError
from text_generation_benchmark.report import quantile
from text_generation_benchmark.streams import APIS

FOLDER = Path(__file__).resolve().parent
EMBEDDED_MODEL = FOLDER.parent / "launcher" / "text_generation_launcher" / "embedded_model"
TEXT = (
    "The clients wait for the next word, and the word is on its way: it was chosen by nobody, it "
    "means nothing, and it is written down as carefully as if it did. "
)
PACKAGES = ("pytgi", "uvicorn", "uvloop", "httptools", "starlette", "fastapi", "grpcio", "orjson")
READY_TIMEOUT_S = 120.0
PROBE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of the router, and those of the other processes."""

    router: frozenset[int]
    others: frozenset[int]


@dataclass(frozen=True, slots=True)
class Router:
    """A running router."""

    process: psutil.Process
    port: int

    def cpu_s(self) -> tuple[float, float]:
        """Processor time of all its threads: user and kernel."""
        times = self.process.cpu_times()
        return times.user, times.system


def main() -> None:
    """Measures, prints, writes."""
    options = _parse()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    cores = available_cores()
    os.sched_setaffinity(0, cores.others)
    rows: list[dict[str, Any]] = []
    with running(cores, max(options.streams), options.accepted) as router:
        warm_up = Streams(router.port, options.api, 4, 32, options.seed)
        asyncio.run(measure(router, warm_up, 1.0))
        for streams in options.streams:
            load = Streams(router.port, options.api, streams, options.new_tokens, options.seed)
            rows.append(asyncio.run(measure(router, load, options.seconds, options.probe)))
            print(f"{streams} streams: done", file=sys.stderr)
    report = {
        **heading(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "api": options.api,
        "probe": options.probe,
        "rows": rows,
    }
    print(table(rows))
    if options.output is not None:
        write(report, options.output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512, 2048])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of streams")
    parser.add_argument("--new-tokens", type=int, default=256, help="of a request, on average")
    parser.add_argument("--api", choices=APIS, default="tgi")
    parser.add_argument("--accepted", type=int, default=0, help="right draft tokens in each step")
    parser.add_argument("--probe", default="/health", help="the path that is asked meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=results("router"))
    parser.add_argument("--dry-run", dest="output", action="store_const", const=None)
    return parser.parse_args()


def available_cores() -> Cores:
    """One core for the router, the others for clients and shard; a single core is shared."""
    available = sorted(os.sched_getaffinity(0))
    return Cores(frozenset(available[:1]), frozenset(available[1:] or available))


@contextmanager
def running(
    cores: Cores,
    max_streams: int,
    accepted: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Router]:
    """A router with a fake shard, ready in the block and ended after it.

    `environment` is added to the router's environment.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/shard"
        shard = [str(FOLDER / "fake_shard.py"), "--uds-path", path, "--accepted", str(accepted)]
        shard += ["--token-ids", *map(str, text)]
        front = ["-m", "text_generation_router.cli", "--tokenizer-name", str(EMBEDDED_MODEL)]
        front += ["--master-shard-uds-path", f"{path}-0", "--hostname", "127.0.0.1"]
        front += ["--port", str(port), "--max-concurrent-requests", str(max_streams + 8)]
        if accepted:
            front += ["--speculate", str(accepted)]
        log = Path(folder) / "log"
        with (
            _started(shard, cores.others, log, {}),
            _started(front, cores.router, log, environment) as process,
        ):
            router = Router(psutil.Process(process.pid), port)
            if not asyncio.run(_becomes_ready(router, process)):
                raise RuntimeError(f"the router did not start:\n{log.read_text()}")
            yield router


@contextmanager
def _started(
    arguments: Sequence[str], cores: frozenset[int], log: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _becomes_ready(router: Router, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.perf_counter() + READY_TIMEOUT_S
    while time.perf_counter() < deadline and process.poll() is None:
        try:
            await _probe(router.port)
            return True
        except (RequestError, RuntimeError):  # it does not listen yet, or is starting
            await asyncio.sleep(0.05)
    return False


async def measure(
    router: Router, load: Streams, seconds: float, probe: str = "/health"
) -> dict[str, Any]:
    """One row of the table: `seconds` from the moment every stream has a first token. Times to
    first token are those of all requests, including the initial burst."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    control = Control(context.Value("Q", 0), context.Value("Q", 0), context.Event(), sender)
    clients = context.Process(target=run, args=(load, control))
    clients.start()
    try:
        while control.first_tokens.value < load.streams and clients.is_alive():
            await asyncio.sleep(0.001)
        started, before, first = time.perf_counter(), router.cpu_s(), control.events.value
        probes: list[float] = []
        async with asyncio.timeout(seconds + READY_TIMEOUT_S), asyncio.TaskGroup() as probing:
            while time.perf_counter() < started + seconds and clients.is_alive():
                probing.create_task(_probe_into(router.port, probe, probes))
                await asyncio.sleep(PROBE_EVERY_S)
            elapsed, after = time.perf_counter() - started, router.cpu_s()
            num_events = control.events.value - first
        control.stop.set()
        tally = await asyncio.to_thread(receiver.recv)
    finally:
        clients.join(timeout=5)
        clients.kill()
    assert isinstance(tally, Tally)
    if tally.error:
        raise RuntimeError(tally.error)
    user_s, kernel_s = (later - sooner for later, sooner in zip(after, before, strict=True))
    cpu_s = user_s + kernel_s
    return {
        "streams": load.streams,
        "events_per_cpu_s": num_events / cpu_s,
        "events_per_s": num_events / elapsed,
        "cpu_share": cpu_s / elapsed,
        "user_us_per_event": user_s / num_events * 1e6,
        "kernel_us_per_event": kernel_s / num_events * 1e6,
        "ttft_p50_ms": quantile(tally.first_token_s, 0.5) * 1e3,
        "ttft_p99_ms": quantile(tally.first_token_s, 0.99) * 1e3,
        "health_p50_ms": quantile(probes, 0.5) * 1e3,
        "health_p99_ms": quantile(probes, 0.99) * 1e3,
        "requests": tally.requests,
        "probes": len(probes),
    }


async def _probe_into(port: int, path: str, seconds: list[float]) -> None:
    """GET on a new connection, as orchestrators do."""
    started = time.perf_counter()
    await _probe(port, path)
    seconds.append(time.perf_counter() - started)


async def _probe(port: int, path: str = "/health") -> None:
    answer = await HttpClient(f"http://127.0.0.1:{port}", keeps=False).request("GET", path)
    if answer.status != 200:
        raise RuntimeError(f"{path} said {answer.body.decode()}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per number of streams."""
    head = f"{'':>8} {'events/s':>9} {'events/s':>9} {'router':>7} {'µs an event':>13}"
    head += f" {'TTFT ms':>15} {'probe ms':>15}\n"
    head += f"{'streams':>8} {'per core':>9} {'':>9} {'CPU':>7} {'user':>6} {'kernel':>6}"
    head += f" {'p50':>7} {'p99':>7} {'p50':>7} {'p99':>7}"
    lines = [
        f"{row['streams']:>8} {row['events_per_cpu_s']:>9,.0f} {row['events_per_s']:>9,.0f}"
        f" {row['cpu_share']:>7.0%} {row['user_us_per_event']:>6.1f}"
        f" {row['kernel_us_per_event']:>6.1f} {row['ttft_p50_ms']:>7.1f}"
        f" {row['ttft_p99_ms']:>7.1f} {row['health_p50_ms']:>7.1f} {row['health_p99_ms']:>7.1f}"
        for row in rows
    ]
    return "\n".join((head, *lines))


if __name__ == "__main__":
    main()
