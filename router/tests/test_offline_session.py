import asyncio
import errno

import pytest
from text_generation_router.config import RouterConfig
from text_generation_router.offline import session
from text_generation_router.offline.session import Session
from text_generation_router.services import StartError

from router.tests.serving import assemble_scripted

CONFIG = RouterConfig(tokenizer_name="unused")


@pytest.fixture
def loops(tmp_path, monkeypatch):
    """Sessions start on scripted shards; the loops in which they began and ended."""
    entered, left = [], []

    class Start:
        def __init__(self, config):
            assert config is CONFIG

        async def __aenter__(self):
            entered.append(asyncio.get_running_loop())
            return assemble_scripted(tmp_path)

        async def __aexit__(self, *_):
            left.append(asyncio.get_running_loop())

    monkeypatch.setattr(session, "start", Start)
    return entered, left


def test_work_runs_in_its_own_loop_and_ends_with_it(loops):
    entered, left = loops
    running = Session(CONFIG)

    async def where():
        return asyncio.get_running_loop()

    assert running.submit(where()).result(5) is entered[0]
    forever = running.submit(asyncio.sleep(3600))
    running.close()
    assert left == entered
    assert forever.cancelled()
    running.close()


async def test_beside_a_loop_that_runs(loops):
    running = Session(CONFIG)
    assert loops[0] != [asyncio.get_running_loop()]
    await asyncio.to_thread(running.close)


def test_a_start_that_fails(monkeypatch):
    class Start:
        def __init__(self, config):
            raise StartError("no shards")

    monkeypatch.setattr(session, "start", Start)
    with pytest.raises(StartError, match="no shards"):
        Session(CONFIG)


def test_only_the_known_noise_of_grpc_is_ignored(caplog):
    empty = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    noise = {"message": "Exception in callback PollerCompletionQueue._handle_events()"}
    loop = asyncio.new_event_loop()
    session._ignore_other_loops(loop, noise | {"exception": empty})
    assert caplog.records == []
    session._ignore_other_loops(loop, noise | {"exception": ValueError()})
    session._ignore_other_loops(loop, {"message": "something else", "exception": empty})
    assert len(caplog.records) == 2
    loop.close()
