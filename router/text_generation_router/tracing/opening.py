"""The traces of one router process."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp
from text_generation_process.tracing import open_tracer

from text_generation_router.tracing.requests import TracedApp, TracedRequests
from text_generation_router.tracing.steps import TraceableShards, TracedShards


class Tracing:
    """Wraps the application and the shards of a router, so that requests and steps are traced."""

    def __init__(self, requests: TracedRequests) -> None:
        self._requests = requests

    def around(self, app: ASGIApp) -> TracedApp:
        """The application, whose requests are traced."""
        return TracedApp(app, self._requests)

    def over(self, shards: TraceableShards) -> TracedShards:
        """The shards, whose steps are traced."""
        return TracedShards(shards, self._requests)


@contextmanager
def open_tracing(endpoint: str, service_name: str, version: str, model: str) -> Iterator[Tracing]:
    """Sends spans to the collector until the end of the block; see `open_tracer`."""
    with open_tracer(endpoint, service_name, version, {}) as tracer:
        yield Tracing(TracedRequests(tracer, model))
