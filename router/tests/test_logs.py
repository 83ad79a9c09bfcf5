"""The two forms of a log line."""

import json
import logging
import re
import sys

import pytest
from text_generation_process.log import LineFormatter
from text_generation_router.logs import configure_logs


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
