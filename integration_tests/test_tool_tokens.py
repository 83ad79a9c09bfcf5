"""Tools and reasoning in each vendor's tokens: added ones that are special, and that are not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from text_generation_router.chat.constraint import answer_grammar
from text_generation_router.chat.format import ToolSpec, detect_format
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_shard.grammars.grammar import load_tokenizer

from integration_tests.published import PUBLISHED, TEMPLATES, tokenizer_of, write_tokenizer
from integration_tests.scripted import write_scripted
from integration_tests.server import LauncherHandle, running

TOOLS = [ToolSpec("now"), ToolSpec("later")]


class Vendor:
    """A tokenizer as published, in the router and in the shard, and its chat format."""

    def __init__(self, name: str, directory: Path) -> None:
        self.published = PUBLISHED[name]
        self.form = detect_format((TEMPLATES / self.published.template).read_text())
        self._tokenizer = tokenizer_of(name)
        write_tokenizer(name, directory, self._tokenizer)
        self._eos_id = self._tokenizer.token_to_id(self.published.eos)
        size = self._tokenizer.get_vocab_size()
        self._matching = load_tokenizer(directory / "tokenizer.json", size, [self._eos_id])
        router = Tokenizer.load(directory)
        self._special_ids = router.special_ids(self.form.special_tokens)
        router.close()

    def calls(self, choice: str, text: str, *, in_reasoning: bool = False) -> bool:
        """Whether the answer may be this text, in the tokenizer's own tokens."""
        grammar = answer_grammar(
            self.form,
            None,
            TOOLS,
            choice,
            special_ids=self._special_ids,
            starts_in_reasoning=in_reasoning,
        )
        assert grammar is not None
        return self.follows(grammar.source, text)

    def follows(self, lark: str, text: str) -> bool:
        """Whether a text, and its end, follow a grammar."""
        source = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._matching, source, log_level=0)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        for token in (*ids, self._eos_id):
            assert not matcher.is_error(), matcher.get_error()
            if not matcher.compute_logit_bias()[token] or not matcher.consume_token(token):
                return False
        return True


@pytest.fixture(params=PUBLISHED)
def vendor(request: pytest.FixtureRequest, tmp_path: Path) -> Vendor:
    return Vendor(request.param, tmp_path)


def test_calls_are_taken_in_the_vendors_tokens(vendor: Vendor) -> None:
    call, others = vendor.form.write_calls([("now", "{}")]), vendor.form.write_calls([("no", "{}")])
    said = "<|channel|>final<|message|>" if vendor.form.has_channels else ""
    for choice in ("auto", "required", "now"):
        assert vendor.calls(choice, call)
        assert not vendor.calls(choice, others)
        assert vendor.calls(choice, f"{said}So: it is late. <b>") == (choice == "auto")
    assert vendor.calls("required", vendor.form.write_calls([("now", "{}"), ("later", "{}")]))
    if begin := vendor.form.begin:
        assert not vendor.calls("auto", f"I look.{begin} no")


@pytest.mark.parametrize(
    "vendor", ["qwen3", "mistral-args", "deepseek-r1", "smollm3"], indirect=True
)
def test_a_thought_in_the_vendors_tokens_is_no_answer_where_a_call_is_asked_for(
    vendor: Vendor,
) -> None:
    assert vendor.form.reasoning is not None
    begin, end = vendor.form.reasoning
    call = vendor.form.write_calls([("now", "{}")])
    for choice in ("auto", "required", "now"):
        for thought, is_open in ((f"{begin}\nhm <b>", False), ("hm <b>", True)):
            assert vendor.calls(choice, f"{thought}{end}\n\n{call}", in_reasoning=is_open)
            for text in (thought, f"{thought}{end}\n\nHello"):
                assert vendor.calls(choice, text, in_reasoning=is_open) == (choice == "auto")


def test_only_special_tokens_are_no_text(vendor: Vendor) -> None:
    schema = {"type": "object", "properties": {"a": {"const": ""}}, "required": ["a"]}
    for tokens, are_text in ((vendor.published.plain, True), (vendor.published.special, False)):
        for token in tokens:
            schema["properties"] = {"a": {"const": f"is {token}"}}
            for lark, text in (
                (f"start: {json.dumps(f'{token} x')}", f"{token} x"),
                ("start: /.+x/", f"a {token}x"),
                (f"start: %json {json.dumps(schema)}", f'{{"a":"is {token}"}}'),
            ):
                assert vendor.follows(lark, text) == are_text, (lark, token)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nI look.\n</think>\n\n"
SCRIPTS = {
    "": "It is late.",
    "ask:call": CALL,
    "ask:thought": f"{THOUGHT}{CALL}",
    "ask:text": f"{THOUGHT}It is noon. <|fim_prefix|> is text.",
    "ask:open": "<think>\nI wait.",
    "ask:json": f'{THOUGHT}{{"a": "<think>"}}',
    "<tool_response>": "The tool says so.",
}
BODY = {"tools": [tool.as_openai() for tool in TOOLS], "max_tokens": 200}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherHandle]:
    model = write_scripted("qwen3", tmp_path_factory.mktemp("qwen3"), SCRIPTS)
    with running(model, "--dtype", "float32") as server:
        yield server
        server.assert_idle()


def chat(server: LauncherHandle, text: str, **fields: Any) -> dict[str, Any]:
    """The first choice."""
    messages = [{"role": "user", "content": text}]
    response = server.client.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def names(choice: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in choice["message"].get("tool_calls") or ()]


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=str)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 4}], ids=str)
def test_a_call(qwen: LauncherHandle, choice: Any, sampling: dict[str, Any]) -> None:
    fields = {**BODY, "tool_choice": choice, **sampling}
    for kwargs in ({}, {"enable_thinking": False}):
        made = chat(qwen, "ask:call", **fields, chat_template_kwargs=kwargs)
        assert (names(made), made["message"]["content"]) == (["now"], None)
        assert made["finish_reason"] == "tool_calls"
    made = chat(qwen, "ask:thought", **fields)
    assert (names(made), made["message"]["reasoning_content"]) == (["now"], "I look.")


def test_reasoning_and_text(qwen: LauncherHandle) -> None:
    for fields in ({}, BODY):
        message = chat(qwen, "ask:text", **fields)["message"]
        assert message["reasoning_content"] == "I look."
        assert message["content"] == "It is noon. <|fim_prefix|> is text."
        message = chat(qwen, "ask:open", **fields)["message"]
        assert (message["reasoning_content"], message["content"]) == ("I wait.", "")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_a_thought_that_does_not_end_is_ended_for_a_call(qwen: LauncherHandle, choice: Any) -> None:
    for text in ("ask:open", "Hello"):
        made = chat(qwen, text, **BODY | {"tool_choice": choice, "max_tokens": 40})
        assert names(made) in (["now"], ["later"])


FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}


def test_a_format_behind_a_thought(qwen: LauncherHandle) -> None:
    message = chat(qwen, "ask:json", response_format=FORMAT)["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", '{"a": "<think>"}')
    for text in ("ask:open", "ask:text"):
        made = chat(qwen, text, response_format=FORMAT, max_tokens=30)
        assert set(json.loads(made["message"]["content"])) == {"a"}
    closed = {"enable_thinking": False}
    message = chat(
        qwen, "ask:text", response_format=FORMAT, chat_template_kwargs=closed, max_tokens=30
    )["message"]
    assert "reasoning_content" not in message
    assert set(json.loads(message["content"])) == {"a"}


def test_a_format_behind_a_thought_that_the_template_begins(tmp_path: Path) -> None:
    script = 'I look.\n</think>\n\n{"a": "</think>"}'
    write_scripted("deepseek-r1", tmp_path, {"": script})
    with running(tmp_path, "--dtype", "float32") as server:
        for more in ({}, BODY):
            message = chat(server, "Hi", response_format=FORMAT, **more)["message"]
            assert message["reasoning_content"] == "I look."
            assert message["content"] == '{"a": "</think>"}'
        server.assert_idle()


def test_channels_of_gpt_oss(tmp_path: Path) -> None:
    final = "<|channel|>final<|message|>"
    scripts = {
        "": f"{final}It is late.",
        "ask:call": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        "ask:thought": "<|channel|>analysis<|message|>I look.",
        "ask:json": f'{final}{{"a": ""}}',
    }
    write_scripted("gpt-oss", tmp_path, scripts)
    with running(tmp_path, "--dtype", "float32") as server:
        for fields in ({}, BODY):
            assert chat(server, "Hi", **fields)["message"]["content"] == "It is late."
            message = chat(server, "ask:thought", **fields)["message"]
            assert (message["reasoning_content"], message["content"]) == ("I look.", "")
        for choice in ("auto", "required", NAMED):
            made = chat(server, "ask:call", **BODY, tool_choice=choice)
            assert (names(made), made["message"]["content"]) == (["now"], None)
            assert made["finish_reason"] == "tool_calls"
        message = chat(server, "ask:json", response_format=FORMAT, max_tokens=60)["message"]
        assert message["content"] == '{"a": ""}'
        server.assert_idle()


def test_a_biased_marker(qwen: LauncherHandle) -> None:
    marker = qwen.client.post("/tokenize", json={"inputs": "<tool_call>"}).json()[0]["id"]
    made = chat(qwen, "ask:thought", **BODY, logit_bias={marker: 100})
    assert (names(made), made["message"].get("reasoning_content")) == (["now"], None)


def test_a_result_is_answered(qwen: LauncherHandle) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "ask:call"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "late"},
    ]
    answer = qwen.client.post("/v1/chat/completions", json={"messages": messages, **BODY}).json()
    assert answer["choices"][0]["message"]["content"] == "The tool says so."


def test_a_grammar_that_speaks_of_markers(qwen: LauncherHandle) -> None:
    regex = {"type": "regex", "value": r"<think>\nI wait\."}
    answer = qwen.generate("ask:open\n", grammar=regex, max_new_tokens=40)
    assert answer["generated_text"] == "<think>\nI wait."
    for lark in ('start: <think> "\\nI wait."', "start: <think> /(.|\\n)+/"):
        grammar = {"type": "lark", "value": lark}
        answer = qwen.generate("ask:open\n", grammar=grammar, max_new_tokens=40)
        assert answer["generated_text"] == "<think>\nI wait."
