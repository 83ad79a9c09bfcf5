"""Finds the server's API, the fields that it refuses, and the number of tokens per word."""

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from text_generation_router.benchmark.load.api import APIS, Target
from text_generation_router.benchmark.load.events import StreamReader, one_line
from text_generation_router.benchmark.load.http import Answer, HttpClient, RequestError
from text_generation_router.benchmark.load.prompts import Length, random_words
from text_generation_router.benchmark.measure import BenchmarkError

AUTO = "auto"
# Statuses of refused bodies.
_REFUSALS = (400, 422)
# Statuses of missing routes; OpenAI answers 404 for a chat model on /v1/completions.
_NO_ROUTE = (404, 405, 501)
_PROBE_WORDS = 32


class _StatusError(BenchmarkError):
    """The server did not answer the first request with a stream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def find_target(
    client: HttpClient, api: str, model: str | None, ignore_eos: bool
) -> list[Target]:
    """The possible targets, most likely first. Raises BenchmarkError."""
    may_be_openai = api == AUTO or APIS[api].is_openai
    if not may_be_openai and model is not None:
        raise BenchmarkError(f"--api {api} has no model in its requests: remove --model")
    if model is None and api in (AUTO, "tgi"):
        info = await _json(client, "/info")
        if not may_be_openai or isinstance(info.get("model_id"), str):
            return [Target("tgi", str(info.get("model_id", "")), ignore_eos)]
    names = ("openai-completions", "openai-chat") if api == AUTO else (api,)
    model = model or await _first_model(client)
    return [Target(name, model, ignore_eos) for name in names]


async def _first_model(client: HttpClient) -> str:
    models = await _json(client, "/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise BenchmarkError(
            "neither /info nor /v1/models names a model: check --url and --api-key, or give --model"
        ) from error


async def _json(client: HttpClient, path: str) -> Mapping[str, Any]:
    """The JSON object at a path, or an empty one."""
    try:
        answer = await client.get(path)
    except RequestError as error:
        raise BenchmarkError(f"GET {path} failed ({error.kind}): {error}") from error
    try:
        found = orjson.loads(answer.body) if answer.status == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def probe(
    client: HttpClient, targets: list[Target], prompt: str | None, chooser: random.Random
) -> tuple[Target, int | None]:
    """The first target that answers, without the fields that it refuses, and the number of the
    prompt's tokens, if reported. Raises BenchmarkError."""
    prompt = prompt or random_words(chooser, _PROBE_WORDS)
    for target in targets[:-1]:
        try:
            return await _probe(client, target, prompt)
        except _StatusError as error:
            if error.status not in _NO_ROUTE:
                raise
    return await _probe(client, targets[-1], prompt)


async def measure_length(
    client: HttpClient,
    target: Target,
    first_tokens: int | None,
    input_tokens: int,
    chooser: random.Random,
) -> Length:
    """Sends a second prompt of about `input_tokens`, after `probe`. Raises BenchmarkError."""
    if first_tokens is None:
        return Length()
    first = (_PROBE_WORDS, first_tokens)
    num_words = Length.of(first, first).words(input_tokens)
    _, tokens = await _probe(client, target, random_words(chooser, num_words))
    return Length.of(first, first if tokens is None else (num_words, tokens))


async def _probe(client: HttpClient, target: Target, prompt: str) -> tuple[Target, int | None]:
    """Requests one token, and retries without each field that is refused."""
    while True:
        reader = StreamReader(target.api.read)
        try:
            answer = await client.post(target.api.path, target.body(prompt, 1), reader.feed)
        except RequestError as error:
            raise BenchmarkError(f"the first request failed ({error.kind}): {error}") from error
        reader.close(time.perf_counter())
        if answer.status == 200:
            if reader.failure is not None:
                raise BenchmarkError(f"the first request failed: {reader.failure[1]}")
            return target, reader.counts and reader.counts[0]
        refused = _refused_field(target, answer) if answer.status in _REFUSALS else None
        if refused is None:
            raise _StatusError(
                answer.status,
                f"POST {target.api.path} answered {answer.status}: {message_of(answer.body)}",
            )
        target = replace(target, refused=target.refused | {refused})


def _refused_field(target: Target, answer: Answer) -> str | None:
    """The field that the answer names, else the next of `ignore_eos`; None if no field is left."""
    text = answer.body.decode(errors="replace")
    not_sent = target.refused if target.ignore_eos else target.refused | {*target.api.ignore_eos}
    sent = [name for name in target.api.optional if name not in not_sent]
    for name in sent:
        # `max_tokens` is renamed, not left out: the answer must have the new name.
        if name in text and (name != "max_tokens" or "max_completion_tokens" in text):
            return name
    return next((name for name in sent if name in target.api.ignore_eos), None)


def message_of(body: bytes) -> str:
    """The message of an error's body, as one short line."""
    text = body.decode(errors="replace")
    try:
        found = orjson.loads(body)
        error = found["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return one_line(text) or "nothing"
