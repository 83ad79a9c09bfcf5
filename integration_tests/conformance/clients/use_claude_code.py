"""Claude Code over `/v1/messages`: a text, tools, a session that goes on, overflows."""

from typing import Any

from checks import API_KEY, URL, check, equal, run
from coding_agents import (
    ASK_TEXT,
    ASK_TOOL,
    CONTEXT,
    DONE,
    NO_NOTE,
    NOTE,
    TEXT,
    Workplace,
    events_of,
    long_text,
    of_type,
    program,
)

CLAUDE = program("@anthropic-ai/claude-code-*/claude")
PROMPT_OF_ITS_OWN = 19_000
workplace = Workplace(
    ANTHROPIC_BASE_URL=URL,
    ANTHROPIC_AUTH_TOKEN=API_KEY,
    ANTHROPIC_MODEL="tgi",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    DISABLE_AUTOUPDATER="1",
)


def ask(prompt: str, *options: str, code: int = 0) -> list[dict[str, Any]]:
    """The events of one run; the last is the result."""
    shown = ("--print", "--verbose", "--output-format", "stream-json", "--allowedTools", "Bash")
    return events_of(workplace.run(CLAUDE, *shown, *options, "--", prompt, code=code))


@check
def text() -> None:
    events = ask(ASK_TEXT)
    parts = [part for one in of_type(events, "assistant") for part in one["message"]["content"]]
    equal([part["type"] for part in parts], ["thinking", "text"])
    result = events[-1]
    equal((result["result"], result["is_error"], result["num_turns"]), (TEXT, False, 1))


@check
def tool_and_another_turn() -> None:
    *_, first = ask(ASK_TOOL.format("claude-code"))
    equal((first["result"], workplace.copied()), (DONE, NOTE))
    *_, second = ask(ASK_TEXT, "--resume", first["session_id"])
    equal(second["result"], TEXT)
    # Its history is the first turn's, which the server still has.
    assert second["usage"]["cache_read_input_tokens"] > PROMPT_OF_ITS_OWN / 2, second["usage"]


@check
def picture() -> None:
    """The server reads no pictures; its 400 names the block, which is left out."""
    *_, told, _last, result = ask(ASK_TOOL.format("picture"))
    (part,) = told["message"]["content"]
    assert "could not be processed and was removed" in part["text"], part
    equal(result["result"], NO_NOTE)


@check
def overflow_of_a_conversation() -> None:
    half = (CONTEXT - PROMPT_OF_ITS_OWN) * 2 // 3
    *_, first = ask(long_text(half) + ASK_TEXT)
    equal(first["result"], TEXT)
    events = ask(long_text(half) + ASK_TEXT, "--resume", first["session_id"])
    compacted = [one for one in of_type(events, "system") if one["subtype"] == "compact_boundary"]
    equal((len(compacted), events[-1]["result"]), (1, TEXT))


@check
def overflow_of_a_prompt() -> None:
    *_, result = ask(long_text(CONTEXT * 3 // 2) + ASK_TEXT, code=1)
    equal(result["terminal_reason"], "prompt_too_long")
    assert result["result"].startswith("Prompt is too long"), result["result"]


run()
