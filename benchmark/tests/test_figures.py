"""The arithmetic and the events of a load."""

import json
import math
from array import array

import pytest
from text_generation_benchmark.figures import (
    Point,
    line,
    markdown,
    milliseconds,
    notes,
)
from text_generation_benchmark.http import HttpClient
from text_generation_benchmark.load import Load
from text_generation_benchmark.report import Spread, quantile
from text_generation_benchmark.streams import APIS, Stream, read_openai, read_tgi

from benchmark.tests.load_server import event


def stream(*times: float, counts: tuple[int, int] | None = None) -> Stream:
    """Due at 1.0 and sent at 1.5; it ends half a second after the last token."""
    one = Stream(read_openai, due_s=1.0)
    one.sent_s, one.times, one.last_s, one.ended_s = (
        1.5,
        array("d", times),
        times[-1],
        times[-1] + 0.5,
    )
    one.counts = counts
    return one


def load_of(*streams: Stream) -> Load:
    """A load of ten seconds with two failures."""
    load = Load(HttpClient("http://h"), APIS["tgi"], iter(()))
    load._started_s, load._ended_s = 0.0, 10.0
    failed = [Stream(read_openai), Stream(read_openai)]
    for one in failed:
        one.fail("HTTP 429", "too | many", 9.0)
    load.ended = [*streams, *failed]
    return load


def test_times_of_streams():
    both = [stream(2.0, 2.1, 2.4, counts=(8, 4)), stream(3.0)]
    found = {name: list(values) for name, values in milliseconds(both, True).items()}
    assert found["ttft_ms"] == [500, 1500]
    assert found["ttft_from_due_ms"] == [1000, 2000]
    assert found["itl_ms"] == pytest.approx([100, 300])
    assert found["tpot_ms"] == pytest.approx([400 / 3]), "four tokens in three events"
    assert found["latency_ms"] == pytest.approx([1400, 2000])
    assert "ttft_from_due_ms" not in milliseconds(both, False)


def test_only_successful_streams_count():
    load = load_of(stream(2.0, 2.1, counts=(8, 4)), stream(2.0, 2.2, 2.3))
    found = Point(4, 8, rate=2.0).figures(load)
    assert (found["requests_ok"], found["requests_failed"]) == (2, 2)
    assert (found["input_tokens_per_s"], found["output_tokens_per_s"]) == (0.8, 0.7)
    assert (found["input_tokens_got_p50"], found["output_tokens_got_p50"]) == (8, 3.5)
    assert (found["output_tokens_counted_by"], found["tokens_per_event"]) == ("events+server", 1.4)
    assert found["errors"] == {"HTTP 429": {"count": 2, "first": "too | many"}}
    assert found["ttft_ms"]["p99"] == 500
    json.dumps(found)
    text = markdown({"model": "m"}, [found, Point(4, None, clients=3).figures(load_of())])
    assert "| model | m |" in text
    assert "| Figure | 2 requests/s | 3 clients |" in text
    assert "| input_tokens_got_p50 | 8 | – |" in text
    assert "| ttft_from_due_ms | 1,000.0 / 1,000.0 / 1,000.0 | – |" in text
    assert "| HTTP 429 | 3 clients | 2 | too \\| many |" in text
    assert line(found).startswith("2 requests/s: requests_ok 2, requests_failed 2, ttft_from_due")


def test_notes_say_what_limits_the_figures():
    def told(load: Load, asked: int, ignore_eos: bool = True) -> str:
        return "\n".join(notes(Point(asked, 8, clients=1).figures(load), ignore_eos))

    busy = load_of(stream(2.0, 2.1))
    busy.cpu_share = 0.95
    busy.running = {stream(2.0)}
    said = told(busy, 2)
    assert "this client used 95% of a core" in said
    assert "running streams, not counted: 1." in said
    assert "events with text are counted" in said
    assert "an event has 4.00 tokens" in told(load_of(stream(2.0, counts=(8, 4))), 4)
    short = load_of(stream(2.0, 2.1, counts=(8, 2)))
    assert "has 2 tokens, and 4 were requested" in told(short, 4)
    assert told(short, 4, ignore_eos=False) == ""


def test_quantiles_are_values_of_the_list():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 2.0, 3.0, 3.0)
    assert quantile([float(n) for n in range(101)], 0.99) == 99.0
    assert math.isnan(quantile([], 0.5))


def test_an_event_may_be_cut_anywhere_and_miss_its_end():
    one = Stream(read_tgi)
    one.feed(b":\n\n" + event({"token": {"text": ""}, "generated_text": None}), 1.0)
    details = {"generated_tokens": 2, "input_length": 5}
    last = event({"token": {"text": ""}, "generated_text": "", "details": details})
    one.feed(last[:9], 2.0)
    one.feed(last[9:-1], 3.0)
    one.end(4.0)
    assert (list(one.times), one.counts, one.failure, one.ended_s) == (
        [1.0, 4.0],
        (5, 2),
        None,
        4.0,
    )


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_an_event_with_only_a_role_is_no_token(field: str):
    def chunk(delta: dict[str, object], reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    one = Stream(read_openai)
    one.feed(chunk({"role": "assistant", "content": ""}), 1.0)
    one.feed(chunk({field: ["x"]}) + chunk({field: ["y"]}), 2.0)
    one.feed(chunk({}, "stop"), 3.0)
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    one.feed(event({"choices": [], "usage": usage}).replace(b"\n", b"\r\n"), 4.0)
    one.feed(b"data: [DONE]\n\n", 5.0)
    one.end(5.0)
    assert (list(one.times), one.last_s, one.counts, one.failure) == ([2.0, 2.0], 3.0, (5, 2), None)


@pytest.mark.parametrize(
    "data, kind, message",
    [
        (b"data: {\n\n", "bad event", "not a valid event: {"),
        (b'data: {"choices": [{"delta": 5}]}\n\n', "bad event", "not a valid event: "),
        (b'data: {"usage": {}, "choices": [{"text": 5}, 6]}\n\n', "bad event", "not a valid"),
        (event({"error": {"message": "no\nmemory " + "x" * 999}}), "error event", "no memory xx"),
        (event({"error": "no"}), "error event", "no"),
        (b"<html>\n\n</html>", "cut stream", "the stream ended without its last event"),
    ],
)
def test_the_first_failure_ends_a_stream(data: bytes, kind: str, message: str):
    one = Stream(read_openai)
    one.feed(data, 1.0)
    one.end(2.0)
    assert one.failure is not None and not one.times
    assert one.failure[0] == kind and one.failure[1].startswith(message)
    assert len(one.failure[1]) <= 300
