"""The process that `text-generation-launcher batch` starts with its shards.

Exit codes: 0, every request has an answer; 3, some have an error instead; 1, some have no result,
and another run continues.
"""

import argparse
import asyncio
import logging
import signal
import sys
import time
from pathlib import Path

import uvloop

from text_generation_router.app import create_app
from text_generation_router.cli import add_flags
from text_generation_router.config import RouterConfig
from text_generation_router.logs import configure_logs
from text_generation_router.offline.batch import Batch, ShardsLostError
from text_generation_router.offline.batch_file import (
    BatchFileError,
    ResultsFile,
    custom_id_of,
    read_lines,
)
from text_generation_router.offline.progress import Bar, Tally, bar, duration
from text_generation_router.services import StartError, start

SOME_FAILED = 3
_DRAW_EVERY_S = 0.2
_LOG_EVERY_S = 10.0
# No request is refused because the queue is full.
_NO_LIMIT = 2**31 - 1

# This module runs as __main__.
logger = logging.getLogger("text_generation_router.offline.batch_cli")


def main(arguments: list[str] | None = None) -> int:
    """Answers the file; an error that the user can fix is one ERROR line and exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    add_flags(parser)
    options = vars(parser.parse_args(arguments))
    source, target = options.pop("input"), options.pop("output")
    configure_logs(options["logger_level"], options["json_output"])
    if not logger.isEnabledFor(logging.DEBUG):
        # It would log a line for each request; the result has the same information.
        logging.getLogger("text_generation_router.infer").setLevel(logging.CRITICAL)
    try:
        config = RouterConfig(**options)
        rows = {"max_batch_size": config.batch_rows, "max_concurrent_requests": _NO_LIMIT}
        return uvloop.run(_run(RouterConfig(**(options | rows)), source, target))
    except asyncio.CancelledError:
        logger.info("Interrupted: run the batch again to continue")
    except (StartError, BatchFileError, ShardsLostError, ValueError, OSError) as error:
        logger.error("%s", error)
    return 1


async def _run(config: RouterConfig, source: Path, target: Path) -> int:
    """Answers the requests that have no result yet; the exit code."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    results = ResultsFile(target)
    try:
        total = check_same(source, results, target)
        num_there = len(results.custom_ids)
        tally = Tally(total, done=num_there, failed=results.num_failed, first=num_there)
        if num_there:
            logger.info("%s has %d of %d results: continuing after them", target, num_there, total)
        if num_there < total:
            async with start(config) as services:
                tally.started = time.perf_counter()
                app = create_app(config, services)
                async with app.router.lifespan_context(app):
                    await _answer(Batch(app, services, source, results), tally)
    finally:
        results.close()
    logger.info(
        "%d requests: %d answered, %d failed; %d tokens in %s, %.0f tokens/s; results in %s",
        *(total, total - tally.failed, tally.failed, tally.tokens),
        *(duration(tally.elapsed_s), tally.tokens_per_s, target),
    )
    return SOME_FAILED if tally.failed else 0


async def _answer(batch: Batch, tally: Tally) -> None:
    """Runs the batch and shows its progress."""
    with bar(tally, sys.stderr) as drawn:
        showing = asyncio.create_task(_show(tally, drawn))
        try:
            await batch.run(tally)
        finally:
            showing.cancel()


async def _show(tally: Tally, drawn: Bar | None) -> None:
    while True:
        if drawn is not None:
            drawn.show(tally)
            await asyncio.sleep(_DRAW_EVERY_S)
        else:
            await asyncio.sleep(_LOG_EVERY_S)
            logger.info("%s", tally.line())


def check_same(source: Path, results: ResultsFile, target: Path) -> int:
    """The number of requests. Raises BatchFileError if the results are of other requests."""
    there, total, is_same = results.custom_ids, 0, True
    for place, line in enumerate(read_lines(source)):
        total = place + 1
        is_same = is_same and (place >= len(there) or custom_id_of(line) == there[place])
    if not is_same or total < len(there):
        raise BatchFileError(
            f"--output {target} has results of other requests than those in --input {source}: "
            "choose another file, or remove this one"
        )
    return total


if __name__ == "__main__":
    sys.exit(main())
