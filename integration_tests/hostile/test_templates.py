"""Chat templates that do not end, or use all memory: a 422 in time, only for their own request."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from integration_tests.hostile.contained import contained, cpu_seconds
from integration_tests.hostile.neighbours import check_unharmed
from integration_tests.server import LauncherHandle, has_ended, wait_until

pytestmark = pytest.mark.timed

WORKER = "text_generation_router.chat.rendering"
ANSWER_S = 3.0
# The previous chat killed its process, and a new one starts slowly while streams run.
START_AND_ANSWER_S = 8.0
# By the content of the first message; the server's own trial is the last. `one` keeps constants
# from being folded when the template is compiled, whichever branch they are in.
TEMPLATE = r"""
{%- set it = messages[0].content -%}
{%- set one = messages | length -%}
{%- if it == "loop" %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif it == "sort" %}{{ (range(99999) | list * 200 * one) | sort | length }}
{%- elif it == "multiply" %}{{ ("a" * one * 10 ** 8).replace("a", "ba").replace("b", "ab") }}
{%- elif it == "power of a power" %}{{ 9 ** ((it | length) ** 8) }}
{%- elif it == "recurse" %}{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}
{%- elif it == "10 GB" %}{{ "a" * one * 10 ** 10 }}
{%- elif it == "10 GB in pieces" %}{% set l = namespace(s="ab" * one * 9 ** 7) %}
{%- for i in range(40) %}{% set l.s = l.s ~ l.s %}{% endfor %}{{ l.s }}
{%- elif it == "format" %}{{ ("%0" ~ one * 10 ** 10 ~ "d") | format(1) }}
{%- else %}{{ it }}{% endif -%}
"""
HOSTILE = (
    "loop",
    "sort",
    "multiply",
    "power of a power",
    "recurse",
    "10 GB",
    "10 GB in pieces",
    "format",
)


@contextmanager
def serving(folder: Path, source: str, *flags: str) -> Iterator[LauncherHandle]:
    path = folder / "template.jinja"
    path.write_text(source)
    with contained(None, "--tokenizer-config-path", str(path), *flags) as handle:
        yield handle


@pytest.fixture(scope="module")
def hostile_templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherHandle]:
    with serving(tmp_path_factory.mktemp("template"), TEMPLATE) as handle:
        yield handle
        assert "Chat requests will fail" not in handle.log


def workers(handle: LauncherHandle) -> list[psutil.Process]:
    found = []
    for process in handle.family():
        try:
            found += [process] if WORKER in process.cmdline() else []
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


async def tokenize(handle: LauncherHandle, content: str) -> tuple[int, float, str]:
    """The status, the time it took and the body."""
    body = {"messages": [{"role": "user", "content": content}]}
    async with handle.async_client() as client:
        began = time.monotonic()
        response = await client.post("/chat_tokenize", json=body)
        return response.status_code, time.monotonic() - began, response.text


@pytest.mark.parametrize("content", HOSTILE)
def test_each_is_refused_in_time(hostile_templates: LauncherHandle, content: str) -> None:
    status, seconds, text = asyncio.run(tokenize(hostile_templates, content))
    assert status == 422 and "template_error" in text
    assert seconds < ANSWER_S
    assert asyncio.run(tokenize(hostile_templates, "fine"))[0] == 200
    assert_nothing_runs(hostile_templates)


def test_neighbours_are_unharmed(hostile_templates: LauncherHandle) -> None:
    async def attack() -> None:
        for content in HOSTILE:
            status, seconds, _ = await tokenize(hostile_templates, content)
            assert status == 422 and seconds < START_AND_ANSWER_S

    check_unharmed(hostile_templates, lambda: asyncio.run(attack()))
    assert_nothing_runs(hostile_templates)


def test_chats_go_on_beside_one_that_hangs(hostile_templates: LauncherHandle) -> None:
    async def attack() -> None:
        await tokenize(hostile_templates, "fine")
        hanging = asyncio.create_task(tokenize(hostile_templates, "loop"))
        await asyncio.sleep(0.2)
        for n in range(5):
            status, seconds, _ = await tokenize(hostile_templates, f"fine {n}")
            assert status == 200 and seconds < 2
        assert (await hanging)[0] == 422

    asyncio.run(attack())


def test_many_that_hang_are_bounded(hostile_templates: LauncherHandle) -> None:
    async def attack() -> list[tuple[int, float, str]]:
        return await asyncio.gather(*(tokenize(hostile_templates, "loop") for _ in range(16)))

    answers = asyncio.run(attack())
    assert {status for status, _, _ in answers} == {422, 429}
    assert max(seconds for _, seconds, _ in answers) < 12
    # The one that starts the others, and two that render.
    assert len(workers(hostile_templates)) <= 3
    assert asyncio.run(tokenize(hostile_templates, "fine"))[0] == 200
    assert_nothing_runs(hostile_templates)


def test_none_is_left_behind_a_router_that_is_killed(tmp_path: Path) -> None:
    server = serving(tmp_path, TEMPLATE, "--no-restart")
    with pytest.raises(AssertionError, match="ended with code"), server as it:

        async def attack() -> None:
            hanging = asyncio.create_task(tokenize(it, "loop"))
            while not any(worker.cpu_times().user > 0.5 for worker in workers(it)):
                await asyncio.sleep(0.02)
            found = workers(it)
            it.child("text-generation-router").kill()
            await asyncio.gather(hanging, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: all(map(has_ended, found)), 2, "they end")

        asyncio.run(attack())
        it.wait_for_exit()


def test_a_template_that_does_not_even_compile_is_told_at_start(tmp_path: Path) -> None:
    with serving(tmp_path, "{{ 9 ** (9 ** 8) }}") as handle:
        wait_until(lambda: "Chat requests will fail" in handle.log, 10, "it is told")
        [line] = [line for line in handle.log.splitlines() if "Chat requests will" in line]
        assert " WARN " in line and "did not end within 2 s" in line
        assert handle.generate("a", max_new_tokens=2)["generated_text"]
        status, seconds, _ = asyncio.run(tokenize(handle, "a"))
        assert status == 422 and seconds < ANSWER_S
        assert_nothing_runs(handle)


def assert_nothing_runs(handle: LauncherHandle) -> None:
    """Within a second after the answer no process is busy any more."""

    def is_quiet() -> bool:
        before, began = cpu_seconds(handle), time.monotonic()
        time.sleep(0.3)
        return cpu_seconds(handle) - before < 0.5 * (time.monotonic() - began)

    wait_until(is_quiet, 5, "no process of the server computes")
