"""`text-generation-benchmark`: measures prefill and decode of the shards by batch size and length.

It starts shards for --model-id (default: the embedded model), with the flags of
`text-generation-launcher shards` that follow `--`. With --master-shard-uds-path it measures running
shards that no router uses: start them with `text-generation-launcher shards`.

With --url it measures a running OpenAI- or TGI-compatible server with streaming requests: --clients
at once, or --rate arrivals per second. Requests that fail are counted and do not end the run.
`text-generation-benchmark --url URL --help` shows the flags of this mode.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from text_generation_process.sampling import Sampling
from text_generation_router.client.ranks import ShardInfo
from text_generation_router.client.shards import ShardedClient
from text_generation_router.errors import GenerationError
from text_generation_router.offline.shards_process import ShardsProcess, ShardsProcessError
from text_generation_router.text.tokenizer import Tokenizer

from text_generation_benchmark import BenchmarkError, server
from text_generation_benchmark.report import write_outputs
from text_generation_benchmark.shards import (
    Batches,
    Choice,
    Shape,
    markdown,
    warm_up,
)

_SAMPLING = (
    *("temperature", "top_k", "top_p", "typical_p", "do_sample"),
    *("repetition_penalty", "frequency_penalty", "watermark"),
)


@dataclass(frozen=True, slots=True)
class _Target:
    """The shards to measure."""

    name: str
    uds_path: str
    tokenizer: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; an error that the user can fix is one line and exit code 1."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.url is not None:
            key = options.api_key or os.environ.get("OPENAI_API_KEY") or None
            return server.run(options, key)
        with _target(options) as target:
            uvloop.run(_measure(options, target))
    except (ShardsProcessError, GenerationError, BenchmarkError, ValueError, OSError) as error:
        print(f"text-generation-benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def create_parser(is_of_server: bool) -> argparse.ArgumentParser:
    """The command line of one mode; the flags for shards have the names and defaults of TGI's."""
    parser = argparse.ArgumentParser(
        prog="text-generation-benchmark",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="http(s)://host:port of a running OpenAI- or TGI-compatible server")
    text = "runs of each batch before the measured ones; with --url, requests of each point"
    add("-w", "--warmups", "--warmup", type=at_least(0), default=1, metavar="N", help=text)
    text = "file for the results as JSON; repeatable"
    add("-o", "--output", type=Path, action="append", default=[], help=text)
    if is_of_server:
        server.add_flags(add, at_least)
        return parser
    add("--model-id", help="hub id or directory of the model to start shards for")
    add("-m", "--master-shard-uds-path", help="socket of rank 0 of running shards")
    add("-t", "--tokenizer-name", type=Path, help="directory with the tokenizer of such shards")
    for letter, name, kind, default, text in (
        ("b", "batch-size", "+", [1, 2, 4, 8, 16, 32], "rows of a batch"),
        ("s", "sequence-length", "+", [10], "prompt tokens of each row"),
        ("d", "decode-length", None, 8, "generated tokens of each row, including the prefill's"),
        ("r", "runs", None, 10, "measured runs of each batch"),
    ):
        add(f"-{letter}", f"--{name}", type=at_least(1), nargs=kind, default=default, help=text)
    for name in ("temperature", "top-p", "typical-p", "repetition-penalty"):
        add(f"--{name}", type=float, default=1.0)
    add("--frequency-penalty", type=float, default=0.0)
    add("--top-k", type=at_least(0), default=0)
    add("--do-sample", action="store_true")
    add("--watermark", action="store_true")
    add("--top-n-tokens", type=at_least(0), default=0)
    add("launcher_flags", nargs="*", metavar="-- LAUNCHER FLAGS", help="e.g. --num-shard 2")
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser = create_parser(any(word.partition("=")[0] == "--url" for word in own))
    options = parser.parse_args(arguments)
    for path in options.output:
        if path.suffix != ".json":
            parser.error(f"--output {path} must end in .json")
        if not path.parent.is_dir():
            parser.error(f"--output {path} is in a directory that does not exist")
    if options.url is not None:
        if options.clients is not None and options.rate is not None:
            parser.error("--clients is a closed loop and --rate an open one: give one of them")
        if options.prompts is not None and options.input_tokens is not None:
            parser.error("--prompts and --input-tokens exclude each other")
    elif options.master_shard_uds_path is not None:
        if options.model_id is not None or options.launcher_flags:
            parser.error("--master-shard-uds-path measures running shards: remove --model-id")
        if options.tokenizer_name is None:
            parser.error("--master-shard-uds-path needs --tokenizer-name, the model's directory")
    return options


def at_least(minimum: int) -> Callable[[str], int]:
    """A parser of whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return number

    return parse


@contextmanager
def _target(options: argparse.Namespace) -> Iterator[_Target]:
    """The running shards that the options name, or new ones that end with the block."""
    if options.master_shard_uds_path is not None:
        path = options.master_shard_uds_path
        yield _Target(str(options.tokenizer_name), path, options.tokenizer_name)
        return
    model = [] if options.model_id is None else [f"--model-id={options.model_id}"]
    process = ShardsProcess([*model, *options.launcher_flags])
    try:
        address = process.wait_until_ready()
        tokenizer = options.tokenizer_name or Path(address.model_path)
        yield _Target(address.model_id, address.master_shard_uds_path, tokenizer)
    finally:
        process.close()


async def _measure(options: argparse.Namespace, target: _Target) -> None:
    shapes = [
        Shape(batch_size, sequence_length, options.decode_length)
        for sequence_length in options.sequence_length
        for batch_size in options.batch_size
    ]
    sampling = Sampling(**{name: getattr(options, name) for name in _SAMPLING})
    measured = [Batches(shape) for shape in shapes]
    tokenizer, console = Tokenizer.load(target.tokenizer), Console()
    shards = await ShardedClient.connect(target.uds_path)
    try:
        choice = Choice(sampling, options.top_n_tokens)
        bench, info = await warm_up(shards, tokenizer, shapes, choice)
        for one in measured:
            with console.status(f"{one.shape}"):
                for _ in range(options.warmups):
                    await bench.run(one.shape)
                one.runs += [await bench.run(one.shape) for _ in range(options.runs)]
            print(one.line(), flush=True)
    finally:
        await shards.close()
    parameters = _parameters(options, target, info)
    print(markdown(parameters, measured))
    report = {"parameters": parameters, "batches": [one.as_dict() for one in measured]}
    write_outputs(options.output, report)


def _parameters(options: argparse.Namespace, target: _Target, info: ShardInfo) -> dict[str, Any]:
    """The parameters for the report."""
    names = ("decode_length", "runs", "warmups", *_SAMPLING, "top_n_tokens")
    return {
        "model": target.name,
        "dtype": info.dtype,
        "device": info.device_type,
        "attention": info.attention_impl,
        "shards": info.world_size,
        "version": info.version,
        **{name: getattr(options, name) for name in names},
    }


if __name__ == "__main__":
    sys.exit(main())
