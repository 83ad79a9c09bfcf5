import json

import pytest
from text_generation_launcher.process import Log, parse_line
from text_generation_process.log import LogLine


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hello", ("INFO", "child", "hello")),
        ("{not json", ("INFO", "child", "{not json")),
        ("[1]", ("INFO", "child", "[1]")),
        ('{"level": "ERROR", "message": "m"}', ("ERROR", "child", "m")),
        ('{"level": "warning", "message": "m", "target": "t"}', ("WARN", "t", "m")),
        ('{"level": "CRITICAL", "message": "m"}', ("ERROR", "child", "m")),
        ('{"level": "odd", "message": 3}', ("INFO", "child", "3")),
    ],
)
def test_parse_line(text, expected):
    line = parse_line(text, "child")
    assert isinstance(line, LogLine)
    assert (line.level, line.target, line.message) == expected


def test_an_object_that_is_no_record_is_an_answer():
    assert parse_line('{"model_path": "/m"}', "child") == {"model_path": "/m"}


def test_format():
    line = LogLine("INFO", "text_generation_router", "päng", "2026-11-21T09:45:49.123456Z")
    assert line.format(json_output=False) == (
        "2026-11-21T09:45:49.123456Z  INFO text_generation_router: päng"
    )
    assert json.loads(line.format(json_output=True)) == {
        "timestamp": "2026-11-21T09:45:49.123456Z",
        "level": "INFO",
        "target": "text_generation_router",
        "message": "päng",
    }


def test_a_line_about_a_request_says_which():
    record = {
        **{"timestamp": "2026-11-21T09:45:49.123456Z", "level": "INFO", "target": "router"},
        **{"message": "Success", "route": "/generate", "request_id": "r-1", "trace_id": "0a1b"},
    }
    line = parse_line(json.dumps(record), "child")
    assert isinstance(line, LogLine)
    assert json.loads(line.format(json_output=True)) == record
    assert line.format(json_output=False) == (
        "2026-11-21T09:45:49.123456Z  INFO router: Success route=/generate id=r-1 trace=0a1b"
    )
    del record["trace_id"]
    line = parse_line(json.dumps(record), "child")
    assert isinstance(line, LogLine)
    assert line.format(json_output=False).endswith("Success route=/generate id=r-1")


def test_own_lines_are_filtered_by_level(capfd):
    log = Log("WARN", json_output=False)
    log.info("not said")
    log.error("said")
    log.write(LogLine("DEBUG", "child", "filtered by the child itself"))
    log.close()
    said = capfd.readouterr().out.splitlines()
    assert [line.split(": ", 1)[1] for line in said] == ["said", "filtered by the child itself"]
