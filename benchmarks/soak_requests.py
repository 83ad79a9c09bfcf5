"""The kinds of requests of the soak, each with the check of its answer."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import soak_answers as answers
from soak_answers import Answer, Check, Wrong, expect

from integration_tests.schemas import SCHEMAS, Schema
from integration_tests.schemas import check as check_schema

# Prompt and answer together have 2,048 tokens at most; a word has fewer than three.
_MOST_WORDS, _MOST_TOKENS = 400, 400
# Enough for most of SCHEMAS; the others are refused with an error.
_SCHEMA_TOKENS = 200
_WORDS = (
    *("def", "return", "list", "of", "names", "value", "for", "in", "the", "file", "None", "path"),
    *("open", "read", "line", "import", "print", "text", "split", "join", "map", "key", "if"),
)
_REGEXES = ("[a-c]{3}", "[0-9]{4}-[0-9]{2}", "(red|green|blue)( [a-z]{2,5}){1,3}", "[A-F]+;")
_INFER = "/v2/models/pytgi/versions/1/infer"
_TOO_SHORT = b"that the shortest text of this grammar needs"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and the check of its answer."""

    method: str
    path: str
    content: bytes
    check: Check


@dataclass(frozen=True, slots=True)
class Kind:
    """The weight of a kind of request, and its generator."""

    weight: float
    make: Callable[[random.Random], Ask]
    may_vanish: bool = True
    """Whether the client may disconnect before the answer."""


def post(path: str, body: Any, check: Check) -> Ask:
    """JSON."""
    return Ask("POST", path, json.dumps(body).encode(), check)


def skewed(draw: random.Random, most: int) -> int:
    """From 1 to `most`, with orders of magnitude equally likely."""
    return min(most, int(math.exp(draw.uniform(0, math.log(most + 1)))))


def words(draw: random.Random, most: int = _MOST_WORDS) -> str:
    """A prompt. Some share a prefix with earlier ones, for the prefix cache."""
    count = skewed(draw, most)
    if draw.random() < 0.3:
        same = random.Random(draw.randrange(4))
        return " ".join(same.choices(_WORDS, k=count))
    return " ".join(draw.choices(_WORDS, k=count))


def messages(draw: random.Random) -> list[dict[str, Any]]:
    """A chat of one to three messages."""
    said = [{"role": "user", "content": words(draw, 100)}]
    if draw.random() < 0.3:
        said += [
            {"role": "assistant", "content": words(draw, 30)},
            {"role": "user", "content": words(draw, 30)},
        ]
    return said


def _sampling(draw: random.Random) -> dict[str, Any]:
    """TGI's parameters: greedy, or some kind of sampling."""
    if draw.random() < 0.4:
        return {}
    chosen = {"do_sample": True, "temperature": draw.choice([0.5, 1.0, 1.3])}
    options: tuple[dict[str, Any], ...] = (
        {"top_k": 20},
        {"top_p": 0.9},
        {"typical_p": 0.8},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.4},
        {"seed": draw.randrange(2**32)},
        {"watermark": True},
    )
    return chosen | draw.choice(options)


def _generate(draw: random.Random) -> Ask:
    count, best_of = skewed(draw, _MOST_TOKENS), 1
    parameters: dict[str, Any] = {"max_new_tokens": count, "details": True, **_sampling(draw)}
    if parameters.get("do_sample") and "seed" not in parameters and draw.random() < 0.3:
        best_of = parameters["best_of"] = 2
    elif draw.random() < 0.2:
        parameters |= {"top_n_tokens": 3, "decoder_input_details": True}
    elif draw.random() < 0.2:
        parameters["stop"] = ["\n\n", "zzz"]
    body = {"inputs": words(draw), "parameters": parameters}
    return post("/generate", body, answers.generate(count, best_of=best_of))


def _generate_stream(draw: random.Random) -> Ask:
    count = draw.choice([skewed(draw, _MOST_TOKENS), draw.randint(1, _MOST_TOKENS)])
    parameters = {"max_new_tokens": count, **_sampling(draw)}
    parameters["ignore_eos_token"] = draw.random() < 0.5
    body = {"inputs": words(draw), "parameters": parameters}
    return post("/generate_stream", body, answers.generate_stream(count))


def _root(draw: random.Random) -> Ask:
    count = skewed(draw, 60)
    body = {"inputs": words(draw), "parameters": {"max_new_tokens": count, **_sampling(draw)}}
    if draw.random() < 0.5:
        return post("/", body | {"stream": True}, answers.generate_stream(count))
    return post("/", body, answers.root)


# ---- Grammars ----


def _refused_as_too_long(answer: Answer) -> None:
    answers.refused(422)(answer)
    expect(_TOO_SHORT in answer.body, f"{answer.body[:300]!r}")


def _follows(schema: Schema) -> answers.Text:
    def check(text: str) -> None:
        try:
            check_schema(text, schema)
        except (AssertionError, ValueError) as error:
            raise Wrong(f"{text[:200]!r} against {schema}: {error}"[:600]) from None

    return check


def _matches(pattern: str) -> answers.Text:
    return lambda text: expect(re.fullmatch(pattern, text), f"{text!r} against {pattern}")


def _regex(draw: random.Random) -> Ask:
    pattern = draw.choice(_REGEXES)
    grammar = {"type": "regex", "value": pattern}
    parameters = {"max_new_tokens": 60, "details": True, "grammar": grammar, **_sampling(draw)}
    check = answers.generate(60, _matches(pattern))
    return post("/generate", {"inputs": words(draw), "parameters": parameters}, check)


def _schema(draw: random.Random) -> Ask:
    schema = draw.choice(SCHEMAS)
    grammar = {"type": "json", "value": schema}
    parameters = {"max_new_tokens": _SCHEMA_TOKENS, "grammar": grammar, **_sampling(draw)}
    check = answers.generate_stream(_SCHEMA_TOKENS, _follows(schema))
    body = {"inputs": words(draw, 100), "parameters": parameters}
    return post("/generate_stream", body, answers.either(check, _refused_as_too_long))


def _chat_schema(draw: random.Random) -> Ask:
    schema = draw.choice(SCHEMAS)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {
        **{"model": "tgi", "messages": messages(draw), "max_tokens": _SCHEMA_TOKENS},
        **{"response_format": form, "stream": draw.random() < 0.5},
    }
    check = (answers.chunks if body["stream"] else answers.choices)(1, _follows(schema))
    return post("/v1/chat/completions", body, answers.either(check, _refused_as_too_long))


def _tools(draw: random.Random) -> Ask:
    names = draw.sample(["look", "count", "open_file"], draw.randint(1, 3))
    parameters = {
        **{"type": "object", "properties": {"what": {"enum": ["a", "b"]}}},
        **{"required": ["what"], "additionalProperties": False},
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in names
    ]
    one = {"type": "function", "function": {"name": names[0]}}
    body = {
        **{"model": "tgi", "messages": messages(draw), "max_tokens": 60},
        **{"tools": tools, "tool_choice": draw.choice(["required", one])},
    }
    return post("/v1/chat/completions", body, answers.tool_calls(names))


# ---- OpenAI's and Anthropic's ----


def _chat(draw: random.Random) -> Ask:
    count, num_tokens = draw.choice([1, 1, 2, 3]), skewed(draw, 200)
    body = {
        **{"model": "tgi", "messages": messages(draw), "max_tokens": num_tokens, "n": count},
        **{"temperature": draw.choice([0, 0.8]), "logprobs": draw.random() < 0.2},
    }
    if draw.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return post("/v1/chat/completions", body, answers.chunks(count))
    return post("/v1/chat/completions", body, answers.choices(count))


def _completions(draw: random.Random) -> Ask:
    prompts, count = draw.randint(1, 3), draw.choice([1, 1, 2])
    body = {
        **{"model": "tgi", "prompt": [words(draw) for _ in range(prompts)], "n": count},
        **{"max_tokens": skewed(draw, 100), "temperature": 0.9},
    }
    if draw.random() < 0.5:
        check = answers.chunks(prompts * count)
        return post("/v1/completions", body | {"stream": True}, check)
    return post("/v1/completions", body, answers.choices(prompts * count))


def _responses(draw: random.Random) -> Ask:
    body = {"model": "tgi", "input": words(draw), "max_output_tokens": 16 + skewed(draw, 100)}
    if draw.random() < 0.5:
        return post("/v1/responses", body | {"stream": True}, answers.response_stream)
    return post("/v1/responses", body, answers.response)


def _messages(draw: random.Random) -> Ask:
    body = {"model": "tgi", "messages": messages(draw), "max_tokens": draw.randint(1, 300)}
    if draw.random() < 0.6:
        return post("/v1/messages", body | {"stream": True}, answers.message_stream)
    return post("/v1/messages", body, answers.message)


def _embeddings(draw: random.Random) -> Ask:
    count = draw.randint(1, 4)
    body = {"model": "tgi", "input": [words(draw) for _ in range(count)]}
    return post("/v1/embeddings", body, answers.embeddings(count))


# ---- The others ----


def _kserve(draw: random.Random) -> Ask:
    data = list(words(draw, 40).encode())
    body = {
        "id": "1",
        "inputs": [{"name": "i", "shape": [len(data)], "datatype": "UINT8", "data": data}],
        "outputs": [{"name": "o"}],
        "parameters": {"max_new_tokens": skewed(draw, 30)},
    }
    return post(_INFER, body, answers.tensor)


def _vertex(draw: random.Random) -> Ask:
    asked: list[dict[str, Any]] = [
        {"messages": messages(draw), "max_tokens": 8},
        {"inputs": words(draw, 40), "parameters": {"max_new_tokens": 8}},
    ]
    return post("/vertex", {"instances": asked}, answers.predictions(2))


def _invocations(draw: random.Random) -> Ask:
    body = {"model": "tgi", "messages": messages(draw), "max_tokens": 8, "stream": True}
    return post("/invocations", body, answers.chunks(1))


def _tokenize(draw: random.Random) -> Ask:
    text = words(draw)
    forms: tuple[tuple[str, Any, Check], ...] = (
        ("/tokenize", {"inputs": text}, answers.tokens_of(text)),
        (
            "/chat_tokenize",
            {"model": "tgi", "messages": messages(draw)},
            answers.has("tokenize_response"),
        ),
        (
            "/v1/messages/count_tokens",
            {"model": "tgi", "messages": messages(draw)},
            answers.has("input_tokens"),
        ),
    )
    return post(*draw.choice(forms))


_READS: tuple[tuple[str, Check], ...] = (
    ("/info", answers.has("model_id", "num_blocks")),
    ("/metrics", answers.metrics),
    ("/health", answers.status(200)),
    ("/livez", answers.has("state", "phase")),
    ("/readyz", answers.has("state", "phase")),
    ("/startupz", answers.has("state", "phase")),
    ("/v1/models", answers.has("data")),
    ("/v2", answers.has("name")),
    ("/v2/health/live", answers.status(200)),
    ("/v2/health/ready", answers.status(200)),
    ("/v2/models/pytgi", answers.has("name")),
)


def _read(draw: random.Random) -> Ask:
    path, check = draw.choice(_READS)
    return Ask("GET", path, b"", check)


_LONG = "word " * 3000
_BAD: tuple[Ask, ...] = (
    post("/generate", {}, answers.refused(422)),
    post("/generate", {"inputs": 5}, answers.refused(422)),
    post("/generate", {"inputs": ""}, answers.refused(422)),
    post("/generate", {"inputs": _LONG}, answers.refused(422)),
    post("/generate", {"inputs": "a", "parameters": {"temperature": -1}}, answers.refused(422)),
    post("/generate", {"inputs": "a", "parameters": {"top_p": 3}}, answers.refused(422)),
    post("/", {"inputs": "a", "parameters": {"max_new_tokens": 10**9}}, answers.refused(422)),
    post(
        "/generate",
        {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "((("}}},
        answers.refused(422),
    ),
    Ask("POST", "/generate", b'{"inputs": "a', answers.refused(400, 422)),
    Ask("POST", "/generate", b"\xff\xfe", answers.refused(400, 422)),
    Ask("GET", "/generate", b"", answers.status(405)),
    Ask("GET", "/nowhere", b"", answers.status(404)),
    post("/v1/chat/completions", {"model": "tgi"}, answers.refused(400, 422)),
    post(
        "/v1/chat/completions",
        {"model": "tgi", "messages": [{"role": "user", "content": "a"}], "n": 10**6},
        answers.refused(400, 422),
    ),
    post("/v1/completions", {"model": "tgi", "prompt": []}, answers.refused(400, 422)),
    post("/v1/embeddings", {"model": "tgi", "input": []}, answers.refused(400, 422)),
    post("/v1/messages", {"model": "tgi", "messages": []}, answers.refused(400)),
    post("/v1/responses", {"model": "tgi", "input": {"a": 1}}, answers.refused(400, 422)),
    post(_INFER, {"id": "1", "inputs": [{"name": "i"}]}, answers.refused(400, 422)),
    post("/rerank", {"query": "a", "documents": ["b"]}, answers.refused(404, 422)),
)


KINDS: dict[str, Kind] = {
    "generate": Kind(3, _generate),
    "generate_stream": Kind(6, _generate_stream),
    "root": Kind(1, _root),
    "regex": Kind(2, _regex),
    "schema": Kind(2, _schema),
    "chat": Kind(4, _chat),
    "chat_schema": Kind(1.5, _chat_schema),
    "tools": Kind(1, _tools),
    "completions": Kind(2, _completions),
    "responses": Kind(1.5, _responses),
    "messages": Kind(2, _messages),
    "embeddings": Kind(1, _embeddings),
    "kserve": Kind(0.5, _kserve),
    "vertex": Kind(0.5, _vertex),
    "invocations": Kind(0.5, _invocations),
    "tokenize": Kind(1.5, _tokenize, may_vanish=False),
    "read": Kind(3, _read, may_vanish=False),
    "bad": Kind(2, lambda draw: draw.choice(_BAD), may_vanish=False),
}


def drawn(draw: random.Random) -> tuple[str, Ask]:
    """The next request and the name of its kind."""
    [name] = draw.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
    return name, KINDS[name].make(draw)
