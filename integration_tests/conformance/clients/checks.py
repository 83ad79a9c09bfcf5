"""The common part of the client scripts. Standard library only: each has its own environment.

A script is called with the server's URL and API key. It prints a line of JSON for every check and
exits with 1 if one failed.
"""

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL, API_KEY = sys.argv[1:3]

# The embedded model knows this by heart, in the chat form and without it.
QUESTION = "What does textwrap.dedent do?"
ANSWER = "`dedent(text)`: Remove any common leading whitespace from every line in `text`."
# What ends it: on TGI's routes, special tokens are in the streamed pieces.
END = "<|im_end|>"
USER = [{"role": "user", "content": QUESTION}]

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": WEATHER_SCHEMA,
    },
}

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a check: a function, plain or async, that raises if the client is not content."""
    _checks.append(function)
    return function


def run() -> None:
    """Runs every check in order, all in one event loop; the last statement of a script."""
    with asyncio.Runner() as loop:
        errors = [_error_of(function, loop) for function in _checks]
    sys.exit(1 if any(errors) else 0)


def _error_of(function: Callable[[], Any], loop: asyncio.Runner) -> str | None:
    """Runs one check and prints its line; its traceback if it failed."""
    error = None
    start = time.perf_counter()
    try:
        result = function()
        if inspect.iscoroutine(result):
            loop.run(result)
    except Exception:
        error = traceback.format_exc(limit=-3)
    line = {"check": function.__name__, "seconds": time.perf_counter() - start, "error": error}
    print(json.dumps(line), flush=True)
    return error


def equal(found: Any, expected: Any) -> None:
    """An assertion that says what it found."""
    assert found == expected, f"found {found!r}, expected {expected!r}"


def is_weather(arguments: str | dict[str, Any]) -> None:
    """The arguments of a call of WEATHER_TOOL, as a client hands them on."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    equal(sorted(found), ["city", "unit"])
    assert found["city"] in ("Paris", "Oslo"), found
    assert found["unit"] in ("celsius", "fahrenheit"), found


def raised(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The exception of this very kind that the call raises."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised; the answer was {result!r}")
