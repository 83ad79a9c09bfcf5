"""The way of one streamed request: which files of the router and the shard it passes, and how many
Python calls a token takes. CONTRIBUTING's "One request" is this list."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from integration_tests.server import LauncherHandle, wait_until

ROOT = Path(__file__).parent.parent
HOOK = ROOT / "integration_tests" / "one_request"
NUM_TOKENS = 24


class Way(NamedTuple):
    """What one request ran in one process."""

    # Of our files, from the root of the repository: the calls of each function.
    calls: dict[str, dict[str, int]]

    @property
    def calls_a_token(self) -> float:
        """All calls of our functions, by the tokens of the answer."""
        return sum(sum(functions.values()) for functions in self.calls.values()) / NUM_TOKENS

    def __str__(self) -> str:
        lines = [f"{len(self.calls)} files, {self.calls_a_token:.0f} calls a token"]
        for file, functions in sorted(self.calls.items()):
            most = sorted(functions.items(), key=lambda own: -own[1])
            lines.append(f"  {sum(functions.values()):5} {file}: ")
            lines[-1] += ", ".join(f"{name} {calls}" for name, calls in most[:6])
        return "\n".join(lines)


class Traced:
    """A server whose router and shard count their calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {"PYTHONPATH": str(HOOK), "COUNTED_CALLS": str(folder)}
        self.server = LauncherHandle(None, **environment)
        self.server.wait_until_ready()
        self._processes = {
            name: self.server.child(f"text-generation-{command}")
            for name, command in (("router", "router"), ("shard", "server"))
        }

    def way_of(self, path: str, body: dict[str, object]) -> dict[str, Way]:
        """What router and shard run from the request to the end of its answer, the second time."""
        for _ in range(2):
            self._read()
            with self.server.client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200, answer.read()
                events = [line for line in answer.iter_lines() if line.startswith("data:")]
            assert len(events) >= NUM_TOKENS, events
            found = self._read()
        return found

    def _read(self) -> dict[str, Way]:
        return {name: self._read_one(process) for name, process in self._processes.items()}

    def _read_one(self, process: psutil.Process) -> Way:
        known = set(self._folder.glob(f"{process.pid}-*.json"))
        process.send_signal(signal.SIGUSR1)
        found = set[Path]()

        def is_written() -> bool:
            found.update(set(self._folder.glob(f"{process.pid}-*.json")) - known)
            return bool(found)

        wait_until(is_written, 20, f"{process.name()} writes its calls")
        calls = json.loads(found.pop().read_text())
        own = {Path(file).relative_to(ROOT): calls[file] for file in calls if str(ROOT) in file}
        return Way({str(file): own[file] for file in own if file.parts[0] in _PACKAGES})


_PACKAGES = ("router", "shard", "process", "launcher")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    found = Traced(tmp_path_factory.mktemp("calls"))
    yield found
    found.server.stop()


def short(file: str) -> str:
    """A file as CONTRIBUTING names it."""
    folder, _, rest = file.partition("/")
    name = rest.partition("/")[2]
    return f"process/{name}" if folder == "process" else name


def test_a_streamed_token_passes_few_files_and_calls(traced: Traced) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": NUM_TOKENS}}
    way = traced.way_of("/generate_stream", body)
    for name, own in way.items():
        print(f"{name}: {own}")
    router, shard = way["router"], way["shard"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", text.partition("## One request")[2].partition("\n## ")[0])
    unnamed = {short(file) for file in [*router.calls, *shard.calls]} - set(named)
    assert not unnamed, "CONTRIBUTING's One request does not name them"
    assert len(router.calls) <= 30
    assert len(shard.calls) <= 20
    assert router.calls_a_token <= 100
    assert shard.calls_a_token <= 70


def test_a_chat_stream_passes_few_more(traced: Traced) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": NUM_TOKENS}}
    plain = traced.way_of("/generate_stream", body)["router"]
    messages = [{"role": "user", "content": "Once upon a time"}]
    chat = {"messages": messages, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    more = traced.way_of("/v1/chat/completions", chat)["router"].calls.keys() - plain.calls.keys()
    print("\n".join(sorted(more)))
    assert len(more) <= 15
