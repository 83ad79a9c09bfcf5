"""Every route, streamed and not, valid and invalid requests: the answers equal the transcripts.

`UPDATE_FROZEN=1 pytest integration_tests/conformance/test_transcripts.py` writes the current
answers (for a new transcript, write its request first); the diff shows the change of the API.
"""

import os
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from integration_tests.conformance import transcript
from integration_tests.server import LauncherHandle, SharedServers

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.json"))
CASES = [
    pytest.param(path, name, id=f"{path.stem}-{name}")
    for path in FILES
    for name in transcript.read(path)
]


@pytest.fixture(scope="module")
def conformance_server(shared_servers: SharedServers) -> Iterator[LauncherHandle]:
    """The embedded model in float32, whose greedy answers are the same on every processor."""
    handle = shared_servers.get(None, *transcript.SERVER_FLAGS)
    yield handle
    handle.assert_idle()


@pytest.mark.parametrize(("path", "name"), CASES)
def test_transcript(conformance_server: LauncherHandle, path: Path, name: str) -> None:
    entry = transcript.read(path)[name]
    response = transcript.send(conformance_server.client, entry["request"])
    assert response.headers["x-request-id"]
    answer = transcript.transcribe(response)
    if entry.get("is_interleaved"):
        answer["events"] = transcript.sorted_by_choice(answer["events"])
    if os.environ.get("UPDATE_FROZEN") == "1":
        entry = _update(path, name, answer)
    expected = entry["response"]
    texts = [transcript.pretty(one) for one in (expected, transcript.settle(answer, expected))]
    if texts[0] != texts[1]:
        lines = unified_diff(*(text.splitlines() for text in texts), "expected", "got", lineterm="")
        pytest.fail("\n".join(lines), pytrace=False)


def _update(path: Path, name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Writes the answer into its file, unless the file has an equal one."""
    transcripts = transcript.read(path)
    entry: dict[str, Any] = transcripts[name]
    if "response" in entry:
        answer = transcript.settle(answer, entry["response"])
    entry["response"] = answer
    transcript.write(path, transcripts)
    return entry
