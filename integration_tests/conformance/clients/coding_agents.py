"""What the scripts of coding agents share: the texts of the served model, and a place to run in.

`run_clients.py` serves a model that writes the script of the trigger that comes last in its prompt.
What an agent has to do is copy NOTE's file: the copy shows that its tool ran, and NOTE in the
result of the tool makes the model write DONE; any other result, NO_NOTE. Standard library only.
"""

import base64
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONTEXT = 32_000
TEXT, DONE = "The sky is blue today.", "The copy has been made."
NO_NOTE = "There is no note in it."
ASK_TEXT, ASK_TOOL = "Please write script:text", "Please write script:{}"
NOTE, PICTURE = "script:done", "picture.png"
_PNG = (  # of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
COPY = "cp note.txt copy.txt && cat copy.txt"


def _call(name: str, **arguments: str) -> str:
    """A call of a tool in the form of the served model."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPTS: Mapping[str, str] = {
    "": "Nothing was asked.",
    "script:text": f"<think>\nLook up.\n</think>\n\n{TEXT}",
    "script:claude-code": _call("Bash", command=COPY, description="Copies it"),
    "script:picture": _call("Read", file_path=PICTURE),
    "script:codex": _call("exec_command", cmd=COPY),
    "script:opencode": _call("bash", command=COPY),
    # It has no tools: the model writes a whole file, here without the trigger itself.
    "script:aider": f"Here it is.\n\ncopy.txt\n```\n{NOTE.replace(':', ': ')}\n```\n",
    NOTE: DONE,
    "<tool_response>": NO_NOTE,
}


def long_text(tokens: int) -> str:
    """A text of about this many tokens, small enough to be an argument of a command."""
    return " ".join(str(number % 90 + 10) for number in range(tokens // 2))


class Workplace:
    """Owns a home without settings and a git repository, in which an agent runs.

    Nothing outside this machine can be reached: requests over TLS end at a closed port.
    """

    def __init__(self, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
        self.home = Path(self._folder.name) / "home"
        self.repository = Path(self._folder.name) / "repository"
        self.home.mkdir()
        subprocess.run(["git", "init", "--quiet", self.repository], check=True)
        (self.repository / "note.txt").write_text(f"{NOTE}\n")
        (self.repository / PICTURE).write_bytes(base64.b64decode(_PNG))
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
            **environment,
        }

    def run(self, *command: str | Path, code: int = 0) -> str:
        """What a command prints on stdout. Raises AssertionError if it does not end with `code`."""
        done = subprocess.run(
            command,
            cwd=self.repository,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, (
            f"{done.returncode}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        )
        return done.stdout

    def copied(self) -> str:
        """What the agent has copied; empty if nothing. The copy is removed."""
        copy = self.repository / "copy.txt"
        text = copy.read_text() if copy.exists() else ""
        copy.unlink(missing_ok=True)
        return text.strip()


def events_of(printed: str) -> list[dict[str, Any]]:
    """The events that an agent prints, a line of JSON each."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def of_type(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of a type."""
    return [event for event in events if event["type"] == kind]


def program(pattern: str) -> Path:
    """The one executable of an npm package's platform that matches the pattern."""
    return sorted(Path(os.environ["NODE_PATH"]).glob(pattern))[-1]
