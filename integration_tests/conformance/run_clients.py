"""`make conformance`: common clients, each in its own environment, against a real server.

usage: python -m integration_tests.conformance.run_clients [CLIENT ...]

A client is a script `clients/use_NAME.py`, its pinned packages are `requirements/NAME.txt`, and its
environment is `.venv-clients/NAME`, which the Makefile sets up. One in JavaScript is a script
`clients/use_NAME.cjs` with `requirements/NAME/package.json`. Exits with 1 if a check failed.
"""

import io
import json
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.conformance.transcript import API_KEY, SERVER_FLAGS
from integration_tests.server import LauncherHandle, clean_environment, running

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent.parent / ".venv-clients"
TIMEOUT_S = 120
COLUMNS = "{:<34} {:<10} {:>6} {:>6} {:>6} {:>8}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one client."""

    client: str
    version: str
    seconds: float
    checks: tuple[dict[str, Any], ...]
    """A line of JSON each, as `clients/checks.py` prints them."""
    crash: str
    """What the script left on stderr if it ended before its last check; else empty."""

    @property
    def failures(self) -> list[str]:
        """The failed checks with their tracebacks."""
        failed = [f"{one['check']}\n{one['error']}" for one in self.checks if one["error"]]
        return [*failed, *([f"the script crashed\n{self.crash}"] if self.crash else [])]

    def row(self) -> str:
        """The client's line of the table."""
        passed = sum(one["error"] is None for one in self.checks)
        failed = len(self.failures)
        return COLUMNS.format(
            self.client, self.version, len(self.checks), passed, failed, f"{self.seconds:.1f}"
        )


def clients() -> list[str]:
    """The names of all clients."""
    names = (path.stem.removeprefix("use_") for path in HERE.glob("clients/use_*"))
    return sorted(name.replace("_", "-") for name in names)


def version_of(client: str) -> str:
    """The version that is pinned for a client: of the first of its packages."""
    package = HERE / f"requirements/{client}/package.json"
    if package.exists():
        version, *_ = json.loads(package.read_text())["dependencies"].values()
        return str(version)
    first_line, *_ = (HERE / f"requirements/{client}.txt").read_text().splitlines()
    return first_line.partition("==")[2]


def command_of(client: str) -> list[str]:
    """The interpreter of a client's script."""
    script = HERE / f"clients/use_{client.replace('-', '_')}"
    if script.with_suffix(".cjs").exists():
        return ["node", f"{script}.cjs"]
    return [str(ENVIRONMENTS / client / "bin/python"), f"{script}.py"]


def ask(client: str, handle: LauncherHandle) -> Outcome:
    """Runs a client's script to its end."""
    environment = clean_environment() | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NODE_PATH": str(ENVIRONMENTS / client / "node_modules"),
    }
    del environment["HF_HUB_OFFLINE"]  # huggingface_hub would not even connect to this machine
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command_of(client), handle.url, API_KEY],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        printed, crash = done.stdout, done.stderr
        ended = done.returncode in (0, 1)
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode()
        crash, ended = f"still running after {TIMEOUT_S} s", False
    lines = [line for line in printed.splitlines() if line.startswith('{"check": ')]
    checks = tuple(json.loads(line) for line in lines)
    if ended and checks:
        crash = ""
    return Outcome(client, version_of(client), time.monotonic() - start, checks, crash)


def main() -> int:
    """Runs all clients, or the named ones, and prints the table."""
    log = io.StringIO()  # the server's, which it leaves on stdout
    with redirect_stdout(log), running(None, *SERVER_FLAGS) as handle:
        outcomes = [ask(client, handle) for client in sys.argv[1:] or clients()]
        handle.assert_idle()
    failures = [(one.client, failure) for one in outcomes for failure in one.failures]
    for client, failure in failures:
        print(f"FAILED {client}: {failure}")
    if failures:
        print(f"The server's log:\n{log.getvalue()}")
    print(COLUMNS.format("client", "version", "checks", "passed", "failed", "seconds"))
    for outcome in outcomes:
        print(outcome.row())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
