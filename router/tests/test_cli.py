"""Flags, and the one line that a failed start leaves."""

import dataclasses
import json
import logging
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from text_generation_process.log import LineFormatter, LineStream
from text_generation_router import cli, services
from text_generation_router.chat.format import AUTO, FORMATS
from text_generation_router.cli import configure_logs, create_parser, main
from text_generation_router.config import RouterConfig
from text_generation_router.errors import GenerationError
from text_generation_router.services import StartError, check_warmup
from text_generation_router.state import ServerState

from router.tests.fake_shards import INFO, WARMUP, FakeShards
from router.tests.tiny_tokenizer import write_tokenizer


def config(**options: object) -> RouterConfig:
    return RouterConfig(tokenizer_name="dir", **options)


def test_every_field_is_a_flag_with_its_default() -> None:
    options = vars(create_parser().parse_args(["--tokenizer-name", "dir"]))
    assert options.pop("command") is None
    assert RouterConfig(**options) == config()


def test_every_chat_format_can_be_chosen() -> None:
    [action] = [one for one in create_parser()._actions if one.dest == "chat_format"]
    assert tuple(action.choices or ()) == (AUTO, *FORMATS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"validation_workers": 0},
            "`--validation-workers` must be a whole number of at least 1. Given: 0",
        ),
        (
            {"waiting_served_ratio": float("nan")},
            "`--waiting-served-ratio` must be a number",
        ),
        ({"port": 65536}, "`--port` must be a whole number from 1 to 65535. Given: 65536"),
        ({"prometheus_port": 3000}, "--prometheus-port and --port are both 3000: "),
        ({"api_key": ("a", "")}, "`--api-key` must be a value that isn't empty"),
        ({"api_key_file": ""}, "`--api-key-file` must be a value that isn't empty"),
        (
            {"max_tokens_per_minute_per_key": 1},
            "--max-tokens-per-minute-per-key is given, but there are no keys",
        ),
        ({"max_tokens_per_minute_per_key": 0}, "`--max-tokens-per-minute-per-key` must be a whole"),
        ({"otlp_endpoint": "c:1"}, "`--otlp-endpoint` must be the gRPC address of a collector"),
        ({"aip_health_route": "h"}, "`--aip-health-route` must be a path that starts"),
        (
            {"aip_health_route": "/a", "aip_predict_route": "/a"},
            "--aip-predict-route and --aip-health-route must be two paths",
        ),
    ],
)
def test_values_that_can_not_be(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        config(**options)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("environment", "keys"),
    [
        ({}, ()),
        ({"API_KEY": "a"}, ("a",)),
        ({"API_KEY": "a,b\nc\n"}, ("a,b", "c")),
        ({"API_KEY": ""}, ("",)),
    ],
)
def test_keys_of_the_environment(environment: dict[str, str], keys: tuple[str, ...]) -> None:
    assert cli.keys_from(environment) == keys


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "`--api-key` must be a value that isn't empty"),
        (["--api-key", "a"], "Can not listen on 256.256.256.256 port 3000: "),
        (
            ["--api-key", "a", "--max-batch-size", "0"],
            "`--max-batch-size` must be a whole number of at least 1. Given: 0",
        ),
    ],
)
def test_a_start_that_fails_is_one_line(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("API_KEY", "")
    fail("--hostname", "256.256.256.256", *flags)
    assert said in error_line(capfd)


def error_line(capfd: pytest.CaptureFixture[str]) -> str:
    assert isinstance(sys.stdout, LineStream)
    sys.stdout.finish()
    (line,) = capfd.readouterr().out.splitlines()
    _, level, target, message = line.split(maxsplit=3)
    assert (level, target) == ("ERROR", "text_generation_router:")
    return message


def fail(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--tokenizer-name", "dir", "--hostname", "127.0.0.1", *arguments])
    assert caught.value.code == 1


def test_tokenizer_is_required(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "--tokenizer-name is required" in capfd.readouterr().err


def test_a_bug_is_one_line_too(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def start(config: RouterConfig, tracing: None, state: ServerState) -> AsyncIterator[None]:
        raise KeyError("x")
        yield

    monkeypatch.setattr(cli, "start", start)
    fail("--port", "0")
    assert error_line(capfd) == "The router failed: KeyError: 'x'"


class FakeClient(FakeShards):
    """Shards that work until they fail."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__(hook=self._fail)
        self.answer_s = 0.0
        self._fails_at = fails_at

    async def connect(self, path: str, answer_s: float) -> "FakeClient":
        self.answer_s = answer_s
        if self._fails_at == "connect":
            raise ConnectionError("nobody there")
        return self

    async def _fail(self, method: str) -> None:
        if method == self._fails_at:
            raise GenerationError("Server error: no")

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


async def test_start_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(services, "ShardedClient", client)
    write_tokenizer(tmp_path)
    config = RouterConfig(tokenizer_name=str(tmp_path), step_deadline=7.5)
    async with services.start(config) as started:
        assert client.answer_s == 7.5
        assert client.methods == ["clear", "info", "warmup"]
        assert started.scheduler_limits.max_batch_total_tokens == 512 * 16
        assert started.limits.max_input_tokens == 4095
        assert started.scheduler_limits.max_batch_size == 128
    assert client.is_closed


@pytest.mark.parametrize(
    ("fails_at", "sentence"),
    [
        ("connect", "Unable to connect to the Python model shards: nobody there"),
        ("clear", "Unable to clear the Python model shards cache: Server error: no"),
        ("info", "Unable to get the Python model shards info: Server error: no"),
        ("warmup", "Unable to warmup the Python model shards: Server error: no"),
        ("", "The model directory {} has no tokenizer.json"),
    ],
)
async def test_start_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str, sentence: str
) -> None:
    client = FakeClient(fails_at)
    monkeypatch.setattr(services, "ShardedClient", client)
    with pytest.raises(StartError) as caught:
        async with services.start(RouterConfig(tokenizer_name=str(tmp_path))):
            pytest.fail("it started")
    assert str(caught.value).startswith(sentence.format(tmp_path))
    assert client.is_closed is (fails_at != "connect")


@pytest.mark.parametrize(
    ("options", "warmup", "sentence"),
    [
        (
            {"max_total_tokens": 5000},
            {},
            "`max_total_tokens` must be <= 4096 for this model. Given: 5000",
        ),
        (
            {"max_input_tokens": 5000},
            {},
            "`max_input_tokens` must be <= 4095 for this model. Given: 5000",
        ),
        (
            {},
            {"max_input_tokens": 4096},
            "`max_input_tokens` must be < `max_total_tokens`. Given: 4096 and 4096",
        ),
        (
            {"max_batch_total_tokens": 4095},
            {},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 4096 and 4095",
        ),
        (
            {},
            {"num_blocks": 255},
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 4096 and 4080",
        ),
    ],
)
def test_limits_must_fit(options: dict[str, int], warmup: dict[str, int], sentence: str) -> None:
    check_warmup(config(), INFO, WARMUP)
    with pytest.raises(StartError) as caught:
        check_warmup(config(**options), INFO, dataclasses.replace(WARMUP, **warmup))
    assert str(caught.value) == f"Argument validation error: {sentence}"


def test_text(capfd: pytest.CaptureFixture[str]) -> None:
    output = configure_logs("INFO", json_output=False)
    logging.getLogger("text_generation_router").info("Connected %d", 1)
    logging.getLogger("text_generation_router").debug("not shown")
    logging.getLogger("uvicorn.error").info("not shown")
    logging.getLogger("uvicorn.error").warning("shown")
    logging.getLogger("uvicorn.error").error("ASGI callable returned without completing response.")
    assert output.flush(5)
    first, second = capfd.readouterr().out.splitlines()
    moment = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
    assert re.fullmatch(moment + "  INFO text_generation_router: Connected 1", first)
    assert re.fullmatch(moment + "  WARN uvicorn.error: shown", second)


def test_json(capfd: pytest.CaptureFixture[str]) -> None:
    output = configure_logs("DEBUG", json_output=True)
    try:
        raise KeyError("why")
    except KeyError:
        logging.getLogger("a.b").exception('"é"\n')
    assert output.flush(5)
    (line,) = capfd.readouterr().out.splitlines()
    known = json.loads(line)
    assert list(known) == ["timestamp", "level", "target", "message"]
    assert (known["level"], known["target"]) == ("ERROR", "a.b")
    assert known["message"].startswith('"é"\nTraceback')


def test_text_keeps_the_traceback() -> None:
    try:
        raise KeyError("why")
    except KeyError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "bad", (), sys.exc_info())
    assert LineFormatter(json_output=False).format(record).endswith("KeyError: 'why'")
