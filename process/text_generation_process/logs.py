"""Python's log records on standard output, written without waiting for the reader."""

import atexit
import logging
import os
import sys
from functools import partial

from text_generation_process.descriptors import LineStream, Output, fill_standard_descriptors

STDOUT, STDERR = 1, 2


def send_to_output(level: str, formatter: logging.Formatter, target: str) -> Output:
    """Sends records of `level` and above, also those of libraries, to standard output. `print` and
    tracebacks go through an `Output`, too, except standard error on a terminal, which may have
    progress bars.

    The returned Output may drop lines; a line of `target` then has their number.
    """
    fill_standard_descriptors()
    describe = partial(_describe_gap, formatter, target)
    output = Output(STDOUT, describe)
    handler = logging.StreamHandler(LineStream(output, STDOUT))
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    sys.stdout = LineStream(output, STDOUT)
    atexit.register(sys.stdout.finish)
    if not os.isatty(STDERR):
        sys.stderr = LineStream(Output(STDERR, describe), STDERR)
        atexit.register(sys.stderr.finish)
    return output


def _describe_gap(formatter: logging.Formatter, target: str, num_lines: int) -> str:
    what = "lines dropped here, because the log was not read: %d"
    return formatter.format(
        logging.LogRecord(target, logging.WARNING, "", 0, what, (num_lines,), None)
    )
