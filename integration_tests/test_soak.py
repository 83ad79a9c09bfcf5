"""`make soak`, for twelve seconds; and that its verdict and its checks see what is wrong."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_answers import (
    Answer,
    Check,
    Wrong,
    choices,
    chunks,
    generate_stream,
    message_stream,
    raise_for_failure,
    refused,
    response_stream,
)
from benchmarks.soak_verdict import (
    Finding,
    Kill,
    Life,
    Outcome,
    judge_kills,
    judge_memory,
    judge_requests,
)

ROOT = Path(__file__).resolve().parents[1]
OK = Outcome("chat", 1.0, 2.0, "ok")


@pytest.mark.nightly
def test_a_short_soak(tmp_path: Path) -> None:
    """One shard is killed; few blocks, so that all of them are soon used."""
    path = tmp_path / "soak.json"
    command = [sys.executable, "benchmarks/soak.py", "--minutes", "0.2", "--kill-every", "6"]
    command += ["--output", str(path), "--", "--max-batch-total-tokens", "8192"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["requests"] > 10
    assert [kill["signal"] for kill in report["kills"]] == ["SIGKILL"]
    assert {life["role"] for life in report["memory"]} >= {"launcher", "router", "shard"}
    names = ("ok", "vanished", "refused", "failed")
    ended = sum(kind.get(name, 0) for kind in report["kinds"].values() for name in names)
    assert ended == report["requests"]


def life(role: str, start_s: float, end_s: float, growth_mb: float, mb: float = 100.0) -> Life:
    """A process that is full after the first quarter of its time, and grows in ten minutes."""
    points = []
    for step in range(101):
        at_s = start_s + (end_s - start_s) * step / 100
        filling = min(step, 25) / 25 * 40
        points.append((at_s, mb + filling + growth_mb * (at_s - start_s) / 600))
    return Life(role, 1, points)


def bad(findings: Sequence[Finding]) -> list[str]:
    return [finding.name for finding in findings if not finding.is_good]


@pytest.mark.parametrize(
    ("growths", "life_s", "of_lives", "wanted"),
    [
        ({}, 120, 0, []),
        ({"launcher": 1.5, "router": 8, "shard": 15}, 400, 0, []),
        ({"launcher": 3}, 120, 0, ["memory of the launcher"]),
        ({"router": 12}, 120, 0, ["memory of the router"]),
        ({"shard": 30}, 400, 0, ["memory of the shard"]),
        ({"shard": 30}, 120, 0, []),
        ({}, 120, 10, ["memory of shard after shard"]),
        ({}, 400, 30, ["memory of shard after shard"]),
    ],
)
def test_memory_that_grows(
    growths: dict[str, float], life_s: float, of_lives: float, wanted: list[str]
) -> None:
    """Within a life of two minutes a shard fills its caches: that is not judged."""
    lives = [life(role, 0, 1200, growths.get(role, 0)) for role in ("launcher", "router")]
    lives += [
        life("shard", at_s, at_s + life_s, growths.get("shard", 0), 300 + of_lives * n)
        for n, at_s in enumerate(range(0, 9 * int(life_s + 5), int(life_s + 5)))
    ]
    assert bad(judge_memory(lives, num_kills=8)) == wanted


def test_memory_that_was_not_seen() -> None:
    assert len(bad(judge_memory([], num_kills=0))) == 3


def failed(ended_s: float, is_typed: bool) -> Outcome:
    return Outcome("chat", ended_s - 1, ended_s, "failed", "503", is_typed)


@pytest.mark.parametrize(
    ("outcome", "is_good"),
    [
        (failed(101, True), True),
        (failed(105, True), True),
        (failed(106.5, True), False),
        (failed(99, True), False),
        (failed(101, False), False),
        (Outcome("chat", 1, 2, "vanished"), True),
    ],
)
def test_what_a_kill_explains(outcome: Outcome, is_good: bool) -> None:
    kills = [Kill("SIGKILL", 100.0, 104.0)]
    assert (not bad(judge_requests([OK, outcome], kills))) == is_good


def test_kinds_without_an_answer_and_shards_that_stay_away() -> None:
    other = Outcome("tools", 1, 2, "vanished")
    assert bad(judge_requests([OK, other], [])) == ["requests of each kind are answered"]
    assert judge_kills([Kill("SIGKILL", 1, 3)]).is_good
    assert not judge_kills([Kill("SIGKILL", 1, 3), Kill("SIGSTOP", 9)]).is_good
    assert not judge_kills([Kill("SIGKILL", 1, 39)]).is_good


def events(*data: Any, end: str = "\n\n") -> Answer:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in data]
    body = "\n\n".join(f"data: {line}" for line in lines) + end
    return Answer(200, "text/event-stream; charset=utf-8", body.encode())


def whole(body: Any, status: int = 200) -> Answer:
    return Answer(status, "application/json", json.dumps(body).encode())


def choice(reason: str | None, number: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": number, "delta": {"content": "a"}, "finish_reason": reason}]}


TOKEN = {"index": 1, "generated_text": None}
LAST = {"index": 2, "generated_text": "ab"}


def never(text: str) -> None:
    raise Wrong(text)


@pytest.mark.parametrize(
    ("check", "good", "wrong"),
    [
        (
            generate_stream(2),
            [events(TOKEN, LAST)],
            [
                events(TOKEN),
                events(LAST),
                events(TOKEN, TOKEN, LAST),
                events(TOKEN, LAST, end=""),
                whole({}),
            ],
        ),
        (generate_stream(1), [], [events(TOKEN, LAST)]),
        (generate_stream(2, never), [], [events(TOKEN, LAST)]),
        (
            chunks(2),
            [events(choice("stop"), choice("length", 1), "[DONE]")],
            [
                events(choice("stop"), choice("length", 1)),
                events(choice("stop"), choice(None, 1), "[DONE]"),
                events(choice("stop"), choice("stop"), "[DONE]"),
            ],
        ),
        (choices(1), [], [whole({"choices": []}), whole({}, 503), whole([])]),
        (
            response_stream,
            [events({"type": "response.completed", "sequence_number": 0})],
            [
                events({"type": "response.created", "sequence_number": 0}),
                events({"type": "response.completed", "sequence_number": 1}),
            ],
        ),
        (
            message_stream,
            [events({"type": "message_start"}, {"type": "message_stop"})],
            [events({"type": "message_start"}), events({"type": "message_stop"})],
        ),
        (
            refused(422),
            [whole({"error": "a", "error_type": "validation"}, 422)],
            [whole({"error": "a", "error_type": "validation"}), whole({"error": "a"}, 422)],
        ),
    ],
)
def test_checks_of_answers(check: Check, good: list[Answer], wrong: list[Answer]) -> None:
    for answer in good:
        check(answer)
    for answer in wrong:
        with pytest.raises(Wrong):
            check(answer)


TYPED = {"error": "a", "error_type": "generation"}


@pytest.mark.parametrize(
    ("answer", "is_typed"),
    [
        (whole(TYPED, 503), True),
        (whole({"error": {"message": "a", "type": "b"}}, 500), True),
        (whole({"state": "degraded", "phase": "a", "since": "b"}, 503), True),
        (whole({}, 424), False),
        (Answer(500, "text/plain", b"Internal Server Error"), False),
        (events(TOKEN, TYPED), True),
        (events({"type": "response.failed", "response": {"error": {"message": "a"}}}), True),
    ],
)
def test_what_the_server_says_that_it_failed(answer: Answer, is_typed: bool) -> None:
    with pytest.raises(Wrong) as caught:
        raise_for_failure(answer)
    assert caught.value.is_typed == is_typed


@pytest.mark.parametrize("answer", [whole({}), whole({}, 422), events(TOKEN, LAST, "[DONE]")])
def test_what_is_no_failure(answer: Answer) -> None:
    raise_for_failure(answer)
