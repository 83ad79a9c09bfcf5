"""opencode over `/v1/chat/completions`: a session with a text, a tool and an overflow."""

import json
from typing import Any

from checks import API_KEY, URL, check, equal, run
from coding_agents import (
    ASK_TEXT,
    ASK_TOOL,
    CONTEXT,
    DONE,
    NOTE,
    TEXT,
    Workplace,
    events_of,
    long_text,
    of_type,
    program,
)

OPENCODE = program("opencode-linux-x64-baseline/bin/opencode")
PROMPT_OF_ITS_OWN = 12_000
MODEL = {"name": "tgi", "limit": {"context": 1_000_000, "output": 1000}}
PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "pytgi",
    "options": {"baseURL": f"{URL}/v1", "apiKey": API_KEY},
    "models": {"tgi": MODEL},
}
SETTINGS = {
    "model": "pytgi/tgi",
    "small_model": "pytgi/tgi",
    "share": "disabled",
    "permission": "allow",
    "provider": {"pytgi": PROVIDER},
}
workplace = Workplace(
    OPENCODE_DISABLE_AUTOUPDATE="1",
    OPENCODE_DISABLE_MODELS_FETCH="1",
    OPENCODE_DISABLE_LSP_DOWNLOAD="1",
    OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
)
settings = workplace.home / ".config/opencode"
# As if the package that its plugins need, and no plugin is here, had been installed.
(settings / "node_modules").mkdir(parents=True)
INSTALLED = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
(settings / "package-lock.json").write_text(json.dumps(INSTALLED))
(settings / "opencode.json").write_text(json.dumps(SETTINGS))


def ask(prompt: str, *options: str, code: int = 0) -> list[dict[str, Any]]:
    """The events of one run."""
    words = ("run", "--format", "json", "--title", "A title", *options, prompt)
    return events_of(workplace.run(OPENCODE, *words, code=code))


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["part"]["text"] for event in of_type(events, "text")]


@check
def one_session() -> None:
    half = long_text((CONTEXT - PROMPT_OF_ITS_OWN) * 2 // 3)
    first = ask(half + ASK_TEXT)
    equal(texts(first), [TEXT])
    session = ("--session", first[0]["sessionID"])

    second = ask(ASK_TOOL.format("opencode"), *session)
    (used,) = of_type(second, "tool_use")
    equal((used["part"]["tool"], used["part"]["state"]["status"]), ("bash", "completed"))
    equal((texts(second), workplace.copied()), ([DONE], NOTE))

    # It tells the overflow, and goes on by itself: a summary, and the answer.
    third = ask(half + ASK_TEXT, *session, code=1)
    (error,) = of_type(third, "error")
    equal(error["error"]["name"], "ContextOverflowError")
    _summary, answer = texts(third)
    equal(answer, TEXT)


run()
