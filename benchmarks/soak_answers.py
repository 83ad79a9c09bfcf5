"""What an answer must be, dialect by dialect. A check raises `Wrong` with what it has found."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any


class Wrong(Exception):
    """An answer is not what its request promises. `is_typed`: the server says itself that it
    failed, in the form of the dialect, with a sentence and the kind of the error."""

    def __init__(self, said: str, is_typed: bool = False) -> None:
        super().__init__(said)
        self.is_typed = is_typed


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, as it came."""

    status: int
    content_type: str
    body: bytes

    def json(self) -> Json:
        """The body; `Wrong` if it is no JSON."""
        expect(self.content_type.startswith("application/json"), f"type {self.content_type!r}")
        return parsed(self.body)

    def lines(self) -> list[str]:
        """The data of each event; `Wrong` if the last one is cut."""
        expect(self.content_type.startswith("text/event-stream"), f"type {self.content_type!r}")
        expect(self.body.endswith(b"\n\n"), f"the last event is cut: {self.body[-200:]!r}")
        lines = self.body.decode(errors="replace").splitlines()
        return [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]


Check = Callable[[Answer], None]


def expect(condition: object, said: str) -> None:
    """`Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(said[:500])


def parsed(text: str | bytes) -> Json:
    """Of JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Wrong(f"no JSON ({error}): {text[:200]!r}") from None


def get(value: Json, *path: str | int) -> Json:
    """What lies there; `Wrong` if nothing does."""
    found = value
    for key in path:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            raise Wrong(f"no {key!r} of {path} in {value!r}"[:500]) from None
    return found


def is_error(value: Json) -> bool:
    """Whether a JSON value tells of an error, with its kind, in one of the dialects: TGI's, that of
    OpenAI and Anthropic, or the Responses API's. A probe says how the server is instead."""
    if not isinstance(value, dict):
        return False
    if value.keys() >= {"state", "phase", "since"}:
        return True
    error = value.get("error")
    if error is None and isinstance(value.get("response"), dict):
        error = value["response"].get("error")
    if isinstance(error, str):
        return bool(error) and isinstance(value.get("error_type"), str)
    return isinstance(error, dict) and bool(error.get("message"))


def raise_for_failure(answer: Answer) -> None:
    """`Wrong` where the server says that it failed, at once or at the end of a stream."""
    if answer.status >= 500 or answer.status == 424:
        try:
            is_typed = is_error(json.loads(answer.body))
        except ValueError:
            is_typed = False
        raise Wrong(f"{answer.status} {answer.body[:300]!r}", is_typed)
    if answer.status == 200 and answer.content_type.startswith("text/event-stream"):
        for line in answer.lines():
            event = parsed(line) if line != "[DONE]" else None
            if is_error(event):
                raise Wrong(f"event {line[:300]}", True)


def ok(answer: Answer) -> Json:
    """The JSON of a 200."""
    expect(answer.status == 200, f"{answer.status} {answer.body[:300]!r}")
    return answer.json()


def events(answer: Answer, last: str = "") -> list[Json]:
    """The events of a stream of 200, which ends with `last`, that is left out."""
    expect(answer.status == 200, f"{answer.status} {answer.body[:300]!r}")
    lines = answer.lines()
    if last:
        expect(lines and lines[-1] == last, f"the stream ends with {lines[-1:]}, not {last}")
        lines = lines[:-1]
    expect(lines, "a stream without events")
    return [parsed(line) for line in lines]


def any_text(_: str) -> None:
    """Any text will do."""


# ---- One for each form of an answer. `text` looks at the text that was generated. ----

Text = Callable[[str], None]


def status(wanted: int) -> Check:
    """This status, whatever the body is."""
    return lambda answer: expect(answer.status == wanted, f"{answer.status} {answer.body[:300]!r}")


def has(*keys: str) -> Check:
    """A JSON object with these keys."""

    def check(answer: Answer) -> None:
        found = ok(answer)
        for key in keys:
            get(found, key)

    return check


def generate(num_tokens: int, text: Text = any_text, best_of: int = 1) -> Check:
    """TGI's /generate with details."""

    def check(answer: Answer) -> None:
        found = ok(answer)
        details = get(found, "details")
        count = get(details, "generated_tokens")
        expect(1 <= count <= num_tokens, f"{count} tokens of {num_tokens}")
        expect(len(get(details, "tokens")) == count, "tokens are missing")
        ends = ("length", "eos_token", "stop_sequence")
        expect(get(details, "finish_reason") in ends, f"{details}")
        others = details.get("best_of_sequences") or ()
        expect(len(others) == best_of - 1, f"{len(others)} other sequences")
        text(get(found, "generated_text"))

    return check


def generate_stream(num_tokens: int, text: Text = any_text) -> Check:
    """TGI's /generate_stream: tokens are numbered, the last one carries the text."""

    def check(answer: Answer) -> None:
        found = events(answer)
        numbers = [get(event, "index") for event in found]
        expect(numbers == list(range(1, len(found) + 1)), f"tokens {numbers}")
        expect(len(found) <= num_tokens, f"{len(found)} tokens of {num_tokens}")
        expect(all(event["generated_text"] is None for event in found[:-1]), "an end in between")
        expect(isinstance(found[-1]["generated_text"], str), "the last event has no text")
        text(found[-1]["generated_text"])

    return check


def root(answer: Answer) -> None:
    """TGI's / without a stream."""
    expect(isinstance(get(ok(answer), 0, "generated_text"), str), "no text")


def choices(count: int, text: Text = any_text) -> Check:
    """OpenAI's chat and completions."""

    def check(answer: Answer) -> None:
        found = ok(answer)
        expect(len(get(found, "choices")) == count, f"{len(found['choices'])} choices")
        expect(get(found, "usage", "completion_tokens") > 0, f"{found['usage']}")
        for choice in found["choices"]:
            expect(choice.get("finish_reason") in ("length", "stop"), f"{choice}")
            text(choice["text"] if "text" in choice else get(choice, "message", "content"))

    return check


def chunks(count: int, text: Text = any_text) -> Check:
    """The same as a stream: each choice ends once, then comes [DONE]."""

    def check(answer: Answer) -> None:
        texts = [""] * count
        ends = [0] * count
        for event in events(answer, "[DONE]"):
            for choice in get(event, "choices"):
                number = get(choice, "index")
                delta = choice.get("delta", choice)
                texts[number] += delta.get("content", delta.get("text")) or ""
                ends[number] += choice.get("finish_reason") is not None
        expect(ends == [1] * count, f"ends of the choices: {ends}")
        for one in texts:
            text(one)

    return check


def tool_calls(names: Sequence[str]) -> Check:
    """A chat in which a tool must be called; arguments are JSON unless the length has cut them."""

    def check(answer: Answer) -> None:
        choice = get(ok(answer), "choices", 0)
        calls = get(choice, "message", "tool_calls")
        expect(calls, f"no call: {choice}")
        for call in calls:
            expect(get(call, "function", "name") in names, f"{call}")
            expect(isinstance(parsed(get(call, "function", "arguments")), dict), f"{call}")

    return check


def response(answer: Answer) -> None:
    """OpenAI's responses."""
    found = ok(answer)
    expect(get(found, "status") in ("completed", "incomplete"), f"{found}")
    expect(isinstance(get(found, "output", 0, "content", 0, "text"), str), f"{found}")


def response_stream(answer: Answer) -> None:
    """The same as a stream: numbered events, the last one tells the end."""
    found = events(answer)
    numbers = [get(event, "sequence_number") for event in found]
    expect(numbers == list(range(len(found))), f"events {numbers}")
    last = get(found[-1], "type")
    expect(last in ("response.completed", "response.incomplete"), f"ends with {last}")


def message(answer: Answer) -> None:
    """Anthropic's messages."""
    found = ok(answer)
    expect(get(found, "type") == "message" and get(found, "stop_reason"), f"{found}")
    expect(get(found, "usage", "output_tokens") > 0, f"{found}")


def message_stream(answer: Answer) -> None:
    """The same as a stream, from message_start to message_stop."""
    kinds = [get(event, "type") for event in events(answer)]
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", f"{kinds}")
    starts, stops = kinds.count("content_block_start"), kinds.count("content_block_stop")
    expect(starts == stops, f"{starts} blocks begin, {stops} end")


def embeddings(count: int) -> Check:
    """OpenAI's embeddings: vectors of length 1."""

    def check(answer: Answer) -> None:
        found = get(ok(answer), "data")
        expect(len(found) == count, f"{len(found)} vectors")
        for one in found:
            length = sum(number**2 for number in get(one, "embedding"))
            expect(abs(length - 1) < 1e-3, f"a vector of length {length}")

    return check


def tensor(answer: Answer) -> None:
    """KServe's inference: the bytes of a text."""
    found = get(ok(answer), "outputs", 0)
    expect(get(found, "shape") == [1, len(get(found, "data"))], f"{found}")


def tokens_of(text: str) -> Check:
    """TGI's /tokenize: the pieces are the text."""

    def check(answer: Answer) -> None:
        pieces = "".join(get(token, "text") for token in ok(answer))
        expect(pieces == text, f"{pieces[:100]!r} instead of {text[:100]!r}")

    return check


def predictions(count: int) -> Check:
    """Vertex AI's."""

    def check(answer: Answer) -> None:
        expect(len(get(ok(answer), "predictions")) == count, "predictions are missing")

    return check


def metrics(answer: Answer) -> None:
    """Prometheus' text."""
    status(200)(answer)
    for name in (b"\ntgi_queue_size ", b"\ntgi_restarts{"):
        expect(name in answer.body, f"no {name!r}")


def refused(*statuses: int) -> Check:
    """The client's own fault, said in the form of its dialect."""

    def check(answer: Answer) -> None:
        expect(answer.status in statuses, f"{answer.status} {answer.body[:300]!r}")
        expect(is_error(answer.json()), f"no error: {answer.body[:300]!r}")

    return check


def either(first: Check, second: Check) -> Check:
    """One of two."""

    def check(answer: Answer) -> None:
        try:
            first(answer)
        except Wrong as wrong:
            try:
                second(answer)
            except Wrong:
                raise wrong from None

    return check
