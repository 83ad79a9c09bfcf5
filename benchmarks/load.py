"""A load of a server under comparison, in a process of its own: prompts of exact lengths.

Prints one JSON object. Tokens are those that the server counts at the end of each stream, checked
against the request. Each request has a connection of its own.
"""

import argparse
import asyncio
import json
import math
import random
from dataclasses import dataclass
from itertools import pairwise, product
from string import ascii_lowercase
from typing import Any

from text_generation_benchmark.http import HttpClient
from text_generation_benchmark.load import Bounds, send
from text_generation_benchmark.load import Load as Generator
from text_generation_benchmark.report import quantile
from text_generation_benchmark.streams import APIS as APIS_OF_SERVERS
from text_generation_benchmark.streams import Api, Stream, read_openai

__all__ = ["APIS", "Load", "answer", "prompts", "quantile", "run"]

TIMEOUT_S = 300.0


def _transformers_body(prompt: str, new_tokens: int, model: str, _: bool) -> dict[str, Any]:
    # No eos_token_id in it: then transformers serve never stops early.
    generation = json.dumps({"do_sample": False, "max_new_tokens": new_tokens})
    body = {"model": model, "prompt": prompt, "stream": True, "max_tokens": new_tokens}
    return {**body, "generation_config": generation}


APIS = APIS_OF_SERVERS | {"transformers": Api("/v1/completions", _transformers_body, read_openai)}


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one run."""

    url: str
    api: str
    model: str
    clients: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    shared_tokens: int = 0
    """The number of first prompt tokens that all requests of all loads share."""


async def run(load: Load) -> dict[str, float]:
    """Figures of the whole load; times in seconds. Raises RuntimeError if a request fails."""
    api = APIS[load.api]
    texts = prompts(load.requests, load.prompt_tokens, load.seed, load.shared_tokens)
    bodies = (json.dumps(api.body(text, load.new_tokens, load.model, True)) for text in texts)
    generator = Generator(HttpClient(load.url, keeps=False), api, map(str.encode, bodies))
    await generator.closed_loop(load.clients, Bounds(load.requests, math.inf, TIMEOUT_S))
    streams = generator.ended
    for stream in streams:
        if stream.failure is not None:
            raise RuntimeError(": ".join(stream.failure))
        if stream.counts != (load.prompt_tokens, load.new_tokens):
            asked = f"{load.prompt_tokens} tokens in and {load.new_tokens} out"
            raise RuntimeError(f"asked for {asked}, the server counted {stream.counts}")
    first = [stream.times[0] - stream.sent_s for stream in streams]
    gaps = [later - sooner for stream in streams for sooner, later in pairwise(stream.times)]
    return {
        "tokens_per_s": len(streams) * load.new_tokens / generator.elapsed_s,
        "ttft_p50_s": quantile(first, 0.5),
        "ttft_p99_s": quantile(first, 0.99),
        "itl_p50_s": quantile(gaps, 0.5),
        "itl_p95_s": quantile(gaps, 0.95),
        "itl_p99_s": quantile(gaps, 0.99),
        "requests": len(streams),
        "events_per_request": sum(len(stream.times) for stream in streams) / len(streams),
        "elapsed_s": generator.elapsed_s,
    }


async def answer(url: str, api: str, body: dict[str, Any], stream: Stream) -> None:
    """Sends one request and reads its answer into the stream. Raises RuntimeError if it fails."""
    client = HttpClient(url, keeps=False)
    await send(client, APIS[api].path, json.dumps(body).encode(), stream, TIMEOUT_S)
    if stream.failure is not None:
        raise RuntimeError(": ".join(stream.failure))


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
    print(json.dumps(asyncio.run(run(Load(**options)))))


if __name__ == "__main__":
    main()
