"""The load generator, a process of its own: a closed loop of clients against one streaming server.

Prints one JSON object. Tokens are those that the server counts at the end of each stream, checked
against the request. The clock is read when bytes arrive; a chunk with several events counts once
for each.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise, product
from string import ascii_lowercase
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Api:
    """The requests and events of one kind of server."""

    path: str
    body: Callable[[str, int, str], dict[str, Any]]
    """(prompt, new tokens, model) → the request."""
    has_text: Callable[[dict[str, Any]], bool]
    """Whether an event has at least one token."""
    counts: Callable[[dict[str, Any]], tuple[int, int] | None]
    """(prompt tokens, generated tokens) if this is the last event."""


def _tgi_body(prompt: str, new_tokens: int, _model: str) -> dict[str, Any]:
    parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
    return {"inputs": prompt, "parameters": parameters}


def _tgi_counts(event: dict[str, Any]) -> tuple[int, int] | None:
    details = event.get("details")
    return details and (details["input_length"], details["generated_tokens"])


def _openai_body(prompt: str, new_tokens: int, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,  # as vLLM and llama.cpp spell it
    }


def _transformers_body(prompt: str, new_tokens: int, model: str) -> dict[str, Any]:
    # No eos_token_id in it: then transformers serve never stops early.
    generation = {"do_sample": False, "max_new_tokens": new_tokens}
    return {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "max_tokens": new_tokens,
        "generation_config": json.dumps(generation),
    }


def _openai_has_text(event: dict[str, Any]) -> bool:
    return any(choice.get("text") for choice in event["choices"])


def _openai_counts(event: dict[str, Any]) -> tuple[int, int] | None:
    usage = event.get("usage")
    return usage and (usage["prompt_tokens"], usage["completion_tokens"])


APIS = {
    "tgi": Api("/generate_stream", _tgi_body, lambda event: "token" in event, _tgi_counts),
    "openai": Api("/v1/completions", _openai_body, _openai_has_text, _openai_counts),
    "transformers": Api("/v1/completions", _transformers_body, _openai_has_text, _openai_counts),
}


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one run."""

    url: str
    api: Api
    model: str
    clients: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    shared_tokens: int = 0
    """The number of first prompt tokens that all requests of all loads share."""


async def events(load: Load, body: dict[str, Any]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """(arrival time, event) of one POST; HTTP/1.1 on a bare socket, to use little CPU time."""
    address = urlsplit(load.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    payload = json.dumps(body).encode()
    writer.write(
        f"POST {load.api.path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.splitlines()[0]:
        raise RuntimeError(f"{head.decode()}{(await reader.read()).decode()}")
    pending = b""
    while size := int(await reader.readline(), 16):
        pending += (await reader.readexactly(size + 2))[:-2]
        arrived = time.perf_counter()
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                yield arrived, json.loads(line[5:])
    writer.close()


async def _one(load: Load, prompt: str) -> list[float]:
    """Seconds from the request to each event with text."""
    started = time.perf_counter()
    times: list[float] = []
    counts = None
    async for arrived, event in events(load, load.api.body(prompt, load.new_tokens, load.model)):
        if "error" in event:
            raise RuntimeError(f"the server answered {event}")
        if load.api.has_text(event):
            times.append(arrived - started)
        counts = load.api.counts(event) or counts
    if counts != (load.prompt_tokens, load.new_tokens):
        asked = f"{load.prompt_tokens} tokens in and {load.new_tokens} out"
        raise RuntimeError(f"asked for {asked}, the server counted {counts}")
    return times


async def run(load: Load) -> dict[str, float]:
    """Figures of the whole load; times in seconds."""
    waiting = prompts(load.requests, load.prompt_tokens, load.seed, load.shared_tokens)
    streams: list[list[float]] = []

    async def client() -> None:
        while waiting:
            streams.append(await _one(load, waiting.pop()))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())
    elapsed = time.perf_counter() - started
    first = [stream[0] for stream in streams]
    gaps = [later - sooner for s in streams for sooner, later in pairwise(s)]
    return {
        "tokens_per_s": len(streams) * load.new_tokens / elapsed,
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p99_s": quantile(first, 0.99),
        "itl_p50_s": quantile(gaps, 0.5),
        "itl_p95_s": quantile(gaps, 0.95),
        "itl_p99_s": quantile(gaps, 0.99),
        "requests": len(streams),
        "events_per_request": sum(map(len, streams)) / len(streams),
        "elapsed_s": elapsed,
    }


def prompts(count: int, num_tokens: int, seed: int, shared_tokens: int = 0) -> list[str]:
    """Different texts of exactly num_tokens tokens for the tokenizer of make_checkpoint.

    All begin with the same shared_tokens tokens, for every seed.
    """
    words = ["".join(letters) for letters in product(ascii_lowercase, repeat=3)]

    def text(chooser: random.Random, length: int) -> str:
        return "".join(f" {chooser.choice(words)}" for _ in range(length))

    beginning = text(random.Random("shared"), shared_tokens)
    chooser = random.Random(seed)
    return [beginning + text(chooser, num_tokens - shared_tokens) for _ in range(count)]


def quantile(values: list[float], share: float) -> float:
    """The nearest-rank quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else float("nan")


def main() -> None:
    """Runs the load described on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--api", choices=APIS, required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--shared-tokens", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    api = APIS[options.pop("api")]
    print(json.dumps(asyncio.run(run(Load(api=api, **options)))))


if __name__ == "__main__":
    main()
