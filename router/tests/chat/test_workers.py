"""Templates that work, fail, hang and crash, in the processes that render them."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from text_generation_router.chat import template as workers_module
from text_generation_router.chat.template import ChatTemplate, TemplateWorkers
from text_generation_router.errors import (
    ShuttingDownError,
    TemplateError,
    UnhealthyError,
)

from integration_tests.server import workers_of

# Renders the first message, or runs what it names.
TEMPLATE = """
{%- set it = messages[0].content -%}
{%- if it == "memory" %}{{ "a" * 10 ** 10 }}
{%- elif it == "recurse" %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- elif it == "raise" %}{{ raise_exception("no" * 10000) }}
{%- elif it == "half" %}{{ "\\ud800" }}
{%- else %}{{ it }}{{ eos_token }}{% endif -%}
"""


MAX_SECONDS = 0.5


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateWorkers]:
    found = TemplateWorkers()
    found.begin(ChatTemplate({"default": TEMPLATE}, {"eos_token": "</s>"}), tries=False)
    monkeypatch.setattr(workers_module, "MAX_SECONDS", MAX_SECONDS)
    yield found
    found.close()


def processes() -> list[psutil.Process]:
    """The processes that render for this one."""
    return workers_of("text_generation_router.chat.rendering")


async def render(workers: TemplateWorkers, content: Any = "hi", **kwargs: Any) -> str:
    message = {"role": "user", "content": content}
    return await workers.render(lambda: ({"messages": [message], "tools": None}, kwargs))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("memory", "the template needs more than 1024 MiB"),
        ("recurse", "RecursionError: "),
        ("raise", "nono"),
        ("half", "the prompt has characters that are not valid Unicode"),
    ],
)
async def test_an_error_of_the_template_is_a_sentence(
    workers: TemplateWorkers, content: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "MAX_SECONDS", 5)
    with pytest.raises(TemplateError) as caught:
        await render(workers, content)
    assert str(caught.value).startswith(expected) and len(str(caught.value)) <= 500
    assert await render(workers) == "hi</s>"


@pytest.mark.parametrize("kwargs", [{"x": object()}, {"messages": 1}])
async def test_variables_that_can_not_be_given_are_an_error(
    workers: TemplateWorkers, kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TemplateError, match=r"must be JSON|messages"):
        await render(workers, **kwargs)
    assert await render(workers) == "hi</s>"


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
async def test_a_process_that_does_not_start_is_unhealthy(
    workers: TemplateWorkers, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(UnhealthyError):
            await render(workers)
    assert await render(workers) == "hi</s>"


async def test_closing_while_one_starts_is_no_failure(
    workers: TemplateWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    starting = asyncio.create_task(render(workers))
    while not processes():
        await asyncio.sleep(0.01)
    workers.close()
    with pytest.raises(ShuttingDownError):
        await starting
    assert not caplog.records


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[0].content }}", None),
        ("{% if %}", "a short chat: Template error: syntax error"),
        ("{% if tools %}{{ 1 / 0 }}{% endif %}", "a short chat with a tool: Template error"),
    ],
)
async def test_templates_are_tried_at_the_start(
    source: str,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_module, "NUM_WORKERS", 1)
    monkeypatch.setattr(workers_module, "MAX_SECONDS", MAX_SECONDS)
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
