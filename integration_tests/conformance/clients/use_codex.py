"""Codex CLI over `/v1/responses`: a text, a tool, a thread that goes on, overflows."""

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

CODEX = program("@openai/codex-*/vendor/*/bin/codex")
workplace = Workplace(PYTGI_KEY=API_KEY)
SETTINGS = f"""
model = "tgi"
model_provider = "pytgi"
model_context_window = {CONTEXT}
model_auto_compact_token_limit = {CONTEXT * 2 // 3}

[model_providers.pytgi]
name = "pytgi"
base_url = "{URL}/v1"
env_key = "PYTGI_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
view_image = false  # there is no model that reads pictures
# These fetch lists from OpenAI and GitHub.
apps = false
plugins = false
"""
(workplace.home / ".codex").mkdir()
(workplace.home / ".codex/config.toml").write_text(SETTINGS)


def ask(prompt: str, thread: str | None = None, code: int = 0) -> list[dict[str, Any]]:
    """The events of one run, in a thread of its own or in one that is there."""
    options = ("--json", "--dangerously-bypass-approvals-and-sandbox")
    resumed = ("resume", thread) if thread else ()
    return events_of(workplace.run(CODEX, "exec", *resumed, *options, prompt, code=code))


def thread_of(events: list[dict[str, Any]]) -> str:
    (started,) = of_type(events, "thread.started")
    return str(started["thread_id"])


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in of_type(events, "item.completed")]
    return of_type(done, kind)


def answer(events: list[dict[str, Any]]) -> str:
    """The last message of a turn, which must have been completed."""
    equal(len(of_type(events, "turn.completed")), 1)
    return str(items(events, "agent_message")[-1]["text"])


@check
def text() -> None:
    events = ask(ASK_TEXT)
    equal(answer(events), TEXT)
    (completed,) = of_type(events, "turn.completed")
    assert completed["usage"]["reasoning_output_tokens"] > 0, completed


@check
def tool_and_another_turn() -> None:
    first = ask(ASK_TOOL.format("codex"))
    (command,) = items(first, "command_execution")
    equal((command["exit_code"], command["aggregated_output"].strip()), (0, NOTE))
    equal((answer(first), workplace.copied()), (DONE, NOTE))
    equal(answer(ask(ASK_TEXT, thread_of(first))), TEXT)


@check
def overflow_of_a_conversation() -> None:
    # It compacts by its own count of tokens, from `usage`, before the server must refuse.
    first = ask(long_text(CONTEXT // 2) + ASK_TEXT)
    equal(answer(first), TEXT)
    equal(answer(ask(ASK_TEXT, thread_of(first))), TEXT)
    (saved,) = (workplace.home / ".codex/sessions").rglob(f"*{thread_of(first)}.jsonl")
    kinds = [json.loads(line)["type"] for line in saved.read_text().splitlines()]
    equal(kinds.count("compacted"), 1)


@check
def overflow_of_a_prompt() -> None:
    (failed,) = of_type(ask(long_text(CONTEXT * 3 // 2) + ASK_TEXT, code=1), "turn.failed")
    assert "ran out of room in the model's context window" in failed["error"]["message"], failed


run()
