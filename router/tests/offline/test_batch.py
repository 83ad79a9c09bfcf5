"""A file of requests through the real routes, on shards that write a script."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from text_generation_router.app import create_app
from text_generation_router.errors import GenerationError
from text_generation_router.offline.batch import (
    Batch,
    BatchError,
    LineError,
    ResultsFile,
    error_line,
    read_lines,
    read_request,
    response_line,
)
from text_generation_router.offline.bulk import Tally

from router.tests.serving import assemble_scripted


def line(custom_id, url, body):
    """A line of the input."""
    return json.dumps({"method": "POST", "url": url, "body": body, "custom_id": custom_id})


def completion(custom_id, **body):
    """A line that asks for six tokens."""
    return line(custom_id, "/v1/completions", {"prompt": "x", "max_tokens": 6} | body)


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
        tally = Tally(0, done=num_there, failed=results.num_failed)
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
        line("g", "/v1/responses", {"input": "hi", "max_output_tokens": 6}),
        line("h", "/v1/embeddings", {"input": ["ab", "c"], "encoding_format": "float"}),
    ]
    async with rig(tmp_path, any_model_name=False) as the:
        tally = await the.run(*lines)
    results = the.results()
    assert [one["custom_id"] for one in results] == ["a", None, "c", "d", "a", "f", "g", "h"]
    codes = [one["response"] and one["response"]["status_code"] for one in results]
    # No chat template here: /v1/responses says so.
    assert codes == [200, None, 400, 404, None, 200, 400, 200]
    assert results[0]["response"]["body"]["choices"][0]["text"] == "hello "
    assert results[1]["error"]["code"] == "invalid_json_line"
    assert "error" in results[2]["response"]["body"] and results[2]["error"] is None
    assert results[4]["error"]["code"] == "duplicate_custom_id"
    assert len(results[5]["response"]["body"]["choices"]) == 2
    vectors = [one["embedding"] for one in results[7]["response"]["body"]["data"]]
    assert [len(one) for one in vectors] == [4, 4]
    assert len({one["id"] for one in results}) == len(results)
    assert (tally.done, tally.failed, tally.tokens) == (8, 5, 6 + 24)


async def test_a_step_that_fails_is_one_result_shards_that_are_gone_are_none(tmp_path: Path):
    async with rig(tmp_path) as the:
        the.services.shards.failure = GenerationError("Server error: gone")
        with pytest.raises(BatchError, match="run the batch again to continue"):
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
        assert results.check_same(source) == 2
    else:
        with pytest.raises(BatchError, match="results of other requests"):
            results.check_same(source)
    results.close()


GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def encoded(**changes):
    """GOOD as a line, with changes; None leaves a field out."""
    return json.dumps({k: v for k, v in (GOOD | changes).items() if v is not None}).encode()


@pytest.mark.parametrize(
    "line, code, custom_id",
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (encoded(custom_id=None), "missing_custom_id", None),
        (encoded(custom_id=""), "missing_custom_id", None),
        (encoded(method="GET"), "invalid_method", "a"),
        (encoded(url="/v1/models"), "invalid_url", "a"),
        (encoded(body=[]), "invalid_body", "a"),
        (encoded(body={"prompt": "x", "stream": True}), "invalid_body", "a"),
    ],
)
def test_a_line_that_is_no_request_is_an_error(line, code, custom_id):
    with pytest.raises(LineError) as caught:
        read_request(line)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    result = json.loads(error_line(caught.value))
    assert result["id"].startswith("batch_req_")
    assert (result["custom_id"], result["response"]) == (custom_id, None)
    assert result["error"] == {"code": code, "message": str(caught.value)}


def test_blank_lines_and_a_byte_order_mark_are_nothing(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\r\n\n   \n{2}")
    assert list(read_lines(path)) == [b"{1}", b"{2}"]


def test_a_result_is_one_line_for_every_reader():
    body = orjson.dumps({"text": "a\x85b\u2028c\u2029d\x0b中"})
    lines = response_line("a", 200, body).decode().splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    assert list(result) == ["id", "custom_id", "response", "error"]
    response = result["response"]
    assert (response["status_code"], response["body"]) == (200, json.loads(body))
    assert response["request_id"].startswith("req_") and result["error"] is None


def test_a_torn_last_line_is_cut_wherever_it_is_torn(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    whole = response_line("a", 200, b"{}")
    torn = response_line("b", 200, '{"text": "é"}'.encode())
    for length in range(len(torn)):
        path.write_bytes(whole + torn[:length])
        results = ResultsFile(path)
        assert results.custom_ids == ["a"]
        results.append(torn)
        results.close()
        assert path.read_bytes() == whole + torn


def test_a_file_that_another_batch_writes_or_nobody_can(tmp_path: Path):
    first = ResultsFile(tmp_path / "out.jsonl")
    with pytest.raises(BatchError, match="is being written by another batch"):
        ResultsFile(tmp_path / "out.jsonl")
    first.close()
    ResultsFile(tmp_path / "out.jsonl").close()
    with pytest.raises(BatchError, match="can not be written: Is a directory"):
        ResultsFile(tmp_path)
