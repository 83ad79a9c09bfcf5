"""A whole router on a real port, on top of shards that write a scripted text."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import pytest_asyncio
import uvicorn
from text_generation_router.app import create_app, create_closed
from text_generation_router.chat.template import ChatTemplate, TemplateWorkers
from text_generation_router.config import RouterConfig
from text_generation_router.edge.connection import ConnectionLimits, Connections
from text_generation_router.edge.front import Front
from text_generation_router.server import Certificate, bind, server_config
from text_generation_router.services import Services, assemble
from text_generation_router.text.tokenizer import Tokenizer

from router.tests.fake_shards import INFO, WARMUP, FakeShards
from router.tests.scheduling import check_integrity
from router.tests.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, script_of, write_tokenizer
from router.tests.waiting import until

__all__ = ["BOS_ID", "EOS_ID", "VOCAB_SIZE", "script_of", "write_tokenizer"]

PATIENCE_S = 60.0
"""For an answer that does not come; only a failing test waits so long."""


class ScriptedShards(FakeShards):
    """The shards of `assemble_scripted`: they write `script` over and over."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(num_blocks=1024, block_size=16, script=script)


@dataclass(frozen=True, slots=True)
class Server:
    """A running router and a client for it."""

    services: Services
    shards: ScriptedShards
    client: httpx.AsyncClient
    port: int

    def start_over(self, text: str, *, ends: bool = False) -> "Server":
        """As it came, for the next test of a module: it writes `text`, and ends if `ends`."""
        shards = self.shards
        shards.script = [*script_of(text), *([EOS_ID] if ends else ())]
        shards.delay_s, shards.failure, shards.is_stuck = 0.0, None, False
        return self

    async def settle(self) -> None:
        """Waits until nothing runs, then asserts that nothing was lost."""
        permits = self.services.config.max_concurrent_requests
        await until(lambda: self.services.infer.free_permits == permits)
        await until(lambda: not self.shards.rows)
        await until(lambda: self.services.metrics.kv_blocks_used.value == 0)
        check_integrity(self.services.batcher.planner)


class KeptTemplates(TemplateWorkers):
    """Serve all tests of a module that have the same template, since to start a process takes
    longer than a test. Owned by `kept`, which the end of the module empties."""

    kept: ClassVar[dict[str, "KeptTemplates"]] = {}

    @classmethod
    def of(cls, template: ChatTemplate | None) -> TemplateWorkers:
        """The workers of the template."""
        if template is None:
            return TemplateWorkers()
        key = repr((template.sources, template.special_tokens))
        if key not in cls.kept:
            cls.kept[key] = cls()
            cls.kept[key].begin(template, tries=False)
        return cls.kept[key]

    def close(self) -> None:
        """Not at the end of a server."""

    @classmethod
    def close_all(cls) -> None:
        """Ends their processes."""
        for workers in cls.kept.values():
            super(KeptTemplates, workers).close()
        cls.kept.clear()


def assemble_scripted(directory: Path, text: str = "hello ", **options: Any) -> Services:
    """Services on top of shards that write `text`; puts a tokenizer into `directory`."""
    words = ("yes", "no") if options.get("reranker") else ()
    write_tokenizer(directory, words)
    config = RouterConfig(tokenizer_name=str(directory), **options)
    shards = ScriptedShards(script_of(text))
    info = replace(INFO, vocab_size=VOCAB_SIZE + len(words), hidden_size=shards.width)
    warmup = replace(
        WARMUP,
        num_blocks=shards.num_blocks,
        max_input_tokens=config.max_input_tokens or WARMUP.max_input_tokens,
        max_total_tokens=config.max_total_tokens or WARMUP.max_total_tokens,
    )
    tokenizer = Tokenizer.load(directory)
    path = config.tokenizer_config_path
    workers = KeptTemplates.of(ChatTemplate.load(directory, None if path is None else Path(path)))
    return assemble(config, shards, tokenizer, info, warmup, workers)


@asynccontextmanager
async def serve(
    directory: Path,
    text: str = "hello ",
    limits: ConnectionLimits | None = None,
    certificate: Certificate | None = None,
    chat_template: str | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Runs the router in this event loop, and checks at the end that nothing was lost."""
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    services = assemble_scripted(directory, text, **options)
    app = create_app(services.config, services)
    front = Front(create_closed(services.config, services.state))
    front.app = app
    limits = limits or ConnectionLimits.of(services.config.payload_limit)
    connections = Connections(limits, services.metrics.connections_refused)
    config = server_config(front, connections, certificate)
    config.load()
    server = uvicorn.Server(config)
    # What `Server.serve` does, without its signal handlers and its sleeps.
    server.lifespan = config.lifespan_class(config)
    lifespan = app.router.lifespan_context(app)
    await lifespan.__aenter__()
    with bind("127.0.0.1", 0) as listener:
        # Small, so that a client that does not read is noticed soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        port = listener.getsockname()[1]
        await server.startup(sockets=[listener.dup()])
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENCE_S) as client:
            assert isinstance(services.shards, ScriptedShards)
            running = Server(services, services.shards, client, port)
            yield running
            await running.settle()
    finally:
        for listening in server.servers:
            listening.close()
        await lifespan.__aexit__(None, None, None)
        services.tokenizer.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        services.templates.close()
        await asyncio.sleep(0)


def shared_server(make: Any, text: str, *, ends: bool = False, **options: Any) -> tuple[Any, Any]:
    """The fixtures `running`, one server for the tests of a module, which `make` makes, and
    `server`, the same as it came: it writes `text`, and ends if `ends`. The tests run in one event
    loop, see `conftest.py`."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module", name="running")
    async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
        async with make(tmp_path_factory.mktemp("model"), text, **options) as server:
            yield server

    @pytest.fixture(name="server")
    def server(running: Server) -> Server:
        return running.start_over(text, ends=ends)

    return running, server
