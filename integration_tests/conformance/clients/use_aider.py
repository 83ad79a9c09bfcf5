"""aider over `/v1/chat/completions`: a text, an edit in the same chat, an overflow."""

import json
import re
import sys
from pathlib import Path

from checks import API_KEY, URL, check, equal, run
from coding_agents import ASK_TEXT, ASK_TOOL, CONTEXT, NOTE, TEXT, Workplace, long_text

AIDER = Path(sys.executable).with_name("aider")
MODEL = "openai/tgi"
OPTIONS = (
    *("--model", MODEL, "--edit-format", "whole", "--yes-always", "--no-auto-commits"),
    *("--no-check-update", "--analytics-disable", "--no-show-model-warnings"),
    *("--no-show-release-notes", "--no-gitignore", "--no-pretty", "--map-tokens", "0"),
)
workplace = Workplace(
    OPENAI_API_BASE=f"{URL}/v1", OPENAI_API_KEY=API_KEY, LITELLM_LOCAL_MODEL_COST_MAP="True"
)
LIMITS = {"max_input_tokens": CONTEXT, "max_output_tokens": 2000, "mode": "chat"}
# Without them it asks GitHub for those of all models.
(workplace.repository / ".aider.model.metadata.json").write_text(json.dumps({MODEL: LIMITS}))


def ask(prompt: str, *options: str) -> str:
    """What one run prints."""
    return workplace.run(AIDER, *OPTIONS, *options, "--message", prompt)


def tokens_sent(printed: str) -> float:
    """What it tells: `Tokens: 1.2k sent`."""
    (number, thousands) = re.findall(r"Tokens: ([\d.]+)(k?) sent", printed)[0]
    return float(number) * (1000 if thousands else 1)


@check
def one_chat() -> None:
    first = ask(ASK_TEXT)
    assert TEXT in first, first
    second = ask(ASK_TOOL.format("aider"), "--restore-chat-history")
    assert "Applied edit to copy.txt" in second, second
    equal(workplace.copied(), NOTE.replace(":", ": "))
    assert tokens_sent(second) > tokens_sent(first), second


@check
def overflow() -> None:
    printed = ask(long_text(CONTEXT * 3 // 2) + ASK_TEXT)
    assert f"Model {MODEL} has hit a token limit!" in printed, printed


run()
