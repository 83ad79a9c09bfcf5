"""Valid and invalid requests from /api-doc/openapi.json: no 500, no undocumented answer."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from integration_tests.conformance.transcript import API_KEY
from integration_tests.marks import at_night
from integration_tests.server import LauncherHandle, running

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = ".venv-clients/schemathesis"
TIMEOUT_S = 1200
OPTIONS = (
    *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
    *("--seed", "20240229"),
    *("--request-timeout", "20"),
    *("--suppress-health-check", "all"),  # they judge the schema, not the server
    *("--generation-database", "none"),
    *("--warnings", "off"),
    *("--output-sanitize", "false"),
    "--no-color",
)


@pytest.fixture(scope="module")
def small_server() -> Iterator[LauncherHandle]:
    """A server whose answers are short even without limits in the request."""
    with running(
        None, "--device", "cpu", "--max-total-tokens", "20", "--api-key", API_KEY
    ) as handle:
        yield handle
        handle.assert_idle()


@pytest.mark.examples
@pytest.mark.parametrize("phase", ["fuzzing", *at_night("coverage")])
def test_every_answer_is_documented(
    small_server: LauncherHandle, tmp_path: Path, phase: str
) -> None:
    made = subprocess.run(
        ["make", f"{ENVIRONMENT}/.installed"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stdout + made.stderr
    command = [str(ROOT / ENVIRONMENT / "bin/schemathesis"), "run", "--phases", phase]
    command += ["--max-examples", str(settings().max_examples // 40)]
    headers = ["--header", f"Authorization: Bearer {API_KEY}"]
    # With the shortest timeout that the schema allows, every answer would be a 504.
    headers += ["--header", "X-Request-Timeout: 60"]
    done = subprocess.run(
        [*command, *OPTIONS, *headers, f"{small_server.url}/api-doc/openapi.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
