"""One of two shards is killed or stopped: all clients get an error, and no process is left."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, token_ids, wait_until

PROMPT = "the cat sat on "
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos_token": True}
FLAGS = "--device", "cpu", "--dtype", "float32", "--num-shard", "2"
DEADLINE_S = 2
NUM_CLIENTS = 4
# A client gets its error at most this long after the event, beside other tests.
NOTICE_S = 4.0
# As the system calls it.
MEMORY = "/memfd:text-generation-shards"
# Of a launcher that starts, what its log says of a rank when a phase has begun; nothing: its
# process is there.
STARTING = {
    "rendezvous": "",
    "loading": "all shards are connected",
    "warming up": "Server started at",
}
SERVING = ["prefill", "decode"]
# Context switches during the measurement of a rank that waits for another rank in a sum; a rank
# that waits for a message has fewer.
LOOK_S, FEWEST_NAPS = 0.05, 50


class Told(NamedTuple):
    """The last event of a client, and its time."""

    event: dict[str, Any]
    at: float


def rank_of(process: psutil.Process) -> int | None:
    """Of a shard; None: it is none, or has ended."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    found = [re.fullmatch(r"--rank=(\d+)", word) for word in words]
    return next((int(match[1]) for match in found if match), None)


def shard(handle: LauncherHandle, rank: int) -> psutil.Process:
    """The process of a rank, as soon as there is one."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [one for one in handle.family() if rank_of(one) == rank]
        return bool(found)

    wait_until(is_there, 30, f"shard {rank} was started")
    return found[0]


def read_all(handle: LauncherHandle, number: int, phase: str) -> Told:
    """The end of what a client asks for: one long text, or many long prompts."""
    last: dict[str, Any] = {}
    for turn in range(1000 if phase == "prefill" else 1):
        text, parameters = f"{number}-{turn} {PROMPT}", LONG
        if phase == "prefill":
            text, parameters = text * 12, {"max_new_tokens": 1}
        body = {"inputs": text, "parameters": parameters}
        with handle.client.stream("POST", "/generate_stream", json=body) as response:
            lines = [line for line in response.iter_lines() if line.startswith(("data:", "{"))]
        last = json.loads(lines[-1].removeprefix("data:"))
        if "error" in last:
            break
    return Told(last, time.monotonic())


def wait_until_busy(handle: LauncherHandle) -> None:
    """Until it computes."""
    wait_until(lambda: handle.metrics()["tgi_batch_current_size"] > 0, 20, "it computes")


def num_naps(process: psutil.Process) -> int:
    """The voluntary context switches of its threads so far."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            status = (task / "status").read_text()
            total += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[1])
    return total


@contextmanager
def waiting_for(process: psutil.Process, other: psutil.Process) -> Iterator[None]:
    """Inside the block a rank waits in an operation for another one, which does not run."""

    def is_waiting() -> bool:
        other.suspend()
        before = num_naps(process)
        time.sleep(LOOK_S)
        if num_naps(process) - before >= FEWEST_NAPS:
            return True
        other.resume()
        return False

    wait_until(is_waiting, 20, "one rank waits for the other")
    try:
        yield
    finally:
        other.resume()


def memory_names() -> set[str]:
    """What has a name in the memory that processes share."""
    return set(os.listdir("/dev/shm"))


def processes_of(handle: LauncherHandle) -> list[psutil.Process]:
    """All running processes of the launcher, also orphans: found by the launcher's folder."""
    folder, found = str(handle.uds_path.parent), list[psutil.Process]()
    for process in psutil.process_iter():
        try:
            if process.cwd() == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def shares_memory(process: psutil.Process) -> bool:
    """Whether it holds the memory in which ranks talk, which has no name in any folder."""
    return MEMORY in Path(f"/proc/{process.pid}/maps").read_text()


@contextmanager
def nothing_left(handle: LauncherHandle) -> Iterator[None]:
    """Inside the block the launcher ends; then none of its processes is there, and no socket. With
    its processes goes the memory that only they have mapped."""
    before, family = memory_names(), handle.family()
    assert set(family) <= set(processes_of(handle))
    yield
    wait_until(lambda: not processes_of(handle), 10, "none of its processes is there")
    assert not list(handle.uds_path.parent.glob("shard-[0-9]"))
    assert memory_names() == before


def assert_named(handle: LauncherHandle, victim: int, number: signal.Signals) -> None:
    """The launcher's last line names the first failed process and its failure."""
    assert handle.wait_for_exit(40) == 1
    last = handle.log.rpartition(" ERROR text_generation_launcher: ")[2]
    assert not re.search(r"^\d{4}-\d\d-\d\dT", last, re.MULTILINE), f"said afterwards: {last}"
    if number is signal.SIGKILL:
        assert f"shard {victim} was killed by signal 9" in last, last
    else:
        assert re.search(
            rf"shard {victim} (did not come|shows no sign|is stopped|.*has not answered)", last
        ), last


def end_while_starting(
    handle: LauncherHandle, victim: int, phase: str, number: signal.Signals
) -> None:
    process = shard(handle, victim)
    if STARTING[phase]:
        pattern = re.compile(rf"rank={victim}: .*{STARTING[phase]}")
        wait_until(lambda: pattern.search(handle.log) is not None, 60, phase)
    with nothing_left(handle):
        process.send_signal(number)
        assert_named(handle, victim, number)


def end_while_serving(
    handle: LauncherHandle, victim: int, phase: str, number: signal.Signals
) -> None:
    handle.wait_until_ready()
    process = shard(handle, victim)
    assert all(shares_memory(shard(handle, rank)) for rank in range(2))
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, nothing_left(handle):
        clients: Sequence[Future[Told]] = [
            pool.submit(read_all, handle, client, phase) for client in range(NUM_CLIENTS)
        ]
        wait_until_busy(handle)
        with ExitStack() as stack:
            if phase == "in a sum":
                stack.enter_context(waiting_for(process, shard(handle, 1 - victim)))
            began = time.monotonic()
            process.send_signal(number)
        for client in clients:
            told = client.result(30)
            assert told.event["error_type"] in ("generation", "overloaded"), told
            least = DEADLINE_S if number is signal.SIGSTOP else 0
            assert told.at - began < least + NOTICE_S, told
        assert_named(handle, victim, number)


def end_shards(
    launch: Launch, model: Path, phase: str, cases: Sequence[tuple[int, signal.Signals]]
) -> None:
    """Each case in its own server, all at the same time."""
    flags = *FLAGS, "--step-deadline", str(DEADLINE_S), "--no-restart"
    handles = [launch(model, *flags) for _ in cases]
    end = end_while_starting if phase in STARTING else end_while_serving
    with ThreadPoolExecutor(len(cases)) as pool:
        ends = [
            pool.submit(end, handle, victim, phase, number)
            for handle, (victim, number) in zip(handles, cases, strict=True)
        ]
        for one in ends:
            one.result()


# In turn, so that each rank ends in each way.
KILLED_OR_STOPPED = (
    ((0, signal.SIGKILL), (1, signal.SIGSTOP)),
    ((1, signal.SIGKILL), (0, signal.SIGSTOP)),
)


PHASES = *STARTING, *SERVING, "in a sum"
USUAL = "decode", "in a sum"


@pytest.mark.parametrize(
    ("phase", "cases"),
    [
        pytest.param(phase, cases, id=phase, marks=() if phase in USUAL else pytest.mark.nightly)
        for phase, cases in zip(PHASES, 3 * KILLED_OR_STOPPED, strict=True)
    ],
)
def test_a_shard_ends(
    phase: str, cases: Sequence[tuple[int, signal.Signals]], launch: Launch, tiny_model_path: Path
) -> None:
    """While they start, while they serve, and while one waits for the other."""
    end_shards(launch, tiny_model_path, phase, cases)


WRONG = """
import sys

if "--rank=1" in sys.orig_argv and "serve" in sys.orig_argv:
    from text_generation_shard.engine import output

    plain, counts = output.verify, []

    def wrong(plan, choice, *others):
        # Of the rows of warm-up none is so far.
        if choice.token_ids.size and plan.samples.positions[0] == 29 and not counts:
            counts.append(1)
            choice = choice._replace(token_ids=choice.token_ids ^ 1)
        return plain(plan, choice, *others)

    output.verify = wrong
"""


def test_another_token_is_noticed_in_its_step(
    launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    handle = launch(tiny_model_path, *FLAGS, PYTHONPATH=paths)
    handle.wait_until_ready()
    length = len(
        handle.generate(PROMPT, decoder_input_details=True, max_new_tokens=1)["details"]["prefill"]
    )
    *tokens, last = handle.stream(PROMPT, **LONG)
    # The wrong token is at position 29.
    assert len(tokens) == 29 - length
    assert re.search(r"shard 1 chose other tokens than shard 0 in step \d+", last["error"])
    # It goes on.
    assert len(token_ids(handle.stream(PROMPT, max_new_tokens=60, ignore_eos_token=True))) == 60
    handle.stop()


@pytest.mark.nightly
def test_two_servers_end_in_order_under_load(launch: Launch, tiny_model_path: Path) -> None:
    handles = [launch(tiny_model_path, *FLAGS) for _ in range(2)]
    for handle in handles:
        handle.wait_until_ready()
    with ThreadPoolExecutor(2 * NUM_CLIENTS + 2) as pool:
        streams = [
            pool.submit(handle.stream, PROMPT, **LONG)
            for _ in range(NUM_CLIENTS)
            for handle in handles
        ]
        for handle in handles:
            wait_until(
                lambda of=handle: of.metrics()["tgi_request_count"] == NUM_CLIENTS, 20, "all came"
            )
        ends = [pool.submit(handle.stop) for handle in handles]
        found = [token_ids(stream.result(60)) for stream in streams]
        for end in ends:
            end.result()
    assert all(tokens == found[0] and len(tokens) == 400 for tokens in found)
