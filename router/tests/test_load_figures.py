"""The arithmetic and the events of `text-generation-benchmark --url`."""

import csv
import io
import json
import random
from array import array

import pytest
from rich.console import Console
from text_generation_router.benchmark.display import display
from text_generation_router.benchmark.load.api import APIS, Target
from text_generation_router.benchmark.load.events import StreamReader, read_openai, read_tgi
from text_generation_router.benchmark.load.figures import (
    LoadFigures,
    Point,
    Result,
    median_tokens,
    milliseconds,
)
from text_generation_router.benchmark.load.http import Address
from text_generation_router.benchmark.load.prompts import Length, random_words, read_prompts
from text_generation_router.benchmark.load.report import LiveRows, as_csv, as_dict, markdown, notes
from text_generation_router.benchmark.measure import BenchmarkError
from text_generation_router.benchmark.report import Spread

from router.tests.load_server import event

TARGET = Target("openai-completions", "m", ignore_eos=True)


def result(times: list[float], counts: tuple[int, int] | None = None, due_s: float = 1.0) -> Result:
    """Sent at 1.5, over half a second after the last token."""
    last_s = times[-1] if times else 2.0
    return Result(due_s, 1.5, last_s + 0.5, array("d", times), last_s, counts)


FAILED = Result(0.0, 0.0, 9.0, array("d"), 9.0, None, ("HTTP 429", "too | many"))


def figures(*results: Result, rate: float | None = 2.0, asked: int = 4) -> LoadFigures:
    """A point of ten seconds."""
    point = Point(rate=rate) if rate is not None else Point(clients=3)
    found = LoadFigures(point, asked, 8, started_s=0.0, ended_s=10.0)
    for one in results:
        found.add(one)
    return found


def test_times_of_streams():
    one, other = result([2.0, 2.1, 2.4], (8, 4)), result([3.0])
    both = [one, other]
    assert milliseconds("ttft", both) == [500, 1500]
    assert milliseconds("ttft_from_due", both) == [1000, 2000]
    assert milliseconds("itl", both) == pytest.approx([100, 300])
    assert milliseconds("tpot", both) == pytest.approx([400 / 3]), "four tokens in three events"
    assert milliseconds("latency", both) == pytest.approx([1400, 2000])
    assert milliseconds("ttft", [result([], (8, 0))]) == []


def test_counts_are_of_streams_that_ended_well():
    found = figures(result([2.0, 2.1], (8, 4)), FAILED, result([2.0, 2.2, 2.3]), FAILED)
    assert (found.num_good, found.num_errors) == (2, 2)
    assert (found.tokens_in, found.tokens_out) == (8, 7)
    assert found.per_second(found.tokens_out) == 0.7
    assert median_tokens(found.good()) == (8, 3.5)
    assert found.counted_by() == "events+server"
    assert found.tokens_per_event() == 7 / 5
    assert found.errors() == {"HTTP 429": (2, "too | many")}


def test_times_of_a_point_that_is_over_are_sorted_once(monkeypatch):
    over, under_way = figures(result([2.0, 2.1], (8, 4))), figures(result([2.0]))
    under_way.ended_s = None
    assert under_way.spread("ttft") is not None
    under_way.add(result([4.0]))
    grown = under_way.spread("ttft")
    assert grown is not None and grown.highest == 2500
    markdown({}, [over])
    monkeypatch.setattr(Spread, "of", None)
    assert as_dict({}, [], [over])["points"][0]["itl_ms"]["p50"] == pytest.approx(100)
    assert "itl_ms_p50" in as_csv([over])


def test_tables_for_people_and_for_programs():
    points = [figures(result([2.0, 2.1], (8, 4)), FAILED), figures(FAILED, rate=None)]
    text = markdown({"model": "m"}, points)
    assert "| model | m |" in text
    assert "| 2 requests/s | 1 | 1 | 10.0 | 0.10 | 0.8 | 0.4 | 8/8 | 4/4 |" in text
    assert "| 3 clients | 0 | 1 | 10.0 | 0.00 | – | 0.0 | 8/– | 4/– |" in text
    assert "| Time to first token, from when it was due | 2 requests/s | 1000.00 ms |" in text
    assert "| HTTP 429 | 3 clients | 1 | too \\| many |" in text
    report = as_dict({"model": "m"}, ["Note: n"], points)
    assert report["points"][0]["ttft_ms"]["p99"] == 500
    assert report["points"][0]["errors"] == {"HTTP 429": {"count": 1, "first": "too | many"}}
    assert "ttft_ms" not in report["points"][1]
    json.dumps(report)
    rows = list(csv.DictReader(io.StringIO(as_csv(points))))
    assert [row["clients"] for row in rows] == ["", "3"]
    assert [row["itl_ms_p50"] != "" for row in rows] == [True, False]
    assert rows[0]["errors"] == "HTTP 429: 1"


def test_the_live_table():
    under_way, over = figures(result([2.0, 2.1], (8, 4)), FAILED), figures(rate=None)
    under_way.ended_s = None
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=200)
    with display(console, [under_way, over], 100, LiveRows().layout()) as shown:
        shown.show(under_way, 37, False)
    text = file.getvalue()
    assert "first token ms" in text and "500.0 500.0 500.0" not in text
    assert "1000.0 1000.0 1000.0" in text.replace(",", ""), "an open loop's is from when it was due"
    assert "3 clients" in text and "37/100" in text


def test_a_closed_loop_has_no_time_from_when_it_was_due():
    assert "when it was due" not in markdown({}, [figures(result([2.0]), rate=None)])


def test_short_answers_are_said_last():
    short = figures(result([2.0, 2.1], (8, 2)))
    said = notes(TARGET, [short])
    assert said == [
        "Warning: 2 requests/s: the median answer has 2 tokens; 4 were requested: the server "
        "does not ignore the end of sequence, although the requests ask for it."
    ]
    refusing = Target("tgi", "m", True, frozenset({"ignore_eos_token"}))
    said = notes(refusing, [short])
    assert said[0] == "Note: the requests omit fields that the server refuses: ignore_eos_token."
    assert said[1].endswith("the server refuses to ignore the end of sequence.")
    assert notes(Target("tgi", "m", ignore_eos=False), [short]) == []
    assert "at most 1 were requested" in notes(TARGET, [figures(result([2.0, 2.1]), asked=1)])[-1]
    assert notes(TARGET, [figures(result([2.0, 2.1, 2.2, 2.3], (8, 4)))]) == []


def test_what_spoils_figures_is_noted():
    busy = figures(result([2.0, 2.1]), asked=2)
    busy.cpu_share = 0.95
    busy.interrupted = 3
    said = "\n".join(notes(TARGET, [busy, figures(result([2.0], (8, 4)))]))
    assert "this client used 95% of a core" in said
    assert "running streams, not counted: 3." in said
    assert "events with text are counted" in said
    assert "an event has 4.00 tokens on average" in said


def test_events_of_generate_stream():
    reader = StreamReader(read_tgi)
    token = {"id": 1, "text": "", "logprob": 0.0, "special": False}
    reader.feed(b":\n\n" + event({"index": 1, "token": token, "generated_text": None}), 1.0)
    details = {"finish_reason": "length", "generated_tokens": 2, "input_length": 5, "seed": None}
    last = event({"index": 2, "token": token, "generated_text": "", "details": details})
    # Cut anywhere, and without its last empty line.
    reader.feed(last[:9], 2.0)
    reader.feed(last[9:-1], 3.0)
    assert not reader.is_finished
    reader.close(4.0)
    assert reader.is_finished and reader.failure is None
    assert (list(reader.times), reader.counts) == ([1.0, 4.0], (5, 2))
    reader = StreamReader(read_tgi)
    reader.feed(event({"error": "overloaded", "error_type": "overloaded"}), 1.0)
    assert reader.failure == ("error event", "overloaded")


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_events_of_a_chat(field: str):
    def chunk(delta: dict[str, object], reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    reader = StreamReader(read_openai)
    reader.feed(chunk({"role": "assistant", "content": ""}), 1.0)
    assert not reader.times, "an event that only names a role is no token"
    reader.feed(chunk({field: ["x"]}) + chunk({field: ["y"]}), 2.0)
    reader.feed(chunk({}, "stop"), 3.0)
    assert (list(reader.times), reader.last_s, reader.is_finished) == ([2.0, 2.0], 3.0, True)
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    reader.feed(event({"choices": [], "usage": usage}).replace(b"\n", b"\r\n"), 4.0)
    assert reader.counts == (5, 2) and reader.last_s == 3.0
    reader.feed(b"data: [DONE]\n\n", 5.0)
    assert reader.failure is None


@pytest.mark.parametrize(
    "data, kind",
    [
        (b"data: {\n\n", "bad event"),
        (b"data: 5\n\n", "bad event"),
        (b'data: {"choices": 5}\n\n', "bad event"),
        (b'data: {"choices": [{"delta": 5}]}\n\n', "bad event"),
        (b'data: {"usage": {}, "choices": [{"text": 5}, 6]}\n\n', "bad event"),
        (event({"error": {"message": "no", "code": 500}}), "error event"),
        (event({"error": "no"}), "error event"),
    ],
)
def test_events_that_end_a_stream(data: bytes, kind: str):
    reader = StreamReader(read_openai)
    reader.feed(data + event({"choices": [{"text": "x"}]}), 1.0)
    assert reader.failure is not None and reader.failure[0] == kind
    assert not reader.times


@pytest.mark.parametrize("line", [b"data: x", b"data: x\n", b"data:\n"])
def test_an_event_without_an_end(line: bytes):
    reader = StreamReader(read_openai)
    for _ in range(12):
        reader.feed(line * 100_000, 1.0)
    assert reader.failure == ("bad event", "an event of more than 1048576 bytes")
    assert not reader._pending and not reader._data


def test_a_stream_without_its_last_event():
    reader = StreamReader(read_openai)
    reader.feed(b"<html>\n\n</html>", 1.0)
    reader.close(2.0)
    assert reader.failure == ("cut stream", "the stream ended without its last event")


def test_what_a_server_says_is_one_short_line():
    reader = StreamReader(read_openai)
    reader.feed(event({"error": {"message": "out of\nmemory " + "x" * 1000}}), 1.0)
    assert reader.failure is not None
    kind, message = reader.failure
    assert (kind, len(message)) == ("error event", 300) and message.startswith("out of memory x")


@pytest.mark.parametrize("name", APIS)
def test_what_is_sent(name: str):
    target = Target(name, "m", ignore_eos=True)
    body = json.loads(target.body("hello", 9))
    fields = body["parameters"] if name == "tgi" else body
    assert fields["max_new_tokens" if name == "tgi" else "max_tokens"] == 9
    assert all(fields[field] for field in target.api.ignore_eos)
    plain = Target(name, "m", ignore_eos=False).body("hello", 9)
    assert b"eos" not in plain and b"min_tokens" not in plain
    without = Target(name, "m", True, frozenset(target.api.optional))
    assert not without.is_asked_to_ignore_eos and b"eos" not in without.body("hello", 9)
    if name != "tgi":
        assert json.loads(without.body("hello", 9))["max_completion_tokens"] == 9


def test_a_line_through_two_measured_prompts():
    assert Length.of((32, 74), (100, 210)) == Length(2.0, 10.0)
    assert Length.of((100, 210), (32, 74)).words(410) == 200
    assert Length.of((32, 64), (32, 64)) == Length(2.0)
    assert Length.of((32, 64), (33, 90)).words(1) == 1
    assert Length(1.3, 20).words(4) == 1


def test_prompts_are_unlike_from_their_first_words_on():
    chooser = random.Random(5)
    beginnings = {random_words(chooser, 40)[:40] for _ in range(200)}
    assert len(beginnings) == 200
    assert random_words(random.Random(5), 40) == random_words(random.Random(5), 40)


def test_prompts_of_a_file(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\n two\n")
    assert read_prompts(text) == ["one", " two"]
    lines.write_text('"one"\n{"prompt": "two", "more": 1}\n')
    assert read_prompts(lines) == ["one", "two"]
    lines.write_text('"a\u2028b"\r\n"c"\r\n', encoding="utf-8", newline="")
    assert read_prompts(lines) == ["a\u2028b", "c"]
    for bad in ("[1]", "{", '{"prompt": 5}', "{}"):
        lines.write_text(f'"one"\n{bad}\n')
        with pytest.raises(BenchmarkError, match="line 2: each line of a"):
            read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(BenchmarkError, match="has no prompts"):
        read_prompts(text)
    text.write_bytes(b"\xff\n")
    with pytest.raises(BenchmarkError, match="is not UTF-8 text"):
        read_prompts(text)


def test_addresses():
    found = Address.parse("https://host/base/v1/")
    assert (found.host, found.port, found.is_tls, found.prefix) == ("host", 443, True, "/base")
    assert Address.parse("http://[::1]:80").host == "::1"
    for bad in ("host:80", "http://", "ftp://h", "http://a b", "http://h\r\nx", "http://h:x"):
        with pytest.raises(BenchmarkError, match="--url"):
            Address.parse(bad)
    with pytest.raises(BenchmarkError, match="a user, query or fragment"):
        Address.parse("http://me:secret@host")
