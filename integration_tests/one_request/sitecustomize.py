"""Runs at the start of every process of a traced server: counts the calls of Python functions.

At each SIGUSR1 it writes the counts since the last one as JSON into the folder COUNTED_CALLS, as
`<process id>-<number>.json`: {file: {function: calls}}. A coroutine that goes on counts as a call.
"""

import json
import os
import signal
import sys
import threading
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from types import FrameType

_folder = Path(os.environ["COUNTED_CALLS"])
_numbers = count()
_calls: Counter[tuple[str, str]] = Counter()


def _on_event(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1


def _write(*_: object) -> None:
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (file, function), calls in list(_calls.items()):
        found[file][function] = calls
    _calls.clear()
    path = _folder / f"{os.getpid()}-{next(_numbers)}.json"
    written = path.with_suffix(".part")
    written.write_text(json.dumps(found))
    written.rename(path)


signal.signal(signal.SIGUSR1, _write)
threading.setprofile(_on_event)
sys.setprofile(_on_event)
