"""A file of requests through the real routes, on shards that write a script."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from text_generation_router.app import create_app
from text_generation_router.errors import GenerationError
from text_generation_router.offline.asgi import post
from text_generation_router.offline.batch import Batch, ShardsLostError
from text_generation_router.offline.batch_cli import check_same, main
from text_generation_router.offline.batch_file import (
    BatchFileError,
    LineError,
    ResultsFile,
    error_line,
    response_line,
)
from text_generation_router.offline.progress import Tally

from router.tests.serving import assemble_scripted


@pytest.fixture
def infer_logger() -> Iterator[None]:
    """Puts the level back that `main` changes for its process."""
    logger = logging.getLogger("text_generation_router.infer")
    level = logger.level
    yield
    logger.setLevel(level)


def completion(custom_id, **body):
    """A line that asks for six tokens."""
    asked = {"prompt": "x", "max_tokens": 6} | body
    record = {"method": "POST", "url": "/v1/completions", "body": asked, "custom_id": custom_id}
    return json.dumps(record)


class Rig:
    """Files in a folder, and an app that is up."""

    def __init__(self, folder: Path, app, services) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.app, self.services = app, services

    async def run(self, *lines) -> Tally:
        """Answers the lines (those of before, if there are none) that have no result yet."""
        if lines:
            self.source.write_text("\n".join(lines) + "\n")
        results = ResultsFile(self.target)
        num_there = len(results.custom_ids)
        tally = Tally(0, done=num_there, failed=results.num_failed, first=num_there)
        try:
            await Batch(self.app, self.services, self.source, results).run(tally)
        finally:
            results.close()
        return tally

    def results(self):
        """What was written."""
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@asynccontextmanager
async def rig(folder: Path, **options):
    """At the end nothing may be left on the shards."""
    services = assemble_scripted(folder, "hello ", **{"max_concurrent_requests": 1000} | options)
    app = create_app(services.config, services)
    async with app.router.lifespan_context(app):
        yield Rig(folder, app, services)
        for _ in range(200):
            if not services.shards.rows:
                break
            await asyncio.sleep(0.01)
        assert not services.shards.rows
        assert services.infer.free_permits == services.config.max_concurrent_requests


async def test_every_line_has_its_result_in_order(tmp_path: Path):
    lines = [
        completion("a"),
        "{bad",
        completion("c", max_tokens=0),
        completion("d", model="another"),
        completion("a"),
        completion("f", max_tokens=12, n=2),
        json.dumps(
            {
                "custom_id": "g",
                "method": "POST",
                "url": "/v1/responses",
                "body": {"input": "hi", "max_output_tokens": 6},
            }
        ),
    ]
    async with rig(tmp_path, any_model_name=False) as the:
        tally = await the.run(*lines)
    results = the.results()
    assert [one["custom_id"] for one in results] == ["a", None, "c", "d", "a", "f", "g"]
    codes = [one["response"] and one["response"]["status_code"] for one in results]
    # No chat template here: /v1/responses says so.
    assert codes == [200, None, 400, 404, None, 200, 400]
    assert results[0]["response"]["body"]["choices"][0]["text"] == "hello "
    assert results[1]["error"]["code"] == "invalid_json_line"
    assert "error" in results[2]["response"]["body"] and results[2]["error"] is None
    assert results[4]["error"]["code"] == "duplicate_custom_id"
    assert len(results[5]["response"]["body"]["choices"]) == 2
    assert len({one["id"] for one in results}) == len(results)
    assert (tally.done, tally.failed, tally.tokens) == (7, 5, 6 + 24)


async def test_texts_are_embedded(tmp_path: Path):
    body = {"input": ["ab", "c"], "encoding_format": "float"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    async with rig(tmp_path) as the:
        tally = await the.run(json.dumps(line))
    [result] = the.results()
    assert [len(one["embedding"]) for one in result["response"]["body"]["data"]] == [4, 4]
    assert (tally.done, tally.failed, tally.tokens) == (1, 0, 0)


async def test_more_lines_than_there_is_room_for(tmp_path: Path):
    lines = [completion(str(n), max_tokens=1 + n % 7) for n in range(60)]
    async with rig(tmp_path, max_batch_size=2) as the:
        await the.run(*lines)
    assert [one["custom_id"] for one in the.results()] == [str(n) for n in range(60)]
    texts = [one["response"]["body"]["choices"][0]["text"] for one in the.results()]
    assert texts == [("hello " * 2)[: 1 + n % 7] for n in range(60)]


async def test_an_interrupted_run_continues_where_it_stopped(tmp_path: Path):
    lines = [completion(str(n), max_tokens=4 + n) for n in range(20)]
    async with rig(tmp_path, max_batch_size=2) as the:
        the.source.write_text("\n".join(lines))
        the.services.shards.delay_s = 0.001
        run = asyncio.create_task(the.run())
        while not (the.target.exists() and the.target.read_bytes().count(b"\n") >= 5):
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        kept = the.target.read_bytes()
        assert 5 <= kept.count(b"\n") < 20
        the.target.write_bytes(kept + b'{"id": "batch_req_torn", "cus')
        tally = await the.run()
        assert the.target.read_bytes().startswith(kept), "nothing is answered twice"
    assert [one["custom_id"] for one in the.results()] == [str(n) for n in range(20)]
    assert (tally.done, tally.first) == (20, kept.count(b"\n"))


async def test_a_step_that_fails_is_one_result_shards_that_are_gone_are_none(tmp_path: Path):
    async with rig(tmp_path) as the:
        the.services.shards.failure = GenerationError("Server error: gone")
        with pytest.raises(ShardsLostError, match="run the batch again to continue"):
            await the.run(completion("a"), completion("b"))
        assert the.results() == []
        await the.services.batcher.probe()
        the.services.shards.failure = None

        async def healthy() -> None:
            return None

        health, the.services.shards.health = the.services.shards.health, healthy
        the.services.shards.failure = GenerationError("Server error: odd")
        await the.run()
        assert [one["response"]["status_code"] for one in the.results()] == [500, 500]
        the.services.shards.health, the.services.shards.failure = health, None


async def test_a_bug_in_a_route_is_one_result():
    async def broken(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await post(broken, "/v1/completions", b"{}")


async def test_the_body_of_a_request_comes_once_and_the_client_stays():
    async def echo(scope, receive, send):
        first = await receive()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.01)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": first["body"], "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    answer = await post(echo, "/x", b"hi")
    assert (answer.status_code, answer.body) == (201, b"hi!")


@pytest.mark.parametrize(
    "there, is_same",
    [([], True), (["a"], True), (["a", None], True), (["b"], False), (["a", None, "c"], False)],
)
def test_results_of_other_requests_are_not_continued(tmp_path: Path, there, is_same):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(completion("a") + "\n\n{bad\n")
    results = ResultsFile(target)
    for custom_id in there:
        bad = error_line(LineError("invalid_json_line", "x"))
        results.append(bad if custom_id is None else response_line(custom_id, 200, b"{}"))
    results.close()
    results = ResultsFile(target)
    if is_same:
        assert check_same(source, results, target) == 2
    else:
        with pytest.raises(BatchFileError, match="results of other requests"):
            check_same(source, results, target)
    results.close()


@pytest.mark.parametrize(
    "results, code",
    [
        ([response_line("a", 200, b"{}")], 0),
        ([response_line("a", 404, b"{}")], 3),
        ([response_line("b", 200, b"{}")], 1),
    ],
)
def test_exit_codes_of_a_file_that_is_done(tmp_path: Path, results, code, capfd, infer_logger):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(completion("a"))
    target.write_bytes(b"".join(results))
    files = [f"--input={source}", f"--output={target}"]
    assert main([*files, "--tokenizer-name=nowhere"]) == code
    assert ("other requests" in capfd.readouterr().out) == (code == 1)
