"""`text-generation-benchmark`: measures prefill and decode of the shards by batch size and length.

It starts shards for --model-id (default: the embedded model), with the flags of
`text-generation-launcher shards` that follow `--`. With --master-shard-uds-path it measures running
shards that no router uses: start them with `text-generation-launcher shards`.

With --url it measures a running OpenAI- or TGI-compatible server with streaming requests: --clients
at once, or --rate arrivals per second. Requests that fail are counted and do not end the run.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from text_generation_router.benchmark.display import BATCHES, display
from text_generation_router.benchmark.load import cli as load_cli
from text_generation_router.benchmark.measure import BenchmarkError, Choice, Shape, warm_up
from text_generation_router.benchmark.report import Figures, as_csv, markdown, write_outputs
from text_generation_router.client.shards import ShardedClient
from text_generation_router.client.translate import ShardInfo
from text_generation_router.errors import GenerationError
from text_generation_router.offline.shards_process import ShardsProcess, ShardsProcessError
from text_generation_router.request import Sampling
from text_generation_router.tokenizer import Tokenizer

_WRITERS = (".csv", ".json")


@dataclass(frozen=True, slots=True)
class _Target:
    """The shards to measure."""

    name: str
    uds_path: str
    tokenizer: Path


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; an error that the user can fix is one line and exit code 1."""
    options = _parse(arguments)
    try:
        if options.url is not None:
            key = options.api_key or os.environ.get("OPENAI_API_KEY") or None
            return load_cli.run(options, key)
        with _target(options) as target:
            uvloop.run(_measure(options, target))
    except (ShardsProcessError, GenerationError, BenchmarkError, ValueError, OSError) as error:
        print(f"text-generation-benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def create_parser() -> argparse.ArgumentParser:
    """The command line; the flags for shards have the names and defaults of TGI's tool."""
    parser = argparse.ArgumentParser(
        prog="text-generation-benchmark",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "runs of each batch before the measured ones; with --url, requests of each point"
    parser.add_argument(
        "-w", "--warmups", "--warmup", type=at_least(0), default=1, metavar="N", help=text
    )
    text = "file for the results, .json or .csv; repeatable"
    parser.add_argument("-o", "--output", type=Path, action="append", default=[], help=text)
    _add_flags(parser.add_argument_group("the shards, without a router").add_argument)
    group = parser.add_argument_group("a running server")
    load_cli.add_flags(group.add_argument, at_least)
    return parser


def _add_flags(add: Callable[..., Any]) -> None:
    """The flags that exclude --url."""
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


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = create_parser()
    options = parser.parse_args(arguments)
    if (text := _of_other_mode(parser, arguments)) is not None:
        parser.error(text)
    for path in options.output:
        if path.suffix not in _WRITERS:
            parser.error(f"--output {path} must end in {' or '.join(_WRITERS)}")
        if not path.parent.is_dir():
            parser.error(f"--output {path} is in a directory that does not exist")
    if options.url is not None and (text := load_cli.check(options)) is not None:
        parser.error(text)
    if options.master_shard_uds_path is not None:
        if options.model_id is not None or options.launcher_flags:
            parser.error("--master-shard-uds-path measures running shards: remove --model-id")
        if options.tokenizer_name is None:
            parser.error("--master-shard-uds-path needs --tokenizer-name, the model's directory")
    return options


def _of_other_mode(parser: argparse.ArgumentParser, arguments: list[str] | None) -> str | None:
    """An error if a flag was given that has no effect in this mode."""
    # With this namespace, argparse sets no defaults: only given flags have values.
    unset = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([]))))
    given = {
        name
        for name, value in vars(parser.parse_args(arguments, unset)).items()
        if value not in (None, [])
    }
    of_shards = argparse.ArgumentParser(add_help=False)
    _add_flags(of_shards.add_argument)
    of_load = argparse.ArgumentParser(add_help=False)
    load_cli.add_flags(of_load.add_argument, at_least)
    is_load = "url" in given
    other = vars((of_shards if is_load else of_load).parse_args([]))
    wrong = sorted(given.intersection(other))
    if not wrong:
        return None
    name = wrong[0]
    flag = "flags after --" if name == "launcher_flags" else f"--{name.replace('_', '-')}"
    return f"{flag} can not be combined with --url" if is_load else f"{flag} needs --url"


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
    choice = Choice(_sampling(options), options.top_n_tokens)
    tokenizer = Tokenizer.load(target.tokenizer)
    shards = await ShardedClient.connect(target.uds_path)
    all_figures = [Figures(shape) for shape in shapes]
    try:
        bench, info = await warm_up(shards, tokenizer, shapes, choice)
        per_shape = options.warmups + options.runs
        with display(Console(), all_figures, per_shape * len(shapes), BATCHES) as shown:
            for place, figures in enumerate(all_figures):
                for number in range(per_shape):
                    run = await bench.run(figures.shape)
                    if number >= options.warmups:
                        figures.runs.append(run)
                    done = place * per_shape + number + 1
                    shown.show(figures, done, number == per_shape - 1)
    finally:
        await shards.close()
    _report(_parameters(options, target, info), all_figures, options.output)


def _sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        typical_p=options.typical_p,
        do_sample=options.do_sample,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        watermark=options.watermark,
    )


def _parameters(options: argparse.Namespace, target: _Target, info: ShardInfo) -> dict[str, Any]:
    """The parameters for the report."""
    names = ("decode_length", "runs", "warmups", "temperature", "top_k", "top_p", "typical_p")
    more = ("repetition_penalty", "frequency_penalty", "watermark", "do_sample", "top_n_tokens")
    return {
        "model": target.name,
        "dtype": info.dtype,
        "device": info.device_type,
        "attention": info.attention_impl,
        "shards": info.world_size,
        "version": info.version,
        **{name: getattr(options, name) for name in (*names, *more)},
    }


def _report(parameters: dict[str, Any], all_figures: list[Figures], outputs: list[Path]) -> None:
    print(markdown(parameters, all_figures))
    batches = [one.as_dict() for one in all_figures]
    write_outputs(outputs, {"parameters": parameters, "batches": batches}, as_csv(all_figures))


if __name__ == "__main__":
    sys.exit(main())
