"""`text-generation-benchmark`: prefill and decode of the shards over batch sizes and lengths.

Starts shards of its own for --model-id (without it the embedded model); what stands behind `--` are
flags of `text-generation-launcher shards`. With --master-shard-uds-path it asks shards that run
already and that nobody serves from: start them with `text-generation-launcher shards`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console

from text_generation_router.benchmark.display import display
from text_generation_router.benchmark.measure import BenchmarkError, Choice, Shape, warm_up
from text_generation_router.benchmark.report import Figures, as_csv, markdown
from text_generation_router.client.shards import ShardedClient
from text_generation_router.client.translate import ShardInfo
from text_generation_router.errors import GenerationError
from text_generation_router.offline.shards_process import ShardsProcess, ShardsProcessError
from text_generation_router.request import Sampling
from text_generation_router.tokenizer import Tokenizer

_WRITERS = (".csv", ".json")


@dataclass(frozen=True, slots=True)
class _Target:
    """The shards that are measured."""

    name: str
    uds_path: str
    tokenizer: Path


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; what the user can mend is one line and exit code 1."""
    options = _parse(arguments)
    try:
        with _target(options) as target:
            uvloop.run(_measure(options, target))
    except (ShardsProcessError, GenerationError, BenchmarkError, ValueError, OSError) as error:
        print(f"text-generation-benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def create_parser() -> argparse.ArgumentParser:
    """The command line; names and defaults are those of TGI's tool."""
    parser = argparse.ArgumentParser(
        prog="text-generation-benchmark", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model-id", help="hub id or directory of the model to start shards for")
    add("-m", "--master-shard-uds-path", help="socket of rank 0 of shards that run already")
    add("-t", "--tokenizer-name", type=Path, help="directory with the tokenizer of such shards")
    for letter, name, kind, default, text in (
        ("b", "batch-size", "+", [1, 2, 4, 8, 16, 32], "rows of a batch"),
        ("s", "sequence-length", "+", [10], "prompt tokens of each row"),
        ("d", "decode-length", None, 8, "tokens generated for each row, the prefill's included"),
        ("r", "runs", None, 10, "runs of each batch that count"),
    ):
        add(f"-{letter}", f"--{name}", type=at_least(1), nargs=kind, default=default, help=text)
    add("-w", "--warmups", type=at_least(0), default=1, help="runs of each batch before those")
    for name in ("temperature", "top-p", "typical-p", "repetition-penalty"):
        add(f"--{name}", type=float, default=1.0)
    add("--frequency-penalty", type=float, default=0.0)
    add("--top-k", type=at_least(0), default=0)
    add("--do-sample", action="store_true")
    add("--watermark", action="store_true")
    add("--top-n-tokens", type=at_least(0), default=0)
    add(
        "-o", "--output", type=Path, action="append", default=[], help="a .json or .csv; repeatable"
    )
    add("launcher_flags", nargs="*", metavar="-- LAUNCHER FLAGS", help="as --num-shard 2")
    return parser


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = create_parser()
    options = parser.parse_args(arguments)
    for path in options.output:
        if path.suffix not in _WRITERS:
            parser.error(f"--output {path} must end in {' or '.join(_WRITERS)}")
        if not path.parent.is_dir():
            parser.error(f"--output {path} is in a directory that does not exist")
    if options.master_shard_uds_path is not None:
        if options.model_id is not None or options.launcher_flags:
            parser.error("--master-shard-uds-path is of shards that run already: leave --model-id")
        if options.tokenizer_name is None:
            parser.error("--master-shard-uds-path needs --tokenizer-name, the model's directory")
    return options


def at_least(minimum: int) -> Callable[[str], int]:
    """For whole numbers that are not smaller."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return number

    return parse


@contextmanager
def _target(options: argparse.Namespace) -> Iterator[_Target]:
    """The shards that were named, or some of our own that end with the block."""
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
        with display(Console(), all_figures, per_shape * len(shapes)) as shown:
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
    """What was asked of what, for the report."""
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
    for path in outputs:
        if path.suffix == ".csv":
            path.write_text(as_csv(all_figures))
        else:
            report = {"parameters": parameters, "batches": [one.as_dict() for one in all_figures]}
            path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
