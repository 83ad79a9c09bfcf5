"""The command `text-generation-launcher`; the only place that reads the process's environment."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from text_generation_process.log import fill_standard_descriptors, raise_file_limit
from text_generation_process.option import InvalidOptions

from text_generation_launcher.config import create_config, log_level
from text_generation_launcher.options import describe, notes, read_options, secrets, split_mode
from text_generation_launcher.process import Log, block_signals, conceal, end_with_stdin
from text_generation_launcher.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a stop signal. Exit code 0 after a signal, 1 after a failure or for options that
    contradict each other, 2 for an option that can't be read; a batch has its own."""
    fill_standard_descriptors()
    raise_file_limit()
    block_signals()
    environment = dict(os.environ)
    mode, argv = split_mode(sys.argv[1:] if argv is None else argv)
    values = read_options(argv, environment, mode)
    conceal(secrets(values))
    log = Log("INFO", "json-output" in values)
    try:
        log = Log(log_level(environment), "json-output" in values)
        config = create_config(values, environment, mode)
    except InvalidOptions as error:
        log.error(str(error))
        log.close()
        return 1
    if "env" in values:
        log.info(describe_environment())
    log.info(f"Options: {describe(values)}")
    for note in (*notes(values), *config.notes):
        log.info(note)
    if "end-with-stdin" in values:
        end_with_stdin()
    try:
        return Supervisor(config, log).run()
    finally:
        log.close()


def describe_environment() -> str:
    """What a bug report needs, in several lines: Python, system, package versions, GPUs."""
    from importlib import metadata

    lines = [
        "Runtime environment:",
        f"Python: {sys.version.split()[0]} ({sys.executable})",
        f"Platform: {platform.platform()}, {os.cpu_count()} cores",
        f"pytgi: {metadata.version('pytgi')}",
    ]
    for requirement in metadata.requires("pytgi") or ():
        # `grpcio>=1.76,<2`
        package = re.split(r"[^\w-]", requirement, maxsplit=1)[0]
        with suppress(metadata.PackageNotFoundError):  # of an extra
            lines.append(f"{package}: {metadata.version(package)}")
    try:
        run = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=10, check=False
        )
        gpus = "\n" + (run.stdout or run.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        gpus = str(error)
    return "\n".join([*lines, f"nvidia-smi: {gpus}"])


if __name__ == "__main__":
    sys.exit(main())
