"""What every router test gets."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fastapi.routing
import pytest

from router.tests.serving import KeptTemplates
from router.tests.virtual_time import VirtualTime, virtual_time_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share the `running` server of their module run in its event loop."""
    for item in items:
        if "running" in getattr(item, "fixturenames", ()) and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="session", autouse=True)
def routes_are_made_once() -> Iterator[None]:
    """All applications of a session share the models of their routes.

    FastAPI makes them again for each application, at its first request, which takes longer than
    most tests do; they depend on the route and on what it is included with.
    """
    contexts = getattr(fastapi.routing, "_EffectiveRouteContext", None)
    if contexts is None:  # an older FastAPI
        yield
        return
    make, made = contexts.from_api_route, dict[Any, Any]()

    def make_once(*, original_route: Any, include_context: Any) -> Any:
        dependencies = [each.dependency for each in include_context.dependencies]
        key = (id(original_route), include_context.prefix, *dependencies)
        if key not in made:
            context = make(original_route=original_route, include_context=include_context)
            # With the route, because another one could get its id.
            made[key] = (original_route, context)
        return made[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "from_api_route", make_once)
        yield


@pytest.fixture(scope="module", autouse=True)
def template_processes() -> Iterator[None]:
    """Those that the servers of a module share end with it."""
    yield
    KeptTemplates.close_all()


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Puts the loggers back as they were: `configure_logs` changes them for the process."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers, levels = root.handlers[:], (root.level, uvicorn.level)
    streams = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = streams
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    uvicorn.setLevel(levels[1])


@pytest.fixture
async def clock() -> AsyncIterator[VirtualTime]:
    """The test's loop has virtual time."""
    with virtual_time_of(asyncio.get_running_loop()) as clock:
        yield clock
