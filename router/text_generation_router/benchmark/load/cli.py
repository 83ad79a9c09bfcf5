"""`text-generation-benchmark --url`: its flags and its run."""

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from text_generation_process.descriptors import raise_file_limit

from text_generation_router.benchmark.display import Display, display
from text_generation_router.benchmark.load.api import APIS, Target
from text_generation_router.benchmark.load.figures import LoadFigures, Point
from text_generation_router.benchmark.load.http import Address, HttpClient
from text_generation_router.benchmark.load.prompts import random_prompts, read_prompts
from text_generation_router.benchmark.load.report import LiveRows, as_csv, as_dict, markdown, notes
from text_generation_router.benchmark.load.run import Bounds, LoadRun
from text_generation_router.benchmark.load.target import AUTO, find_target, measure_length, probe
from text_generation_router.benchmark.measure import BenchmarkError
from text_generation_router.benchmark.report import write_outputs

_REQUESTS = 100
_REQUESTS_WITH_SECONDS = 100_000
_SECONDS = 3600.0
_INPUT_TOKENS = 256


def add_flags(add: Callable[..., Any], at_least: Callable[[int], Callable[[str], int]]) -> None:
    """The flags that need --url; named as in vLLM's and guidellm's tools where those agree."""
    add("--url", help="http(s)://host:port of a running OpenAI- or TGI-compatible server")
    add(
        "--api",
        choices=(AUTO, *APIS),
        default=AUTO,
        help="API of the server; auto: /generate_stream if /info names a model (and without "
        "--model), else /v1/completions, else /v1/chat/completions",
    )
    add("--model", help="default: the first model of /v1/models")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")
    text = "closed loop: concurrent streams; a client sends its next request when its stream ends "
    text += "(default 1)"
    add("--clients", type=at_least(1), nargs="+", metavar="N", help=text)
    text = "open loop: arrivals per second (Poisson), independent of running streams"
    add("--rate", type=positive, nargs="+", metavar="R", help=text)
    default = f"(default {_REQUESTS}; with --seconds {_REQUESTS_WITH_SECONDS})"
    text = f"maximum requests of each point {default}"
    add("--requests", type=at_least(1), metavar="N", help=text)
    text = f"a point sends requests for this time; running streams then end (default {_SECONDS:g})"
    add("--seconds", type=positive, metavar="S", help=text)
    text = f"approximate tokens of each prompt of random words (default {_INPUT_TOKENS})"
    add("--input-tokens", type=at_least(1), metavar="N", help=text)
    text = (
        "prompts instead of random words: each line of a text file, or `prompt` of each line of a "
        ".jsonl; repeated from the start after the last one"
    )
    add("--prompts", type=Path, metavar="FILE", help=text)
    text = "tokens to generate for each request (default %(default)s)"
    add("--output-tokens", type=at_least(1), default=128, metavar="N", help=text)
    text = "ask the server to generate all --output-tokens (default); the report shows if it did"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = (
        "seed of prompts and arrivals (default: a random one, since the server's prefix cache may "
        "hold the prompts of an earlier run)"
    )
    add("--seed", type=at_least(0), metavar="N", help=text)
    text = "maximum seconds of a request (default %(default)g)"
    add("--timeout", type=positive, default=300.0, metavar="S", help=text)


def positive(text: str) -> float:
    """A parser of numbers above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def check(options: argparse.Namespace) -> str | None:
    """An error if flags exclude each other."""
    if options.clients is not None and options.rate is not None:
        return "--clients is a closed loop and --rate an open one: give one of them"
    if options.prompts is not None and options.input_tokens is not None:
        return "--prompts and --input-tokens exclude each other: remove --input-tokens"
    return None


def run(options: argparse.Namespace, api_key: str | None) -> int:
    """Measures and prints; after Ctrl-C, what was measured. Returns the exit code: 1 if no request
    succeeded. Raises BenchmarkError and OSError."""
    raise_file_limit()
    session = _Session(options, api_key)
    code = 0
    try:
        uvloop.run(session.run())
    except KeyboardInterrupt:
        code = 130
    if any(figures.results or figures.interrupted for figures in session.all_figures):
        session.report()
        if not code and not any(figures.num_good for figures in session.all_figures):
            print("text-generation-benchmark: no request succeeded", file=sys.stderr)
            return 1
    return code


class _Session:
    """One run of the command: owns the figures of all points."""

    def __init__(self, options: argparse.Namespace, api_key: str | None) -> None:
        self._options = options
        self._seed = random.SystemRandom().getrandbits(32)
        if options.seed is not None:
            self._seed = options.seed
        self._prompts = None if options.prompts is None else read_prompts(options.prompts)
        self._input_tokens = options.input_tokens or _INPUT_TOKENS
        with_seconds = _REQUESTS if options.seconds is None else _REQUESTS_WITH_SECONDS
        self._bounds = Bounds(
            options.requests or with_seconds, options.seconds or _SECONDS, options.timeout
        )
        self._client = HttpClient(Address.parse(options.url), api_key)
        self._target: Target | None = None
        clients = [Point(clients=number) for number in options.clients or [1]]
        rates = [Point(rate=rate) for rate in options.rate or ()]
        self.all_figures = [self._figures(point) for point in rates or clients]

    def _figures(self, point: Point) -> LoadFigures:
        input_tokens = self._input_tokens if self._prompts is None else None
        return LoadFigures(point, self._options.output_tokens, input_tokens)

    async def run(self) -> None:
        """All points, one after the other. Raises BenchmarkError."""
        try:
            prompts = await self._probe_in_time()
            assert self._target is not None
            chooser = random.Random(f"{self._seed} arrivals")
            load = LoadRun(self._client, self._target, prompts, chooser)
            with display(Console(), self.all_figures, 100, LiveRows().layout()) as shown:
                for place in range(len(self.all_figures)):
                    await self._point(load, place, shown)
        finally:
            self._client.close()

    async def _probe_in_time(self) -> Iterator[str]:
        timeout_s = self._options.timeout
        try:
            async with asyncio.timeout(timeout_s):
                return await self._probe()
        except TimeoutError as error:
            raise BenchmarkError(
                f"{self._options.url} has not answered the first requests after {timeout_s:g} s: "
                "check --url, or raise --timeout"
            ) from error

    async def _probe(self) -> Iterator[str]:
        """Sets the target and returns the prompts."""
        options = self._options
        chooser = random.Random(f"{self._seed} prompts")
        targets = await find_target(self._client, options.api, options.model, options.ignore_eos)
        first = None if self._prompts is None else self._prompts[0]
        self._target, tokens = await probe(self._client, targets, first, chooser)
        if self._prompts is not None:
            return cycle(self._prompts)
        length = await measure_length(
            self._client, self._target, tokens, self._input_tokens, chooser
        )
        return random_prompts(chooser, length.words(self._input_tokens))

    async def _point(self, load: LoadRun, place: int, shown: Display[LoadFigures]) -> None:
        """Runs the warm-up, whose figures are dropped, and the point."""
        figures = self.all_figures[place]
        if num_warmups := self._options.warmups:
            bounds = Bounds(num_warmups, self._bounds.seconds, self._bounds.timeout_s)
            point = Point(clients=figures.point.clients or num_warmups)
            await load.run(self._figures(point), bounds)
        num_points = len(self.all_figures)

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                share = max(
                    len(figures.results) / self._bounds.requests,
                    figures.elapsed_s / self._bounds.seconds,
                )
                shown.show(figures, round(100 * (place + min(share, 1.0)) / num_points), False)

        ticking = asyncio.create_task(tick())
        try:
            await load.run(figures, self._bounds)
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])
        if not ticking.cancelled():
            ticking.result()
        shown.show(figures, round(100 * (place + 1) / num_points), True)

    def report(self) -> None:
        """Prints and writes the figures."""
        assert self._target is not None
        options = self._options
        measured = [one for one in self.all_figures if one.results or one.interrupted]
        parameters = {
            "url": options.url,
            "api": self._target.name,
            "model": self._target.model,
            "loop": "closed" if options.rate is None else "open",
            "requests": self._bounds.requests,
            "seconds": self._bounds.seconds,
            "prompts": "random words" if options.prompts is None else str(options.prompts),
            "output_tokens": options.output_tokens,
            "ignore_eos": options.ignore_eos,
            "seed": self._seed,
            "timeout": options.timeout,
            "warmups": options.warmups,
        }
        found = notes(self._target, measured)
        num_prompts = math.inf if self._prompts is None else len(self._prompts)
        if sum(len(one.results) for one in measured) > num_prompts:
            text = "Note: prompts were sent more than once; a prefix cache may hold them."
            found.insert(0, text)
        print(markdown(parameters, measured))
        print("".join(f"\n{text}" for text in found), end="\n" if found else "")
        write_outputs(options.output, as_dict(parameters, found, measured), as_csv(measured))
