"""`text-generation-benchmark --url` against servers that are slow, refuse, cut and fail."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_generation_benchmark import load as load_module
from text_generation_benchmark.cli import main

from benchmark.tests.load_server import (
    Answer,
    Json,
    Reply,
    Scripted,
    completion,
    event,
    json_reply,
    scripted,
)

MODELS = json_reply({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
NOT_THERE = json_reply({"error": "not found"}, 404)


@pytest.fixture(autouse=True)
def no_key_and_no_pause(monkeypatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(load_module, "PAUSE_AFTER_FAILURE_S", 0.0)


def openai(answer: Answer) -> Answer:
    """A server with /v1/models and /v1/completions alone."""

    def reply(path: str, body: Json) -> Reply:
        if path == "/v1/models":
            return MODELS
        return answer(path, body) if path == "/v1/completions" else NOT_THERE

    return reply


def load(server: Scripted, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was written as JSON."""
    output = folder / "load.json"
    where = ["--url", server.url, "-o", str(output), "--warmups", "0", "--output-tokens", "4"]
    code = main([*where, *flags])
    return code, json.loads(output.read_text()) if output.exists() else {}


def test_a_closed_loop(tmp_path: Path, capsys):
    def answer(_path: str, body: Json) -> Reply:
        return completion(body["max_tokens"], 2 * len(body["prompt"].split()), gap_s=0.02)

    with scripted(openai(answer)) as server:
        flags = ["--clients", "1", "3", "--requests", "6", "--input-tokens", "50", "--seed", "1"]
        code, report = load(server, tmp_path, *flags)
    assert (code, report["notes"]) == (0, [])
    assert report["parameters"]["api"] == "openai-completions"
    assert report["parameters"]["model"] == "first"
    one, three = report["points"]
    assert (one["clients"], three["clients"]) == (1, 3)
    for point in (one, three):
        assert (point["requests_ok"], point["requests_failed"], point["errors"]) == (6, 0, {})
        assert (point["output_tokens_got_p50"], point["input_tokens_got_p50"]) == (4, 50)
        assert point["output_tokens_counted_by"] == "server"
        assert 10 < point["itl_ms"]["p50"] < 100
        assert point["ttft_ms"]["p50"] < point["latency_ms"]["p50"]
        assert "ttft_from_due_ms" not in point
    assert one["elapsed_s"] > 6 * 4 * 0.02
    assert three["elapsed_s"] < 0.7 * one["elapsed_s"]
    bodies = server.bodies("/v1/completions")
    assert len({body["prompt"] for body in bodies}) == len(bodies) == 1 + 12
    for body in bodies[1:]:
        assert (body["model"], body["temperature"], body["stream"]) == ("first", 0, True)
        assert (body["ignore_eos"], body["max_tokens"]) == (True, 4)
    said = capsys.readouterr().out
    assert said.startswith("1 client: requests_ok 6, requests_failed 0, ttft_ms ")
    assert "| Figure | 1 client | 3 clients |" in said and "| requests_ok | 6 | 6 |" in said


@pytest.mark.parametrize("loop", [("--clients", "2"), ("--rate", "20")])
def test_seconds_end_a_point(loop: tuple[str, str], tmp_path: Path):
    with scripted(openai(lambda _path, _body: completion(4, gap_s=0.01))) as server:
        code, report = load(server, tmp_path, "--seconds", "0.5", "--seed", "1", *loop)
    [point] = report["points"]
    assert code == 0 and 2 < point["requests_ok"] < 60
    assert point["elapsed_s"] < 2


def test_the_same_seed_sends_the_same(tmp_path: Path):
    with scripted(openai(lambda _path, _body: completion(4))) as server:
        for flags in (["--seed", "8"], ["--seed", "8"], []):
            assert load(server, tmp_path, "--requests", "3", *flags)[0] == 0
    sent = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert sent[:4] == sent[4:8] and not set(sent[:4]) & set(sent[8:])


def test_each_failure_is_counted_and_ends_nothing(tmp_path: Path, capsys):
    good, text = completion(4), event({"choices": [{"index": 0, "text": "x"}]})
    script = iter(
        [
            good,
            good,
            json_reply({"error": {"message": "slow | down"}}, 429),
            json_reply({"error": "broken", "error_type": "generation"}, 500),
            Reply(pieces=[text, event({"error": {"message": "out of memory"}})]),
            Reply(pieces=[text], is_whole=False),
            Reply(pieces=[text]),
            Reply(pieces=[], is_whole=False),
            Reply(pieces=[text, 5.0]),
            Reply(pieces=[b"data: nonsense\n\n"]),
            good,
        ]
    )
    with scripted(openai(lambda _path, _body: next(script))) as server:
        code, report = load(server, tmp_path, "--requests", "10", "--timeout", "1")
    [point] = report["points"]
    assert (code, point["requests_ok"]) == (0, 2)
    assert {kind: found["count"] for kind, found in point["errors"].items()} == {
        "HTTP 429": 1,
        "HTTP 500": 1,
        "error event": 1,
        "cut stream": 3,
        "timeout": 1,
        "bad event": 1,
    }
    assert point["errors"]["HTTP 500"]["first"] == "broken"
    assert point["errors"]["error event"]["first"] == "out of memory"
    assert "| HTTP 429 | 1 client | 1 | slow \\| down |" in capsys.readouterr().out


def test_a_server_that_serves_nobody_gives_code_1(tmp_path: Path, capsys):
    script = iter([completion(4)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\nyou\n")
    answer = openai(lambda _path, _body: next(script, Reply(503, is_kept=False)))
    with scripted(answer) as server:
        code, report = load(server, tmp_path, "--requests", "4", "--prompts", str(prompts))
        sent = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert (code, sent) == (1, ["hello", "hello", "you", "hello", "you"])
    assert report["points"][0]["errors"] == {"HTTP 503": {"count": 4, "first": "nothing"}}
    assert "sent more than once" in report["notes"][-1]
    assert capsys.readouterr().err == "text-generation-benchmark: no request succeeded\n"
    assert main(["--url", server.url]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("text-generation-benchmark: GET /info failed (connect): ")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_kept_connection_that_was_closed_is_no_failure(tmp_path: Path):
    """The client learns it when it sends the next request."""
    reply = Reply(pieces=completion(4).pieces, is_kept=False)
    with scripted(openai(lambda _path, _body: reply)) as server:
        code, report = load(server, tmp_path, "--clients", "4", "--requests", "40")
    assert (code, report["points"][0]["errors"]) == (0, {})


def test_a_refused_first_request_is_one_sentence(tmp_path: Path, capsys):
    refusal = json_reply({"error": {"message": "the model is asleep"}}, 400)
    page = Reply(pieces=[b"<html>\n\n</html>"])
    for reply, told in (
        (refusal, "POST /v1/completions failed (HTTP 400): the model is asleep"),
        (page, "failed (cut stream): the stream ended without its last event"),
        (Reply(pieces=[5.0]), "has not answered the first requests after 0.2 s"),
    ):
        with scripted(openai(lambda _path, _body, reply=reply: reply)) as server:
            assert load(server, tmp_path, "--timeout", "0.2") == (1, {})
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--clients", "2"], "unrecognized arguments: --clients"),
        (["--url", "http://h", "-b", "2"], "unrecognized arguments: -b 2"),
        (["--url", "http://h", "--clients", "1", "--rate", "1"], "give one of them"),
        (["--url=http://h", "--prompts", "x", "--input-tokens", "1"], "exclude each other"),
        (["--url", "http://h", "--rate", "0"], "must be above 0"),
        (["--url", "http://h", "--seconds", "inf"], "must be above 0"),
        (["--url", "http://h", "-o", "x.txt"], "must end in .json"),
        (["--url", "http://h", "-o", "/nowhere/x.json"], "does not exist"),
    ],
)
def test_a_bad_command_line_exits_with_2(argv, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, told",
    [
        *((["--url", url], "--url must look like") for url in ("h:80", "ftp://h", "http://a b")),
        (["--url", "http://me:secret@host"], "without a user"),
        (["--url", "http://h:x"], "--url is not an address"),
        (["--url", "http://h", "--api-key", "a\nb"], "must be one line"),
        (["--url", "http://h", "--prompts", "/nowhere"], "No such file"),
        (["--url", "http://h", "--prompts", "/dev/null"], "has no prompts"),
    ],
)
def test_a_url_that_can_not_be_used_is_one_sentence(argv, told, capsys):
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and "secret" not in said
