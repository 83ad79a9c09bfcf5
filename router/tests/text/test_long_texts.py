"""Long texts: the same tokens, from a process that may end at any time."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from text_generation_router.errors import RouterError
from text_generation_router.text import tokenizer as tokenizer_module
from text_generation_router.text.encoding import Encoding
from text_generation_router.text.tokenizer import Tokenizer
from tokenizers import processors

from router.tests.text.test_tokenizer import byte_level

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
    tokenizer = Tokenizer.load(tmp_path)
    yield tokenizer
    tokenizer.close()


def runners() -> list[psutil.Process]:
    """The processes that tokenize for this one."""
    name = "text_generation_router.text.tokenizer"
    found = [one for one in psutil.Process().children() if name in one.cmdline()]
    return [runner for server in found for runner in server.children()]


async def test_tokens_do_not_depend_on_the_process(tokenizer: Tokenizer) -> None:
    for length in (200, 280, len(TEXT)):
        text = TEXT[:length]
        expected = Encoding.of(tokenizer._tokenizer.encode(text))
        assert not runners()
        assert await tokenizer.encode(text) == expected
        ids = await tokenizer.token_ids(text)
        assert list(ids) == list(expected.ids)
        plain = await tokenizer.token_ids(text, add_special_tokens=False)
        assert list(plain) == list(ids)[1:-1]
    assert len(runners()) == 1
    with pytest.raises(ValueError, match="surrogates"):
        await tokenizer.encode("\ud800" * 1000)


async def test_a_process_that_dies_fails_its_text_alone(tokenizer: Tokenizer) -> None:
    expected = await tokenizer.encode(TEXT)
    [runner] = runners()
    os.kill(runner.pid, signal.SIGSTOP)
    failing = asyncio.create_task(tokenizer.token_ids(TEXT))
    async with asyncio.timeout(20):
        # The text is in the socket, which the stopped process does not read.
        while not tokenizer._worker or tokenizer._worker._idle:
            await asyncio.sleep(0.01)
    runner.kill()
    with pytest.raises(RouterError, match="could not be tokenized"):
        await failing
    assert await tokenizer.encode(TEXT) == expected


async def test_short_texts_do_not_wait_for_long_ones(tokenizer: Tokenizer) -> None:
    await tokenizer.encode(TEXT)
    [runner] = runners()
    os.kill(runner.pid, signal.SIGSTOP)
    long = [asyncio.create_task(tokenizer.token_ids(TEXT)) for _ in range(30)]
    await asyncio.sleep(0)
    assert len(await tokenizer.token_ids("x" * 280)) > 10
    # A cancelled call frees its place.
    for one in long[1:-1]:
        one.cancel()
    os.kill(runner.pid, signal.SIGCONT)
    assert list(await long[-1]) == list(await long[0])
    await asyncio.gather(*long, return_exceptions=True)
