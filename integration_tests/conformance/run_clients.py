"""`make conformance`: common clients, each in its own environment, against a real server.

usage: python -m integration_tests.conformance.run_clients [CLIENT ...]

A client is a script `clients/use_NAME.py`, its pinned packages are `requirements/NAME.txt`, and its
environment is `.venv-clients/NAME`, which the Makefile sets up. One in JavaScript is a script
`clients/use_NAME.cjs` with `requirements/NAME/package.json`. A coding agent (AGENTS) finds a server
whose model writes the texts of `clients/coding_agents.py`. Exits with 1 if a check failed.
"""

import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.conformance.clients.coding_agents import CONTEXT, SCRIPTS
from integration_tests.conformance.transcript import API_KEY, SERVER_FLAGS
from integration_tests.scripted import write_scripted
from integration_tests.server import LauncherHandle, clean_environment, running

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent.parent / ".venv-clients"
TIMEOUT_S = 120
COLUMNS = "{:<34} {:<10} {:>6} {:>6} {:>6} {:>8}"
AGENTS = ("aider", "claude-code", "codex", "opencode")
AGENT_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--api-key", API_KEY),
    *("--max-total-tokens", str(CONTEXT), "--max-batch-total-tokens", str(3 * CONTEXT)),
)


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
    """A client's script with its interpreter: ours if the client is a program from npm."""
    script = HERE / f"clients/use_{client.replace('-', '_')}"
    if script.with_suffix(".cjs").exists():
        return ["node", f"{script}.cjs"]
    python = ENVIRONMENTS / client / "bin/python"
    return [str(python) if python.exists() else sys.executable, f"{script}.py"]


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


def ask_all(names: Sequence[str], model: Path | None, *flags: str) -> list[Outcome]:
    """Runs these clients against one server. Starts none if there are no clients."""
    if not names:
        return []
    with running(model, *flags) as handle:
        outcomes = [ask(name, handle) for name in names]
        handle.assert_idle()
    return outcomes


def main() -> int:
    """Runs all clients, or the named ones, and prints the table."""
    names = sys.argv[1:] or clients()
    agents = [name for name in names if name in AGENTS]
    log = io.StringIO()  # the servers', which they leave on stdout
    with redirect_stdout(log), tempfile.TemporaryDirectory() as folder:
        outcomes = ask_all([one for one in names if one not in AGENTS], None, *SERVER_FLAGS)
        if agents:
            model = write_scripted("qwen3", Path(folder), SCRIPTS)
            outcomes += ask_all(agents, model, *AGENT_FLAGS)
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
