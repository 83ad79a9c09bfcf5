"""What transcripts mask, and what they compare."""

import httpx
import pytest

from integration_tests.conformance.transcript import pretty, settle, sorted_by_choice, transcribe

STREAM = {"content-type": "text/event-stream"}


def test_floats_settle_within_the_tolerance() -> None:
    expected = {"a": [{"logprob": -1.25}], "b": 1}
    assert settle({"a": [{"logprob": -1.2504}], "b": 1}, expected) == expected
    assert settle({"a": [{"logprob": -1.26}], "b": 1}, expected) != expected
    assert settle({"a": [{"logprob": -1.25}], "b": 2}, expected) != expected
    assert settle({"a": [], "b": 1}, expected) != expected


def test_volatile_fields_are_masked() -> None:
    body = {"id": "chatcmpl-0123456789", "created": 5, "seed": 2**60, "tokens": [{"id": 7}]}
    headers = {"x-total-time": "12", "x-prompt-tokens": "3"}
    assert transcribe(httpx.Response(200, json=body, headers=headers)) == {
        "status": 200,
        "headers": {"content-type": "application/json", "x-prompt-tokens": "3"},
        "volatile_headers": ["x-total-time"],
        "json": {"id": "chatcmpl-*", "created": "*", "seed": "*", "tokens": [{"id": 7}]},
    }


def test_what_was_cached_is_masked_but_not_the_length_of_the_prompt() -> None:
    def masked(usage: dict[str, object]) -> object:
        return transcribe(httpx.Response(200, json={"usage": usage}))["json"]["usage"]

    cold = {"input_tokens": 19, "cache_read_input_tokens": 0}
    warm = {"input_tokens": 3, "cache_read_input_tokens": 16}
    assert masked(cold) == masked(warm) == {"input_tokens": 19, "cache_read_input_tokens": "*"}
    assert masked({"input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0}}) == {
        "input_tokens_details": {"cached_tokens": "*", "cache_write_tokens": 0}
    }


def test_streams_must_have_the_form_that_clients_read() -> None:
    def events(text: str) -> list[object]:
        answer = transcribe(httpx.Response(200, text=text, headers=STREAM))
        found: list[object] = answer["events"]
        return found

    assert events('data: {"a":1}\n\n:\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]
    assert events("event: x\ndata: {}\n\n") == [{"event": "x", "data": {}}]
    for text in ("data: {}\n", "data: {}\nid: 1\n\n", "data: {}\r\n\r\n", "event: x\n\n"):
        with pytest.raises(AssertionError):
            events(text)


def test_choices_are_sorted_and_what_has_none_comes_last() -> None:
    first, second = {"choices": [{"index": 0}]}, {"choices": [{"index": 1}]}
    assert sorted_by_choice([second, first, {"choices": []}, "[DONE]"]) == [
        first,
        second,
        {"choices": []},
        "[DONE]",
    ]


def test_pretty_breaks_long_lines_only() -> None:
    assert pretty({"a": [1, 2]}) == '{"a": [1, 2]}'
    assert pretty({"a": ["x" * 80, "y" * 80]}).splitlines()[1:3] == [
        '  "a": [',
        f'    "{"x" * 80}",',
    ]
