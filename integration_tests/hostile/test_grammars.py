"""Grammars that take unlimited time and memory to compile or to follow: they are refused in time,
affect no other request, and leave no process or memory."""

import asyncio
import signal
import time
from collections.abc import Awaitable
from typing import Any

import httpx
import psutil
import pytest

from integration_tests.hostile.contained import contained, cpu_seconds, family_bytes
from integration_tests.hostile.neighbours import neighbours
from integration_tests.server import LauncherHandle, assert_ended, wait_until

pytestmark = pytest.mark.timed

# Seconds until a refusal, and for other requests meanwhile.
BUDGET_S, SMALL_S = 10.0, 2.0
LEVEL_BYTES = 100 << 20


def all_of(number: int, form: str = "a{}") -> dict[str, Any]:
    """A schema of patterns that must all hold."""
    patterns = [{"type": "string", "pattern": form.format(n)} for n in range(number)]
    return {"type": "json", "value": {"allOf": patterns}}


def regex(text: str) -> dict[str, Any]:
    return {"type": "regex", "value": text}


async def ask(client: httpx.AsyncClient, grammar: dict[str, Any], **more: Any) -> httpx.Response:
    parameters = {"grammar": grammar, "max_new_tokens": 60, **more}
    return await client.post("/generate", json={"inputs": "x", "parameters": parameters})


async def timed(answer: Awaitable[httpx.Response]) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    return await answer, time.monotonic() - began


# Most processes of the worker when nothing is tried: the one that starts the others, and theirs.
NUM_KEPT = 11


def trials(handle: LauncherHandle) -> list[psutil.Process]:
    """The processes of grammars."""
    found = []
    for process in handle.family():
        try:
            if "text_generation_shard.grammars.grammar" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue  # it has just ended
    return found


def settled_bytes(handle: LauncherHandle) -> int:
    """The memory of the process family after the shard has touched all of its cache."""
    handle.generate("x", max_new_tokens=4)
    seen = [0, family_bytes(handle)]

    def is_level() -> bool:
        time.sleep(1)  # growth needs time to be seen
        seen.append(family_bytes(handle))
        return seen[-1] < seen[-2] + (1 << 20)

    wait_until(is_level, 60, "the memory is level")
    return seen[-1]


def assert_nothing_goes_on(handle: LauncherHandle, bytes_before: int) -> None:
    """The process family is idle, and has no more memory than before."""
    assert len(trials(handle)) <= NUM_KEPT
    used = cpu_seconds(handle)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 1, 5, "a second has passed")
    assert cpu_seconds(handle) - used < 0.3
    assert family_bytes(handle) < bytes_before + LEVEL_BYTES


async def attack(handle: LauncherHandle, grammars: list[dict[str, Any]]) -> list[httpx.Response]:
    """All at the same time; meanwhile small grammars must be answered immediately."""
    async with handle.async_client() as client:
        hostile = [asyncio.create_task(timed(ask(client, grammar))) for grammar in grammars]
        count = 0
        while not all(task.done() for task in hostile):
            # New each time.
            answer, took_s = await timed(ask(client, regex(f"[0-9]{{2}}|x{time.monotonic_ns()}y")))
            assert answer.status_code == 200, answer.text
            assert took_s < SMALL_S
            count += 1
        assert count
        answer, took_s = await timed(ask(client, regex("[0-9]{2}")))
        assert answer.json()["generated_text"].isdecimal()
    answers = [task.result() for task in hostile]
    assert max(took_s for _, took_s in answers) < BUDGET_S
    return [answer for answer, _ in answers]


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code in (422, 429), answer.text
    body = answer.json()
    assert len(body["error"]) < 400
    if answer.status_code == 422:
        assert body["error_type"] == "validation" and "smaller" in body["error"]
    else:
        assert body["error_type"] == "overloaded" and "try again" in body["error"]


def test_patterns_that_must_hold_at_once(hostile_server: LauncherHandle) -> None:
    before = settled_bytes(hostile_server)
    with neighbours(hostile_server) as seen:
        for grammars in (
            [all_of(26)],
            [all_of(200)],
            [all_of(27), all_of(28)],
            [all_of(30 + number) for number in range(8)],
        ):
            answers = asyncio.run(attack(hostile_server, grammars))
            for answer in answers:
                assert_refused(answer)
            if len(grammars) < 3:
                assert {answer.status_code for answer in answers} == {422}
    seen.assert_unharmed()
    assert_nothing_goes_on(hostile_server, before)


def test_a_million(hostile_server: LauncherHandle) -> None:
    before = settled_bytes(hostile_server)
    answers = asyncio.run(attack(hostile_server, [regex("a{1000000}"), regex("b{1000000}")]))
    for answer in answers:
        assert answer.status_code == 422
        assert_refused(answer)
    assert_nothing_goes_on(hostile_server, before)


def test_what_would_blow_up_while_the_text_is_written(hostile_server: LauncherHandle) -> None:
    """Compiled quickly, since the shortest text has no `b`."""
    before = settled_bytes(hostile_server)

    def hidden(number: int) -> dict[str, Any]:
        value = all_of(number, "^(z{{0,3}}|y.*a{}.*)$")["value"]
        properties = {"a": {"type": "null"}, "b": value}
        return {
            "type": "json",
            "value": {
                "type": "object",
                "properties": properties,
                "required": ["a"],
                "additionalProperties": False,
            },
        }

    async def attack() -> list[httpx.Response]:
        async with hostile_server.async_client() as client:
            asked = [
                ask(client, hidden(number), do_sample=True, temperature=2.0, seed=number)
                for number in (8, 9, 10, 11, 26, 200)
            ]
            return await asyncio.gather(*asked)

    with neighbours(hostile_server) as seen:
        answers = asyncio.run(attack())
    seen.assert_unharmed()
    assert [answer.status_code for answer in answers[3:]] == [422] * 3
    for answer in answers[:3]:
        assert answer.status_code in (200, 424)
        assert answer.status_code == 200 or "too complex to be followed" in answer.json()["error"]
    hostile_server.assert_idle()
    assert_nothing_goes_on(hostile_server, before)


def slow(number: int, name: str = "a") -> dict[str, Any]:
    """A grammar that takes four seconds to try: each of its patterns may exclude each other."""
    patterns = {f"^(.*{name}{at}.*)-{number}{at}$": {"type": "null"} for at in range(220)}
    return {"type": "json", "value": {"type": "object", "patternProperties": patterns}}


def test_what_takes_long_to_try(hostile_server: LauncherHandle) -> None:
    before = settled_bytes(hostile_server)
    with neighbours(hostile_server) as seen:
        answers = asyncio.run(attack(hostile_server, [slow(number) for number in range(6)]))
    seen.assert_unharmed()
    for answer in answers:
        assert_refused(answer)
    assert {answer.status_code for answer in answers} == {422, 429}
    assert_nothing_goes_on(hostile_server, before)


def test_sigterm_while_grammars_are_compiled_and_nothing_of_them_in_the_log() -> None:
    with contained(None) as handle:

        async def leave_it_compiling() -> None:
            async with handle.async_client() as client:
                name = "secretpattern"
                refused = await ask(client, regex("secretpattern("))
                assert refused.status_code == 422
                asked = [asyncio.create_task(ask(client, slow(n, name))) for n in range(2)]
                await asyncio.to_thread(
                    wait_until, lambda: len(trials(handle)) >= 3, 10, "both are being compiled"
                )
                family = handle.family()
                began = time.monotonic()
                handle.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(handle.process.wait, 20)
                assert time.monotonic() - began < 12
                await asyncio.gather(*asked, return_exceptions=True)
                assert_ended(family, within_s=5)

        asyncio.run(leave_it_compiling())
        assert "secretpattern" not in handle.log
