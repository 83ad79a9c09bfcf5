"""Requests that use every part of the HTTP API once, to compare the answers of two servers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

PROMPT = "the cat sat on the mat and the dog "
MESSAGES = [{"role": "user", "content": "what is the time, and where is the sun?"}]
# As long as the servers allow: three tokens per character.
LONGEST_PROMPT, MOST_PROMPT_TOKENS = "日" * 100, 300
END_TOKENS = {"0": 100.0, "2": 100.0}

Body = dict[str, Any]
Answer = dict[str, Any]


def _generate(inputs: str = PROMPT, **parameters: Any) -> Body:
    return {"inputs": inputs, "parameters": {"details": True, "max_new_tokens": 20, **parameters}}


def _drawn(**parameters: Any) -> Body:
    return _generate(do_sample=True, seed=3, ignore_eos_token=True, **parameters)


def _grammar(kind: str, value: Any, **parameters: Any) -> Body:
    return _generate(grammar={"type": kind, "value": value}, max_new_tokens=60, **parameters)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ALL_AT_ONCE = {
    **{"temperature": 1.3, "top_k": 100, "top_p": 0.95, "typical_p": 0.95, "top_n_tokens": 2},
    **{"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {"40": 2.0}},
}

_WHOLE: Mapping[str, Body] = {
    "greedy": _generate(decoder_input_details=True, ignore_eos_token=True),
    "without details": _generate(details=False),
    "top_n_tokens": _generate(top_n_tokens=4),
    "temperature": _drawn(temperature=1.4),
    "top_k": _drawn(top_k=5),
    "top_p": _drawn(top_p=0.8, temperature=1.5),
    "typical_p": _drawn(typical_p=0.7),
    "repetition_penalty": _generate(repetition_penalty=1.5),
    "frequency_penalty": _generate(frequency_penalty=1.5),
    "presence_penalty": _generate(presence_penalty=1.5),
    "logit_bias": _generate(logit_bias={"40": 2.0, "50": -100.0}),
    "all at once": _drawn(**ALL_AT_ONCE),
    "min_new_tokens": _generate(min_new_tokens=6, logit_bias=END_TOKENS),
    "stop": _drawn(stop=["e", "a", " "], max_new_tokens=60),
    "truncate": _generate(truncate=5, decoder_input_details=True),
    "as long as allowed": _generate(
        LONGEST_PROMPT, decoder_input_details=True, max_new_tokens=212, ignore_eos_token=True
    ),
    "a JSON grammar": _grammar("json", PERSON),
    "a drawn JSON grammar": _grammar("json", PERSON, do_sample=True, seed=5),
    "a regular expression": _grammar("regex", "[0-9]{3}-[a-c]{4}"),
}
_STREAMS: Mapping[str, Body] = {
    "a stream": _generate(),
    "a drawn stream": _drawn(temperature=1.2, top_n_tokens=3),
    "a stream of a grammar": _grammar("regex", "[A-F]{8}/[0-9]+z"),
}
_CHATS: Mapping[str, Body] = {
    "a chat": {"logprobs": True, "top_logprobs": 3, "temperature": 0},
    "a chat with choices": {"n": 2, "seed": 9, "temperature": 1.1, "logprobs": True},
    "a streamed chat": {"stream": True, "seed": 4, "stream_options": {"include_usage": True}},
    "a chat of JSON": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
        **{"max_tokens": 60, "temperature": 0},
    },
}
_COMPLETIONS: Mapping[str, Body] = {
    "a completion": {"logprobs": 3, "echo": True, "temperature": 0},
    "completions": {"prompt": [PROMPT, "where is "], "n": 2, "seed": 6, "logprobs": 1},
    "a streamed completion": {"stream": True, "temperature": 0, "stop": ["e"]},
}

QUESTIONS: Mapping[str, tuple[str, Body]] = {
    **{name: ("/generate", body) for name, body in _WHOLE.items()},
    **{name: ("/generate_stream", body) for name, body in _STREAMS.items()},
    **{
        name: ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 16, **body})
        for name, body in _CHATS.items()
    },
    **{
        name: ("/v1/completions", {"prompt": PROMPT, "max_tokens": 16, **body})
        for name, body in _COMPLETIONS.items()
    },
}
"""Name → path and body. Each always gets the same tokens."""

WATERMARKED = _generate(watermark=True)
"""The favoured tokens depend on the device."""


def ask(client: httpx.Client, path: str, body: Body) -> Answer:
    """The JSON answer or the events of a stream, flat: see `flat`. Raises AssertionError without an
    ending, or if a log-probability other than a prompt's first is missing."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    whole: Any = None
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in response.text.split("\n") if line.startswith("data:")]
        parts = [line.removeprefix("data:").strip() for line in lines]
        whole = [json.loads(part) for part in parts if part != "[DONE]"]
    else:
        whole = response.json()
    answer = flat(whole)
    endings = [place for place, value in answer.items() if "finish_reason" in place and value]
    assert endings or list(answer) == ["/generated_text"], response.text
    for place, value in answer.items():
        if place.endswith("/logprob"):
            assert isinstance(value, float) or place.endswith("/prefill/0/logprob"), place
    return answer


def flat(answer: Any) -> Answer:
    """Path → value, without ids and times, which change in every answer."""
    return {
        place: value
        for place, value in _leaves(answer, "")
        if not place.endswith("/created") and not (place.endswith("/id") and isinstance(value, str))
    }


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}/{name}")
    elif isinstance(value, list):
        yield f"{place}/length", len(value)
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{place}/{index}")
    else:
        yield place, value
