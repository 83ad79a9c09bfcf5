"""Command line of `text-generation-server`: `serve` a model, or `download-weights`."""

import argparse
import gc
import json
import logging
import os
import sys
from pathlib import Path

from text_generation_process.defaults import LOGGER_LEVEL
from text_generation_process.flags import ShardConfig
from text_generation_process.log import LineFormatter, Output, raise_file_limit, send_to_output
from text_generation_process.option import add_flags

from text_generation_shard.device import prepare_process
from text_generation_shard.errors import OTHER_RANK_FAILED, RankError

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Errors that the user can fix are one ERROR line and exit code 1; the failure
    of another shard is one ERROR line and exit code 3."""
    arguments = build_parser().parse_args(argv)
    raise_file_limit()
    formatter = LineFormatter(arguments.json_output, names_package=True)
    output = send_to_output(arguments.logger_level, formatter, "text_generation_shard")
    try:
        if arguments.command == "serve":
            return _serve(arguments)
        return _download(arguments, output)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    except RankError as error:
        logger.error("%s", error)
        return OTHER_RANK_FAILED
    except KeyboardInterrupt:
        return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser; `serve` has the flags of ShardConfig."""
    parser = argparse.ArgumentParser(prog="text-generation-server", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="load a model and answer on a unix socket")
    serve.add_argument("model_path", type=Path, help="directory with config.json and weights")
    add_flags(serve, ShardConfig)
    download = commands.add_parser("download-weights", help="bring a model to this machine")
    download.add_argument("model_id", help="hub id or local directory")
    download.add_argument("--revision", help="branch, tag, commit or refs/pr/N")
    download.add_argument("--huggingface-hub-cache", type=Path)
    for command in (serve, download):
        command.add_argument("--logger-level", default=LOGGER_LEVEL, type=str.upper)
        command.add_argument("--json-output", action="store_true")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    # Compiled kernels are loaded and run at the next start: no other user may write them.
    os.umask(os.umask(0o022) | 0o022)
    prepare_process(os.environ, arguments.rank, arguments.world_size, arguments.device)
    # Importing torch takes seconds, which `--help` and downloads save. Its many permanent objects
    # are kept out of garbage collection, which would slow the start and pause steps.
    gc.disable()
    from text_generation_shard.server import serve

    gc.freeze()
    gc.enable()
    names = ShardConfig.__dataclass_fields__
    return serve(ShardConfig(**{name: getattr(arguments, name) for name in names}))


def _download(arguments: argparse.Namespace, output: Output) -> int:
    from text_generation_shard.checkpoint.download import resolve_model

    path = resolve_model(arguments.model_id, arguments.revision, arguments.huggingface_hub_cache)
    output.write(json.dumps({"model_path": str(path)}), is_needed=True)
    output.flush(None)  # the reader may be suspended and read later
    return 0


if __name__ == "__main__":
    sys.exit(main())
