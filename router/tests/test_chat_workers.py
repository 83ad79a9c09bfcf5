"""Templates that work, fail, hang and crash, in the processes that render them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from text_generation_router.chat import workers as workers_module
from text_generation_router.chat.template import ChatTemplate
from text_generation_router.chat.workers import TemplateWorkers
from text_generation_router.errors import (
    OverloadedError,
    ShuttingDownError,
    TemplateError,
    UnhealthyError,
)

# Renders the first message, or runs what it names.
TEMPLATE = """
{%- set it = messages[0].content -%}
{%- if it == "hang" %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif it == "pow" %}{{ 9 ** (n ** 8) }}
{%- elif it == "sort" %}{{ (range(99999) | list * 200) | sort | length }}
{%- elif it == "memory" %}{{ "a" * 10 ** 10 }}
{%- elif it == "format" %}{{ "%02000000000d" | format(1) }}
{%- elif it == "recurse" %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- elif it == "raise" %}{{ raise_exception("no" * 10000) }}
{%- elif it == "half" %}{{ "\\ud800" }}
{%- else %}{{ it }}{{ eos_token }}{% endif -%}
"""


@pytest.fixture
def workers() -> Iterator[TemplateWorkers]:
    found = TemplateWorkers(ChatTemplate({"default": TEMPLATE}, {"eos_token": "</s>"}))
    yield found
    found.close()
    assert not children()


def children() -> list[psutil.Process]:
    """Workers of this process and their children; not those of a server that another test file has
    started in this process."""
    found = psutil.Process().children()
    name = "text_generation_router.chat.rendering"
    workers = [child for child in found if name in child.cmdline()]
    return workers + [child for worker in workers for child in worker.children(recursive=True)]


async def render(workers: TemplateWorkers, content: Any = "hi", **kwargs: Any) -> str:
    message = {"role": "user", "content": content}
    return await workers.render(lambda: ({"messages": [message], "tools": None}, kwargs))


async def test_a_worker_is_used_again(workers: TemplateWorkers) -> None:
    assert not children()
    assert await render(workers) == "hi</s>"
    [process] = children()
    assert await render(workers, "é🦀" * 1_000_000) == "é🦀" * 1_000_000 + "</s>"
    assert children() == [process]


@pytest.mark.parametrize("content", ["hang", "pow", "sort"])
@pytest.mark.slow
async def test_one_that_does_not_end_is_killed(workers: TemplateWorkers, content: str) -> None:
    await render(workers)
    [process] = children()
    began = time.monotonic()
    with pytest.raises(TemplateError, match="did not end within 2 s"):
        await render(workers, content, n=9)
    assert time.monotonic() - began < 3
    assert await render(workers) == "hi</s>"
    process.wait(5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("memory", "the template needs more than 1024 MiB"),
        ("format", "the template needs more than 1024 MiB"),
        ("recurse", "RecursionError: "),
        ("raise", "nono"),
        ("half", "the prompt has characters that are not valid Unicode"),
    ],
)
async def test_what_fails_leaves_the_worker(
    workers: TemplateWorkers, content: str, expected: str
) -> None:
    await render(workers)
    [process] = children()
    with pytest.raises(TemplateError) as caught:
        await render(workers, content)
    assert str(caught.value).startswith(expected) and len(str(caught.value)) <= 500
    assert await render(workers) == "hi</s>"
    assert children() == [process]


async def test_constants_are_folded_there(workers: TemplateWorkers) -> None:
    workers.template = ChatTemplate({"default": "{{ 9 ** (9 ** 8) }}"}, {})
    with pytest.raises(TemplateError, match="did not end within 2 s"):
        await render(workers)


@pytest.mark.parametrize("kwargs", [{"x": object()}, {"messages": 1}])
async def test_what_can_not_be_given(workers: TemplateWorkers, kwargs: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match=r"must be JSON|messages"):
        await render(workers, **kwargs)
    assert await render(workers) == "hi</s>"


async def test_others_go_on_beside_one_that_hangs(workers: TemplateWorkers) -> None:
    await render(workers)
    hanging = asyncio.create_task(render(workers, "hang"))
    await asyncio.sleep(0)
    texts = await asyncio.gather(*(render(workers, str(n)) for n in range(50)))
    assert texts == [f"{n}</s>" for n in range(50)] and not hanging.done()
    with pytest.raises(TemplateError):
        await hanging


@pytest.mark.slow
async def test_waiting_is_bounded(
    workers: TemplateWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "MAX_WAIT_S", 0.5)
    await asyncio.gather(render(workers), render(workers))
    hanging = [asyncio.create_task(render(workers, "hang")) for _ in range(2)]
    await asyncio.sleep(0)
    left = asyncio.create_task(render(workers))
    with pytest.raises(OverloadedError) as caught:
        await render(workers)
    assert caught.value.retry_after_s == 2
    left.cancel()
    results = await asyncio.gather(*hanging, left, return_exceptions=True)
    assert [type(one) for one in results] == [TemplateError, TemplateError, OverloadedError] or (
        isinstance(results[2], asyncio.CancelledError)
    )


async def test_one_that_was_killed_is_replaced(workers: TemplateWorkers) -> None:
    await render(workers)
    [process] = children()
    process.kill()
    process.wait(5)
    assert await render(workers) == "hi</s>"
    hanging = asyncio.create_task(render(workers, "hang"))
    while psutil.Process(children()[0].pid).cpu_times().user < 0.3:
        await asyncio.sleep(0.01)
    children()[0].kill()
    with pytest.raises(TemplateError, match="the process that rendered the template died"):
        await hanging


async def test_none_can_be_started(
    workers: TemplateWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UnhealthyError):
        await render(workers)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UnhealthyError):
        await render(workers)
    monkeypatch.undo()
    assert await render(workers) == "hi</s>"


async def test_closing_while_one_starts_is_no_failure(
    workers: TemplateWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    starting = asyncio.create_task(render(workers))
    while not workers._workers:
        await asyncio.sleep(0)
    workers.close()
    with pytest.raises(ShuttingDownError):
        await starting
    assert not caplog.records


async def test_closing_ends_what_runs(workers: TemplateWorkers) -> None:
    await render(workers)
    hanging = asyncio.create_task(render(workers, "hang"))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await asyncio.to_thread(workers.close)
    assert time.monotonic() - began < 1
    with pytest.raises(ShuttingDownError):
        await hanging
    workers.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[0].content }}", None),
        ("{% if %}", "a short chat: Template error: syntax error"),
        ("{% if tools %}{{ 1 / 0 }}{% endif %}", "a short chat with a tool: Template error"),
        ("{{ 9 ** (9 ** 8) }}", "a short chat: Template error: the template did not end"),
    ],
)
@pytest.mark.slow
async def test_templates_are_tried_out(
    source: str,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_module, "NUM_WORKERS", 1)
    workers = TemplateWorkers()
    try:
        workers.begin(ChatTemplate({"default": source}, {}))
        # Runs after the trial.
        with suppress(TemplateError):
            await render(workers)
    finally:
        workers.close()
    told = [r.getMessage() for r in caplog.records if "Chat requests will" in r.getMessage()]
    assert len(told) == (said is not None)
    assert said is None or said in told[0]


def test_none_is_left_behind_a_parent_that_is_killed() -> None:
    program = (
        "import asyncio, sys\n"
        "from text_generation_router.chat.workers import TemplateWorkers\n"
        "from text_generation_router.chat.template import ChatTemplate\n"
        "source = '{{ 9 ** ((messages | length + 8) ** 8) }}'\n"
        "workers = TemplateWorkers(ChatTemplate({'default': source}, {}))\n"
        "job = {'messages': [1], 'tools': None}\n"
        "asyncio.run(workers.render(lambda: (job, {})))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        grandchildren: list[psutil.Process] = []
        while not grandchildren or grandchildren[0].cpu_times().user < 0.5:
            assert time.monotonic() < deadline
            grandchildren = psutil.Process(parent.pid).children()
            time.sleep(0.01)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 1
    while any(one.is_running() and one.status() != "zombie" for one in grandchildren):
        assert time.monotonic() < deadline
