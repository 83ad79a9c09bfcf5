"""Long texts: the same tokens, from a process that may end at any time."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from text_generation_router import tokenizer as tokenizer_module
from text_generation_router.tokenizer import Tokenizer
from text_generation_router.tokenizer_process import LongTextError, TokenizerProcess
from tokenizers import processors

from router.tests.test_tokenizer import byte_level

TEXT = "Hello world, naïve café! 日本語 😀 <s> " * 40


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizer]:
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(name, fast.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(tokenizer_module, "LONG_TEXT", 300)
    monkeypatch.setattr(tokenizer_module, "_MOST_IDS_HERE", 600)
    monkeypatch.setattr(tokenizer_module, "_MOST_PLACES_HERE", 600)
    tokenizer = Tokenizer.load(tmp_path)
    yield tokenizer
    tokenizer.close()


def child_of(tokenizer: Tokenizer) -> TokenizerProcess:
    assert tokenizer._process is not None
    return tokenizer._process


async def test_the_same_in_every_lane(tokenizer: Tokenizer) -> None:
    for length in (200, 280, 500, len(TEXT)):
        text = TEXT[:length]
        expected = tokenizer._encode(text, True)
        assert await tokenizer.encode(text) == expected
        ids = await tokenizer.token_ids(text)
        assert (ids.count, ids.ids) == (len(expected.ids), tuple(expected.ids))
        last = await tokenizer.token_ids(text, most=3)
        assert (last.count, last.ids) == (ids.count, ids.ids[-3:])
        none = await tokenizer.token_ids(text, add_special_tokens=False, most=0)
        assert (none.count, none.ids) == (ids.count - 2, ())
    with pytest.raises(ValueError, match="surrogates"):
        await tokenizer.encode("\ud800" * 1000)


async def test_it_starts_when_it_is_needed_and_again(tokenizer: Tokenizer) -> None:
    process = child_of(tokenizer)
    await tokenizer.encode("short")
    assert process._child is None
    first = await tokenizer.encode(TEXT)
    assert process._child is not None
    pid = process._child.pid
    assert await tokenizer.encode(TEXT) == first
    assert process._child.pid == pid
    process._child.kill()
    async with asyncio.timeout(20):
        while process._child.is_alive:
            await asyncio.sleep(0.01)
    assert await tokenizer.encode(TEXT) == first
    assert process._child.pid != pid


async def test_one_that_dies_at_work_is_an_error(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = child_of(tokenizer)
    await tokenizer.encode(TEXT)
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGSTOP)
    connected, is_connected = process._connected, threading.Event()

    def connecting() -> socket.socket:
        connection = connected()
        is_connected.set()
        return connection

    monkeypatch.setattr(process, "_connected", connecting)
    waiting = asyncio.create_task(tokenizer.token_ids(TEXT))
    assert await asyncio.to_thread(is_connected.wait, 20)
    process._child.kill()
    with pytest.raises(LongTextError):
        await waiting
    assert (await tokenizer.token_ids(TEXT)).count > 100


async def test_short_texts_do_not_wait(tokenizer: Tokenizer) -> None:
    process = child_of(tokenizer)
    await tokenizer.encode(TEXT)
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGSTOP)
    long = [asyncio.create_task(tokenizer.token_ids(TEXT)) for _ in range(30)]
    await asyncio.sleep(0)
    assert (await tokenizer.token_ids("x" * 280)).count > 10
    # A cancelled call frees its place.
    for one in long[1:-1]:
        one.cancel()
    os.kill(process._child.pid, signal.SIGCONT)
    assert (await long[-1]).count == (await long[0]).count
    await asyncio.gather(*long, return_exceptions=True)
