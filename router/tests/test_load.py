"""`text-generation-benchmark --url` against servers that are slow, refuse, cut and fail."""

import contextlib
import itertools
import json
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.benchmark.cli import main
from text_generation_router.benchmark.load import run as load_run
from text_generation_router.benchmark.load.http import HttpClient

from router.tests.load_server import (
    Answer,
    Reply,
    Scripted,
    completion,
    event,
    json_reply,
    scripted,
)
from router.tests.test_certificate import make as make_certificate

MODELS = json_reply({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
NOT_THERE = json_reply({"error": "not found"}, 404)


@pytest.fixture(autouse=True)
def no_key_of_the_developer(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def openai(answer: Answer) -> Answer:
    """A server with /v1/models and /v1/completions alone."""

    def reply(path: str, body: dict[str, Any]) -> Reply:
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
    def answer(_path: str, body: dict[str, Any]) -> Reply:
        return completion(body["max_tokens"], len(body["prompt"].split()) + 3, gap_s=0.02)

    with scripted(openai(answer)) as server:
        flags = ["--clients", "1", "3", "--requests", "6", "--input-tokens", "50", "--seed", "1"]
        code, report = load(server, tmp_path, *flags)
    assert code == 0
    assert report["parameters"]["api"] == "openai-completions"
    assert report["parameters"]["model"] == "first"
    one, three = report["points"]
    assert (one["clients"], three["clients"]) == (1, 3)
    for point in (one, three):
        assert (point["requests_ok"], point["requests_failed"], point["errors"]) == (6, 0, {})
        assert point["output_tokens_got_p50"] == 4
        assert point["input_tokens_got_p50"] == 50
        assert point["output_tokens_counted_by"] == "server"
        assert 10 < point["itl_ms"]["p50"] < 100
        assert point["ttft_ms"]["p50"] < point["latency_ms"]["p50"]
        assert "ttft_from_due_ms" not in point
    assert one["elapsed_s"] > 6 * 4 * 0.02
    assert three["elapsed_s"] < 0.7 * one["elapsed_s"]
    assert report["notes"] == []
    sent = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert len(set(sent)) == len(sent) == 2 + 12
    for body in server.bodies("/v1/completions")[2:]:
        assert (body["model"], body["temperature"], body["stream"]) == ("first", 0, True)
        assert (body["ignore_eos"], body["min_tokens"], body["max_tokens"]) == (True, 4, 4)
    said = capsys.readouterr().out
    assert said.startswith("load 1 client, ok 6, errors 0, first token ms p50 p90 p99 ")
    assert "| 3 clients | 6 | 0 | " in said


def test_an_open_loop_does_not_wait(tmp_path: Path):
    with scripted(openai(lambda _path, _body: completion(2, gap_s=0.4))) as server:
        code, report = load(
            server,
            tmp_path,
            "--rate",
            "100",
            "--requests",
            "20",
            "--seed",
            "3",
            "--model",
            "second",
        )
    assert code == 0
    [point] = report["points"]
    assert (point["rate"], point["requests_ok"]) == (100, 20)
    assert point["elapsed_s"] < 20 * 0.8 / 2, "one behind the other they would take 16 s"
    due, sent = point["ttft_from_due_ms"], point["ttft_ms"]
    assert due["lowest"] >= sent["lowest"] and due["p99"] >= sent["p99"]
    assert {body["model"] for body in server.bodies("/v1/completions")} == {"second"}
    assert report["notes"][-1].startswith(
        "Warning: 100 requests/s: the median answer has 2 tokens; 4 were requested"
    )


def test_seconds_end_a_point(tmp_path: Path):
    with scripted(openai(lambda _path, _body: completion(4, gap_s=0.01))) as server:
        for flags in (["--clients", "2"], ["--rate", "20"]):
            code, report = load(server, tmp_path, "--seconds", "0.5", "--seed", "1", *flags)
            [point] = report["points"]
            assert code == 0 and 2 < point["requests_ok"] < 60
            assert point["elapsed_s"] < 2


def test_the_same_seed_sends_the_same(tmp_path: Path):
    def sent(*flags: str) -> list[str]:
        with scripted(openai(lambda _path, _body: completion(4))) as server:
            assert load(server, tmp_path, "--requests", "3", *flags)[0] == 0
            return [body["prompt"] for body in server.bodies("/v1/completions")]

    assert sent("--seed", "8") == sent("--seed", "8")
    assert len({*sent(), *sent()}) == 2 * len(sent())


def test_each_failure_is_counted_and_ends_nothing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(load_run, "PAUSE_AFTER_FAILURE_S", 0.0)
    good = completion(4)
    text = event({"choices": [{"index": 0, "text": "x"}]})
    replies = [
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
    script = iter([good, good, *replies])
    with scripted(openai(lambda _path, _body: next(script))) as server:
        code, report = load(server, tmp_path, "--requests", "10", "--timeout", "1")
    assert code == 0
    [point] = report["points"]
    assert point["requests_ok"] == 2
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


def test_when_nothing_ends_well_the_code_is_1(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(load_run, "PAUSE_AFTER_FAILURE_S", 0.0)
    asked = itertools.count()

    def answer(_path: str, _body: dict[str, Any]) -> Reply:
        return Reply(503, is_kept=False) if next(asked) else completion(4)

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    with scripted(openai(answer)) as server:
        code, report = load(server, tmp_path, "--requests", "4", "--prompts", str(prompts))
    assert code == 1
    assert report["points"][0]["errors"] == {"HTTP 503": {"count": 4, "first": "nothing"}}
    said = capsys.readouterr()
    assert said.err == "text-generation-benchmark: no request succeeded\n"
    assert main(["--url", server.url]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("text-generation-benchmark: GET /info failed (connect): ")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_server_that_goes_away(tmp_path: Path, monkeypatch):
    """Its port refuses connections from the third request on."""
    monkeypatch.setattr(load_run, "PAUSE_AFTER_FAILURE_S", 0.0)
    connect = HttpClient._connect
    left = iter([True, True, True])

    async def connect_while_it_is_there(self: HttpClient) -> Any:
        if not next(left, False):
            self._address = replace(self._address, port=1)
        return await connect(self)

    monkeypatch.setattr(HttpClient, "_connect", connect_while_it_is_there)
    good = completion(4)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    answer = openai(lambda _path, _body: Reply(pieces=good.pieces, is_kept=False))
    with scripted(answer) as server:
        flags = ["--requests", "6", "--prompts", str(prompts), "--model", "m"]
        code, report = load(server, tmp_path, *flags)
    [point] = report["points"]
    assert (code, point["requests_ok"]) == (0, 2)
    assert point["errors"]["connect"]["count"] == 4


def test_a_kept_connection_that_was_closed_is_no_failure(tmp_path: Path):
    def answer(_path: str, _body: dict[str, Any]) -> Reply:
        # No word of it in the head: the client learns it when it asks again.
        reply = completion(4)
        return Reply(pieces=reply.pieces, is_kept=False)

    with scripted(openai(answer)) as server:
        code, report = load(server, tmp_path, "--clients", "4", "--requests", "40")
    assert (code, report["points"][0]["errors"]) == (0, {})


@pytest.mark.parametrize(
    "refusal",
    [
        "Unrecognized request argument supplied: {name}",
        "what you sent is not understood",
    ],
)
def test_a_server_that_refuses_ignore_eos_is_asked_without(tmp_path: Path, refusal: str):
    def answer(_path: str, body: dict[str, Any]) -> Reply:
        for name in ("ignore_eos", "min_tokens"):
            if name in body:
                message = refusal.format(name=name)
                return json_reply({"error": {"message": message}}, 400)
        return completion(min(3, body["max_tokens"]))

    with scripted(openai(answer)) as server:
        code, report = load(server, tmp_path, "--requests", "3")
    assert code == 0 and report["points"][0]["errors"] == {}
    assert report["notes"] == [
        "Note: the requests omit fields that the server refuses: ignore_eos, min_tokens.",
        "Warning: 1 client: the median answer has 3 tokens; 4 were requested: "
        "the server refuses to ignore the end of sequence.",
    ]


def test_what_is_refused_for_another_reason_is_said(tmp_path: Path, capsys):
    refusal = json_reply({"error": {"message": "the model is asleep"}}, 400)
    with scripted(openai(lambda _path, _body: refusal)) as server:
        assert load(server, tmp_path) == (1, {})
    said = capsys.readouterr().err
    assert said == (
        "text-generation-benchmark: POST /v1/completions answered 400: the model is asleep\n"
    )
    assert len(server.bodies("/v1/completions")) == 3


def test_without_usage_events_are_counted(tmp_path: Path):
    def answer(_path: str, body: dict[str, Any]) -> Reply:
        if "max_tokens" in body or "stream_options" in body:
            message = "no max_tokens: use max_completion_tokens; no stream_options"
            return json_reply({"error": {"message": message}}, 400)
        return completion(4, prompt_tokens=None)

    with scripted(openai(answer)) as server:
        code, report = load(server, tmp_path, "--requests", "3")
    [point] = report["points"]
    assert (code, point["output_tokens_counted_by"]) == (0, "events")
    assert (point["output_tokens_got_p50"], point["input_tokens_got_p50"]) == (4, None)
    assert "max_tokens, stream_options" in report["notes"][0]
    assert "events with text are counted" in report["notes"][1]


def test_a_chat_model_alone(tmp_path: Path):
    def answer(path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/models":
            return MODELS
        if path != "/v1/chat/completions":
            return NOT_THERE
        assert body["messages"][0]["role"] == "user"
        delta = event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        return Reply(pieces=[delta * 4, last])

    with scripted(answer) as server:
        code, report = load(server, tmp_path, "--requests", "2", "--api-key", "secret")
    assert (code, report["parameters"]["api"]) == (0, "openai-chat")
    assert {headers.get("authorization") for _, _, headers in server.asked} == {"bearer secret"}
    assert "secret" not in json.dumps(report)


def test_tgi(tmp_path: Path, monkeypatch):
    def answer(path: str, body: dict[str, Any]) -> Reply:
        if path == "/info":
            return json_reply({"model_id": "a/b", "version": "3.0"})
        assert path == "/generate_stream"
        num_tokens = body["parameters"]["max_new_tokens"]
        token = {"id": 1, "text": "x", "logprob": 0.0, "special": False}
        details = {"finish_reason": "length", "generated_tokens": num_tokens, "input_length": 9}
        pieces: list[bytes | float] = [
            event({"token": token, "generated_text": None}) for _ in range(num_tokens - 1)
        ]
        last = {"token": token, "generated_text": "x" * num_tokens, "details": details}
        return Reply(pieces=[*pieces, event(last)])

    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    with scripted(answer) as server:
        code, report = load(server, tmp_path, "--requests", "3", "--prompts", str(prompts))
    assert (code, report["parameters"]["api"], report["parameters"]["model"]) == (0, "tgi", "a/b")
    [point] = report["points"]
    assert (point["input_tokens_asked"], point["input_tokens_got_p50"]) == (None, 9)
    sent = [body["inputs"] for body in server.bodies("/generate_stream")]
    assert sent == ["one", "one", "two", "one"]
    assert server.bodies("/generate_stream")[-1]["parameters"]["ignore_eos_token"] is True
    assert "sent more than once" in report["notes"][0]
    assert server.asked[-1][2]["authorization"] == "bearer mine"


def test_an_answer_that_only_its_connection_ends(tmp_path: Path):
    """HTTP/1.0, as some proxies speak it; after a comment and an answer that comes before."""

    def serve(listener: socket.socket) -> None:
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(
                    b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.0 200 OK\r\n\r\n: hi\n\n"
                )
                connection.sendall(
                    b"".join(p for p in completion(4).pieces if isinstance(p, bytes))
                )

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        server = Scripted(f"http://127.0.0.1:{listener.getsockname()[1]}")
        flags = ["--api", "openai-completions", "--model", "m", "--prompts", str(prompts)]
        code, report = load(server, tmp_path, "--requests", "2", *flags)
        thread.join(5)
    assert (code, report["points"][0]["requests_ok"], report["points"][0]["errors"]) == (0, 2, {})


def test_a_server_that_says_nothing(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["--url", url, "--timeout", "0.2"]) == 1
    said = capsys.readouterr().err
    assert "has not answered the first requests after 0.2 s" in said and said.count("\n") == 1


def test_a_page_instead_of_a_stream(tmp_path: Path, capsys):
    page = Reply(pieces=[b"<html>\n\n</html>"])
    with scripted(openai(lambda _path, _body: page)) as server:
        assert load(server, tmp_path) == (1, {})
    said = capsys.readouterr().err
    assert said.endswith("the first request failed: the stream ended without its last event\n")
    assert said.count("\n") == 1


def test_an_unknown_certificate(tmp_path: Path, capsys):
    """The key is not sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path, "127.0.0.1"))
    received = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(5)
        with connection, contextlib.suppress(OSError):
            received.append(context.wrap_socket(connection, server_side=True).recv(65536))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["--url", url, "--api-key", "secret"]) == 1
        thread.join(10)
    said = capsys.readouterr().err
    assert "GET /info failed (connect): " in said and "certificate verify failed" in said
    assert said.count("\n") == 1 and "secret" not in said
    assert not any(received)


def test_a_server_that_speaks_something_else(capsys):
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"SSH-2.0-nothing\r\n")
            connection.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        assert main(["--url", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 1
        thread.join(5)
    assert "GET /info failed (bad answer): the answer is not HTTP/1.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--clients", "2"], "--clients needs --url"),
        (["--url", "http://h", "-b", "2"], "--batch-size can not be combined with --url"),
        (["--url", "http://h", "--", "--num-shard", "2"], "flags after -- can not be combined"),
        (["--url", "http://h", "--clients", "1", "--rate", "1"], "give one of them"),
        (["--url", "http://h", "--prompts", "x", "--input-tokens", "1"], "remove --input-tokens"),
        (["--url", "http://h", "--rate", "0"], "must be above 0"),
        (["--url", "http://h", "--seconds", "inf"], "must be above 0"),
        (["--no-ignore-eos"], "--ignore-eos needs --url"),
    ],
)
def test_a_bad_command_line(argv, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--url", "h"], "must look like http://host:port"),
        (["--url", "http://h", "--api-key", "a\nb"], "must be one line"),
        (["--url", "http://h", "--prompts", "/nowhere"], "No such file"),
    ],
)
def test_what_can_not_be_asked_is_one_sentence(argv, expected, capsys):
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
