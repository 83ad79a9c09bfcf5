"""The client people have installed: `text-generation` from PyPI, in its own environment."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from integration_tests.server import LauncherHandle, token_ids

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ".venv-clients/text-generation"
PROMPT = "the cat sat on the mat and "


@pytest.fixture(scope="module")
def answers(shared_server: LauncherHandle) -> dict[str, Any]:
    """What real_client.py got."""
    made = subprocess.run(
        ["make", f"{ENVIRONMENT}/.installed"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stdout + made.stderr
    command = [
        str(ROOT / ENVIRONMENT / "bin/python"),
        str(ROOT / "integration_tests/real_client.py"),
    ]
    done = subprocess.run(
        [*command, shared_server.url], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_generate(answers: dict[str, Any], server: LauncherHandle) -> None:
    expected = server.generate(PROMPT, max_new_tokens=12)
    assert answers["ids"] == token_ids(expected)
    assert answers["text"] == expected["generated_text"]
    assert answers["prefill"] == PROMPT
    assert all(count >= 2 for count in answers["top_tokens"])
    assert answers["full"].startswith(PROMPT)


def test_generate_stream(answers: dict[str, Any], server: LauncherHandle) -> None:
    assert answers["stream_ids"] == answers["ids"]
    assert answers["stream_text"] == answers["text"]
    assert answers["stream_finish_reason"] == answers["finish_reason"]


def test_samples(answers: dict[str, Any], server: LauncherHandle) -> None:
    assert answers["best_of"] == 1
    assert isinstance(answers["seed"], int)
    assert answers["seeded"][0] == answers["seeded"][1]


def test_errors_are_its_own_exceptions(answers: dict[str, Any], server: LauncherHandle) -> None:
    message = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 512."
    assert answers["error"].startswith(message)
    assert answers["stream_error"].startswith(message)
