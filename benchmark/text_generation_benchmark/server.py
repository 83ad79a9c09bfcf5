"""`text-generation-benchmark --url`: loads a running server, point after point."""

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from text_generation_process.log import raise_file_limit

from text_generation_benchmark import BenchmarkError
from text_generation_benchmark.figures import Figures, Point, label, line, markdown, notes
from text_generation_benchmark.http import HttpClient, RequestError
from text_generation_benchmark.load import Bounds, Load, send
from text_generation_benchmark.report import write_outputs
from text_generation_benchmark.streams import APIS, Stream

# Common words: one token each in the vocabularies of most models.
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "government"),
    *("number", "night", "point", "home", "water", "room", "mother", "area", "money", "story"),
    *("fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"),
    *("side", "kind", "head", "house", "service", "friend", "power", "hour", "game", "line"),
)


def add_flags(add: Callable[..., Any], at_least: Callable[[int], Callable[[str], int]]) -> None:
    """The flags of this mode; named as in vLLM's and guidellm's tools where those agree."""
    text = "auto: tgi if /info names a model (and without --model), else openai-completions"
    add("--api", choices=("auto", *APIS), default="auto", help=f"API of the server; {text}")
    add("--model", help="default: the first model of /v1/models")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")
    text = "closed loop: concurrent streams; a client sends its next request when its stream ends "
    add("--clients", type=at_least(1), nargs="+", metavar="N", help=f"{text}(default 1)")
    text = "open loop: arrivals per second (Poisson), independent of running streams"
    add("--rate", type=positive, nargs="+", metavar="R", help=text)
    text = "maximum requests of each point (default 100; with --seconds unlimited)"
    add("--requests", type=at_least(1), metavar="N", help=text)
    text = "a point sends requests for this time; running streams then end"
    add("--seconds", type=positive, metavar="S", help=text)
    text = "approximate tokens of each prompt of random words (default 256)"
    add("--input-tokens", type=at_least(1), metavar="N", help=text)
    text = "text file whose lines are the prompts, instead of random words; repeated from its start"
    add("--prompts", type=Path, metavar="FILE", help=text)
    text = "tokens to generate for each request (default %(default)s)"
    add("--output-tokens", type=at_least(1), default=128, metavar="N", help=text)
    text = "ask the server to generate all --output-tokens (default); the report shows if it did"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "seed of prompts and arrivals (default: a random one, since the server's prefix cache "
    add("--seed", type=at_least(0), metavar="N", help=f"{text}may hold those of an earlier run)")
    text = "maximum seconds of a request (default %(default)g)"
    add("--timeout", type=positive, default=300.0, metavar="S", help=text)


def positive(text: str) -> float:
    """A parser of numbers above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


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
    if session.points:
        session.report()
        if not code and not any(one["requests_ok"] for one in session.points):
            print("text-generation-benchmark: no request succeeded", file=sys.stderr)
            return 1
    return code


class _Session:
    """One run of the command: owns the figures of the points that have begun."""

    def __init__(self, options: argparse.Namespace, api_key: str | None) -> None:
        self.points: list[Figures] = []
        self._options = options
        self._seed = random.SystemRandom().getrandbits(32)
        if options.seed is not None:
            self._seed = options.seed
        self._prompts = None if options.prompts is None else read_prompts(options.prompts)
        requests = options.requests or (100 if options.seconds is None else sys.maxsize)
        self._bounds = Bounds(requests, options.seconds or math.inf, options.timeout)
        self._client = HttpClient(options.url, api_key)
        self._api, self._model = options.api, options.model or ""

    async def run(self) -> None:
        """All points, one after the other. Raises BenchmarkError."""
        options = self._options
        try:
            try:
                async with asyncio.timeout(options.timeout):
                    await self._find_server()
                    prompts = await self._find_prompts()
            except TimeoutError as error:
                raise BenchmarkError(
                    f"{options.url} has not answered the first requests after "
                    f"{options.timeout:g} s: check --url, or raise --timeout"
                ) from error
            bodies = (self._body(prompt, options.output_tokens) for prompt in prompts)
            chooser = random.Random(f"{self._seed} arrivals")
            asked = None if self._prompts else options.input_tokens or 256
            point_of = partial(Point, output_tokens=options.output_tokens, input_tokens=asked)
            points = [point_of(rate=rate) for rate in options.rate or ()]
            points = points or [point_of(clients=number) for number in options.clients or [1]]
            for point in points:
                await self._warm_up(point, bodies)
                await self._measure(point, bodies, chooser)
        finally:
            self._client.close()

    async def _find_server(self) -> None:
        """Sets the API and the model."""
        if self._api in ("auto", "tgi") and not self._model:
            info = await self._get("/info")
            if self._api == "tgi" or isinstance(info.get("model_id"), str):
                self._api, self._model = "tgi", str(info.get("model_id", ""))
                return
        if self._api == "auto":
            self._api = "openai-completions"
        models = {} if self._model else await self._get("/v1/models")
        try:
            self._model = self._model or str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise BenchmarkError(
                "neither /info nor /v1/models names a model: check --url and --api-key, or give "
                "--model"
            ) from error

    async def _get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path, or an empty one."""
        try:
            answer = await self._client.request("GET", path)
            found = orjson.loads(answer.body) if answer.status == 200 else {}
        except RequestError as error:
            raise BenchmarkError(f"GET {path} failed ({error.kind}): {error}") from error
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def _find_prompts(self) -> Iterator[str]:
        """Tries one request, whose prompt tokens tell how many words a prompt needs."""
        chooser = random.Random(f"{self._seed} prompts")
        tokens = self._options.input_tokens or 256
        prompt = self._prompts[0] if self._prompts else " ".join(chooser.choices(_WORDS, k=tokens))
        api = APIS[self._api]
        stream = Stream(api.read)
        await send(self._client, api.path, self._body(prompt, 1), stream, self._options.timeout)
        if stream.failure is not None:
            kind, message = stream.failure
            raise BenchmarkError(
                f"POST {api.path} failed ({kind}): {message} (see --api and --no-ignore-eos)"
            )
        if self._prompts:
            return cycle(self._prompts)
        got = stream.counts[0] if stream.counts is not None else 0
        words = round(tokens * tokens / got) if got else tokens
        return iter(lambda: " ".join(chooser.choices(_WORDS, k=max(1, words))), "")

    def _body(self, prompt: str, output_tokens: int) -> bytes:
        api = APIS[self._api]
        return orjson.dumps(api.body(prompt, output_tokens, self._model, self._options.ignore_eos))

    async def _warm_up(self, point: Point, bodies: Iterator[bytes]) -> None:
        if count := self._options.warmups:
            bounds = Bounds(count, self._bounds.seconds, self._bounds.timeout_s)
            load = Load(self._client, APIS[self._api], bodies)
            await load.closed_loop(point.clients or count, bounds)

    async def _measure(self, point: Point, bodies: Iterator[bytes], chooser: random.Random) -> None:
        """Runs a point and prints its figures; on a terminal, how far it is meanwhile."""
        load = Load(self._client, APIS[self._api], bodies)
        if point.rate is None:
            loop = load.closed_loop(point.clients or 1, self._bounds)
        else:
            loop = load.open_loop(point.rate, chooser, self._bounds)
        running = asyncio.create_task(loop)
        try:
            with Console().status("", refresh_per_second=1) as status:
                while not running.done():
                    await asyncio.wait([running], timeout=1)
                    status.update(f"{len(load.ended)} answers in {load.elapsed_s:.0f} s")
        finally:
            self.points.append(point.figures(load))
        running.result()
        print(line(self.points[-1]), flush=True)

    def report(self) -> None:
        """Prints and writes the figures."""
        options = self._options
        parameters = {
            "url": options.url,
            "api": self._api,
            "model": self._model,
            "loop": "closed" if options.rate is None else "open",
            "requests": options.requests,
            "seconds": options.seconds,
            "prompts": "random words" if options.prompts is None else str(options.prompts),
            "output_tokens": options.output_tokens,
            "ignore_eos": options.ignore_eos,
            "seed": self._seed,
            "timeout": options.timeout,
            "warmups": options.warmups,
        }
        found = [
            f"Note: {label(one)}: {text}"
            for one in self.points
            for text in notes(one, options.ignore_eos)
        ]
        sent = sum(one["requests_ok"] + one["requests_failed"] for one in self.points)
        if self._prompts and sent > len(self._prompts):
            found.append("Note: prompts were sent more than once; a prefix cache may hold them.")
        print(markdown(parameters, self.points))
        print("".join(f"\n{text}" for text in found), end="\n" if found else "")
        report = {"parameters": parameters, "notes": found, "points": self.points}
        write_outputs(options.output, report)


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file. Raises BenchmarkError, OSError."""
    prompts = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not prompts:
        raise BenchmarkError(f"--prompts {path} has no prompts: write one per line")
    return prompts
