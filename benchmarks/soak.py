"""A soak of the launched server: `make soak`, 20 minutes.

    python benchmarks/soak.py [--minutes 20] [--kill-every 120] [--clients 16] [-- FLAG ...]

Random requests of all kinds (soak_requests.py) arrive at random times, some clients disconnect, and
every two minutes a shard is killed. Each answer is checked. At the end all rows, blocks and
descriptors must be free, and no process or socket may be left. Writes a report as JSON,
and prints the problems; the status is 1 if there are any.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
# For integration_tests.
sys.path.append(str(ROOT))

from machine import machine  # noqa: E402
from soak_answers import Answer, choices  # noqa: E402
from soak_load import Load  # noqa: E402
from soak_requests import post  # noqa: E402
from soak_verdict import (  # noqa: E402
    Finding,
    Kill,
    Outcome,
    judge_kills,
    judge_memory,
    judge_requests,
)
from soak_watch import Watch, descriptors, wait, what_is_left  # noqa: E402

from integration_tests.server import LauncherHandle  # noqa: E402

LOG = ROOT / "benchmarks" / ".work" / "soak.log"
"""The server's log of the last soak."""
IDLE_S = 30.0
LATE_DESCRIPTORS = 2
"""Descriptors of connections to replaced shards, which gRPC closes only two connections later."""
LOOK_EVERY_S = 5.0
_MOST_FAILURES = 200
_ERROR_LINE = re.compile(r"^(\S+Z) +ERROR (.*)$", re.MULTILINE)


def main() -> None:
    """Soaks, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds; 0: never")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    name = f"soak-{datetime.now(UTC):%Y-%m-%d}.json"
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / name)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of the launcher, behind --")
    options = parser.parse_args()
    report = soak(options)
    for finding in report["verdict"]:
        print(f"{'ok   ' if finding['is_good'] else 'WRONG'} {finding['name']}: {finding['said']}")
    for failure in report["failures"][:20]:
        print(f"  {failure['kind']} after {failure['ended_s']:.1f} s: {failure['said'][:600]}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}; the server's log is {LOG}", file=sys.stderr)
    sys.exit(not all(finding["is_good"] for finding in report["verdict"]))


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Runs one server from start to end."""
    when = datetime.now(UTC)
    # All threads, as a user's server has; the harness's default is one.
    handle = LauncherHandle(None, *options.flags, OMP_NUM_THREADS=str(os.cpu_count()))
    try:
        handle.wait_until_ready()
        handle.generate("def f(", max_new_tokens=4)
        before = descriptors(handle)
        began = datetime.now(UTC)
        load = Load(handle, options.clients, options.seed)
        watch = Watch(handle, load.now, LOOK_EVERY_S)
        watch.look()
        watch.start()
        asyncio.run(load.run(60 * options.minutes, options.kill_every))
        watch.stop()
        seconds = load.now()
        lives = list(watch.lives.values())
        verdict = [
            *judge_requests(load.outcomes, load.kills),
            judge_kills(load.kills),
            *judge_memory(lives, len(load.kills)),
            *judge_end(handle, watch, before, options.seed),
            judge_log(handle.log, began, load.kills),
        ]
    finally:
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("w") as log, redirect_stdout(log):
            handle.kill()
    return {
        "when": f"{when:%Y-%m-%d %H:%M} UTC",
        "command": " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]]),
        "machine": machine(),
        "minutes": options.minutes,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "requests": len(load.outcomes),
        "verdict": [asdict(finding) for finding in verdict],
        "kinds": by_kind(load.outcomes),
        "kills": [asdict(kill) for kill in load.kills],
        "failures": [asdict(o) for o in load.outcomes if o.result == "failed"][:_MOST_FAILURES],
        "memory": [asdict(life) for life in lives if len(life.points) > 1],
    }


def judge_end(
    handle: LauncherHandle, watch: Watch, before: Counter[str], seed: int
) -> list[Finding]:
    """See `end`; a server that does not answer any more is a finding, too."""
    try:
        return end(handle, watch, before, seed)
    except (httpx.HTTPError, AssertionError) as error:
        code = handle.process.poll()
        said = f"exit code {code}" if code is not None else "it runs"
        return [Finding("the server lives at the end", False, f"{said}: {error!r}"[:2000])]


def end(handle: LauncherHandle, watch: Watch, before: Counter[str], seed: int) -> list[Finding]:
    """Checks that rows, blocks and descriptors are free; then stops the server and checks that no
    process or socket is left."""
    findings = [blocks_are_back(handle, "all requests have ended")]
    findings += [fill(handle, seed), blocks_are_back(handle, "and once more after that")]

    def more() -> Counter[str]:
        return descriptors(handle) - before

    is_good = wait(lambda: more().total() <= LATE_DESCRIPTORS, 15)
    said = ", ".join(f"{count} more {name}" for name, count in more().items()) or "as at first"
    findings.append(Finding("no descriptor is left open", is_good, said))
    processes = [*watch.processes, *handle.family()]
    folder = handle.uds_path.parent
    left: list[str] = []
    try:
        # Its folder exists until `kill`.
        said = stop(handle)
        left = what_is_left(processes, folder)
    except AssertionError as error:
        said = str(error)[-2000:]
    findings.append(Finding("SIGTERM ends it with exit code 0", not said, said or "so it is"))
    is_free = not listens(handle.port)
    left += [] if is_free else [f"port {handle.port}"]
    findings.append(Finding("nothing is left behind", not left, ", ".join(left) or "nothing"))
    return findings


def stop(handle: LauncherHandle) -> str:
    """The problem of the shutdown; empty: none."""
    handle.process.terminate()
    code = handle.wait_for_exit(30)
    if code:
        return f"exit code {code}"
    return "a traceback in the log" if "Traceback" in handle.log else ""


def listens(port: int) -> bool:
    """Whether the server still answers."""
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False)
    except httpx.ConnectError:
        return False
    return True


def blocks_are_back(handle: LauncherHandle, name: str) -> Finding:
    """Whether no request waits or runs and all blocks are free (some of them cached)."""
    info = handle.client.get("/info").json()

    def state() -> dict[str, float]:
        metrics = handle.metrics()
        names = ("queue_size", "batch_current_size", "kv_blocks_used", "kv_blocks_free")
        found = {name: metrics[f"tgi_{name}"] for name in names}
        return found | {"all": info["num_blocks"]}

    wanted = dict.fromkeys(("queue_size", "batch_current_size", "kv_blocks_used"), 0)
    wanted |= {"kv_blocks_free": info["num_blocks"], "all": info["num_blocks"]}
    is_good = wait(lambda: state() == wanted, IDLE_S)
    said = ", ".join(f"{key} {value:g}" for key, value in state().items())
    return Finding(name, is_good, said)


def fill(handle: LauncherHandle, seed: int) -> Finding:
    """Sends full-size prompts without common prefixes until every block has been used. Afterwards
    the prefix cache must hold nearly all blocks."""
    info = handle.client.get("/info").json()
    draw, length = random.Random(seed), info["max_input_tokens"]
    count = info["num_blocks"] * info["block_size"] // length + 2
    bodies = [
        {
            **{"model": "tgi", "max_tokens": 1},
            "prompt": draw.choices(range(300, info["model_vocab_size"]), k=length),
        }
        for _ in range(count)
    ]

    async def ask() -> None:
        gate = asyncio.Semaphore(16)
        async with handle.async_client() as client, asyncio.TaskGroup() as tasks:

            async def one(body: dict[str, Any]) -> None:
                async with gate:
                    request = post("/v1/completions", body, choices(1))
                    headers = {"content-type": "application/json"}
                    answer = await client.post(
                        request.path, content=request.content, headers=headers
                    )
                kind = answer.headers["content-type"]
                request.check(Answer(answer.status_code, kind, answer.content))

            for body in bodies:
                tasks.create_task(one(body))

    name = "all blocks can be used"
    try:
        asyncio.run(ask())
    except ExceptionGroup as group:
        return Finding(name, False, repr(group.exceptions[0])[:500])
    cached = handle.metrics()["tgi_prefix_cache_blocks"]
    said = f"{count} prompts of {length} tokens, {cached:g} of {info['num_blocks']} are cached"
    return Finding(name, cached >= 0.98 * info["num_blocks"], said)


def judge_log(log: str, began: datetime, kills: Sequence[Kill]) -> Finding:
    """Whether all ERROR lines are explained by a kill."""
    unexplained = []
    for moment, said in _ERROR_LINE.findall(log):
        at_s = (datetime.fromisoformat(moment) - began).total_seconds()
        if not any(kill.explains(at_s) for kill in kills):
            unexplained.append(f"{moment} {said}"[:300])
    said = f"{len(unexplained)} lines {unexplained[:5]}" if unexplained else "none"
    return Finding("no error in the log that a kill does not explain", not unexplained, said)


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Counts by outcome, and the durations of answered requests."""
    found = {}
    for kind in sorted({outcome.kind for outcome in outcomes}):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        counts: dict[str, float] = dict(Counter(outcome.result for outcome in of_kind))
        times = [o.ended_s - o.began_s for o in of_kind if o.result in ("ok", "refused")]
        if times:
            counts |= {"median_s": round(statistics.median(times), 3)}
            counts |= {"longest_s": round(max(times), 3)}
        found[kind] = counts
    return found


if __name__ == "__main__":
    main()
