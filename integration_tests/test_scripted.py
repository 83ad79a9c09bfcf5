"""Models that write a given script write it, whatever stands before and however it is drawn.

test_tool_tokens.py has servers of such models.
"""

from pathlib import Path

import pytest
from text_generation_router.chat.format import detect_format

from integration_tests.published import PUBLISHED, TEMPLATES
from integration_tests.scripted import write_scripted

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SCRIPTS = {
    "": "Good morning, Zoë.",
    "ask:calls": f"{CALL}\n{CALL}",
    "ask:call": f"<think>\n\n</think>\n\n{CALL}",
    "ask:again": "A text. A text.",
}


def _answer(name: str, directory: Path, prompt: str, *, draws: bool) -> str:
    """What transformers generates."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=100, do_sample=draws)
    [text] = tokenizer.batch_decode(answer[:, ids.shape[1] :])
    return str(text).removesuffix(PUBLISHED[name].eos)


@pytest.mark.parametrize("draws", [False, True])
def test_the_last_trigger_chooses_the_script(tmp_path: Path, draws: bool) -> None:
    write_scripted("qwen3", tmp_path, SCRIPTS)
    for trigger, script in SCRIPTS.items():
        for before in ("", "ask:again, ask:calls "):
            prompt = f"{before if trigger else ''}Please {trigger} me\n"
            assert _answer("qwen3", tmp_path, prompt, draws=draws) == script


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_written_in_the_tokens_of_every_vendor(tmp_path: Path, name: str) -> None:
    form = detect_format((TEMPLATES / PUBLISHED[name].template).read_text())
    script = "".join((*(form.reasoning or ()), form.write_calls([("now", "{}")]), "OK"))
    write_scripted(name, tmp_path, {"": script})
    assert _answer(name, tmp_path, "Please:\n", draws=False) == script


def test_a_script_that_is_not_clear_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two tokens may follow token 2 of the script of 'x'"):
        write_scripted("qwen3", tmp_path, {"": "a", "x": "<think><think><think>"})
