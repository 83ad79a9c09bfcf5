"""Chat templates of real models render as in transformers; broken ones give errors."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.chat import rendering
from text_generation_router.chat.conversation import (
    fitted,
    plain_messages,
    strict_form,
)
from text_generation_router.chat.format import ToolSpec, detect_format
from text_generation_router.chat.rendering import Renderer
from text_generation_router.chat.template import ChatTemplate
from text_generation_router.errors import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

DIRECTORY = Path(__file__).parents[1] / "chat_templates"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  Wie spät ist es in <Zürich>?\n"}
SYSTEM = {"role": "system", "content": "You are \"brief\" & 'kind'."}
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "get_time", "arguments": {"city": "Zürich", "n": [1, None, True]}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNoon. "},
        {"role": "user", "content": "Sure?"},
    ],
    "calls": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"time": "12:00"}', "tool_call_id": "abcdefgh1"},
    ],
    "continued": [USER, {"role": "assistant", "content": "It is <noon> "}],
    "wrong order": [USER, USER],
}
ANSWER = {"role": "assistant", "content": "A"}
LONG_IDS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "call_0123456789"}]},
    {"role": "tool", "content": "12:00", "tool_call_id": "call_0123456789"},
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Ä <b>"}}}
TOOLS = [ToolSpec("get_time", "Says it's late.", SCHEMA).as_openai(), ToolSpec("now").as_openai()]


def source(name: str) -> str:
    return (DIRECTORY / f"{name}.jinja").read_text()


def render(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    tools = options.pop("tools", None)
    return Renderer({"default": text}, TOKENS, 2**30).render(messages or [USER], tools, **options)


def refusal(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        render(text, messages, **options)
    assert caught.value.status_code == 422
    assert caught.value.error_type == "template_error"
    return caught.value.message


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("chat", [name for name in CHATS if name != "continued"])
@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers_does(name: str, chat: str, options: dict[str, Any]) -> None:
    messages = CHATS[chat]
    try:
        [expected], _ = render_jinja_template(
            [messages],
            chat_template=source(name),
            add_generation_prompt=True,
            **{"tools": None, **TOKENS, **options},
        )
    except Exception as error:
        assert str(error) in refusal(source(name), messages, **options)
    else:
        assert render(source(name), messages, **options) == expected


@pytest.mark.parametrize("name", NAMES)
def test_continues_as_transformers_does(name: str) -> None:
    for content in ("It is <noon> ", "It is", "Say:\n\n"):
        messages = [USER, {"role": "assistant", "content": content}]
        [expected], _ = render_jinja_template(
            [messages],
            chat_template=source(name),
            continue_final_message=True,
            tools=None,
            **TOKENS,
        )
        rendered = render(source(name), messages, continue_final_message=True)
        assert rendered == expected
        assert rendered.rstrip().endswith(content.rstrip())


ORDERS = {
    "two users": [SYSTEM, USER, {"role": "user", "content": "B"}],
    "late system": [USER, ANSWER, {"role": "system", "content": "B"}, USER],
    "system last": [USER, {"role": "system", "content": "B"}],
    "two answers": [USER, ANSWER, {"role": "assistant", "content": "B"}, USER],
    "user behind a result": [*LONG_IDS, {"role": "user", "content": "B"}],
    "system behind a result": [*LONG_IDS, {"role": "system", "content": "B"}],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_template_takes_a_strict_form(name: str, order: str) -> None:
    template = source(name)
    messages = plain_messages(ORDERS[order], template, detect_format(template))
    try:
        rendered = render(template, fitted(strict_form(messages), template))
    except TemplateError:
        rendered = render(template, fitted(strict_form(messages, has_system=False), template))
    for message in messages:
        assert message["content"].strip() in rendered


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for m in messages %}", "syntax error: Unexpected end of template"),
        ("{% break %}", "SyntaxError: 'break' outside loop"),
        ("{{ raise_exception(42) }}", "42"),
        ("{{ messages[0].a.b }}", "'dict object' has no attribute 'a'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        ("{{ ''.__class__.a }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'x' %}", "TypeError: no loader for this environment specified"),
    ],
)
def test_broken_templates_are_template_errors(text: str, expected: str) -> None:
    assert refusal(text).startswith(f"Template error: {expected}")


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_CHARACTERS", 1000)
    long = "{% for a in range(99999) %}0123456789{% endfor %}"
    assert refusal(long) == "Template error: the prompt has more than 1000 characters"


def test_helpers_of_hugging_face() -> None:
    year = str(datetime.date.today().year)
    assert render("{{ strftime_now('%Y') }}") in (year, str(int(year) + 1))
    tojson = "{{ {'b': '<é>', 'a': [1]} | tojson(indent=1, sort_keys=true) }}"
    assert render(tojson) == '{\n "a": [\n  1\n ],\n "b": "<é>"\n}'
    assert render("{{ 'é' | tojson(ensure_ascii=true, separators=(',', ':')) }}") == '"\\u00e9"'
    blocks = "a\n  {% if true %}\nb\n  {% generation %}\nc{% endgeneration %}\n  {% endif %}\n"
    assert render(blocks) == "a\nb\nc"
    loop = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop) == "13"
    assert render("{{ documents }}{{ tools }}{{ nothing }}") == "NoneNone"
    assert render("{{ bos_token }}{{ eos_token }}{{ custom }}", custom="x") == "<s></s>x"
    variables = "{{ add_generation_prompt }} {{ messages | length }}"
    assert render(variables, tools=[], messages=[USER]) == "True 1"


def test_messages_that_can_not_be_continued() -> None:
    upper = "{{ messages[0].content | upper }}"
    text = [{"role": "assistant", "content": "é"}]
    assert render(upper, text, continue_final_message=True) == "É"
    for dropped in ("{{ messages[0].role }}", "{{ messages[0].content[:1] }}"):
        assert "can not be continued" in refusal(dropped, text, continue_final_message=True)


def test_named_templates() -> None:
    sources = {"default": "d", "tool_use": "t", "rag": "r", "bad": "{{"}
    template, renderer = ChatTemplate(sources, {}), Renderer(sources, {}, 2**30)
    assert (template.source, template.tool_source) == ("d", "t")
    assert renderer.render([USER], None) == "d"
    assert renderer.render([USER], TOOLS) == "t"
    assert renderer.render([USER], TOOLS, name="rag") == "r"
    assert Renderer({"default": "d"}, {}, 2**30).render([USER], TOOLS) == "d"
    for name, expected in (("nope", "no template 'nope'; it has: bad, default"), ("bad", "syntax")):
        with pytest.raises(TemplateError, match=expected):
            renderer.render([USER], None, name=name)
    assert ChatTemplate({"tool_use": "t"}, {}).source == "t"
    only_tools = Renderer({"tool_use": "t"}, {}, 2**30)
    assert only_tools.render([USER], TOOLS) == "t"
    with pytest.raises(TemplateError, match="no template 'default'"):
        only_tools.render([USER], None)


def write(directory: Path, **files: Any) -> None:
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="latin-1")


def rendered(template: ChatTemplate | None, **options: Any) -> str:
    assert template is not None
    tools = options.pop("tools", None)
    return Renderer(template.sources, template.special_tokens, 2**30).render(
        [USER], tools, **options
    )


def load(directory: Path, path: Path | None = None) -> str | None:
    """What the loaded template renders."""
    template = ChatTemplate.load(directory, path)
    return None if template is None else rendered(template)


def test_the_files_of_a_model(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    config: dict[str, Any] = {"eos_token": {"content": "<e>"}, "pad_token": None}
    special = {"bos_token": "<b>", "eos_token": "<x>"}
    write(tmp_path, tokenizer_config_DOT_json=config, special_tokens_map_DOT_json=special)
    assert load(tmp_path) is None
    for empty in ("", " \n", [{"name": "default", "template": ""}]):
        write(tmp_path, tokenizer_config_DOT_json={"chat_template": empty})
        assert load(tmp_path) is None
    config["chat_template"] = "config {{ bos_token }}{{ eos_token }}{{ pad_token }}"
    write(tmp_path, tokenizer_config_DOT_json=config)
    assert load(tmp_path) == "config <b><e>"
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config_DOT_json={"chat_template": listed})
    assert load(tmp_path) == "listed"
    assert rendered(ChatTemplate.load(tmp_path, None), tools=TOOLS) == "tools"
    write(tmp_path, chat_template_DOT_json={"chat_template": "old file"})
    assert load(tmp_path) == "old file"
    write(tmp_path, chat_template_DOT_jinja="own file")
    assert load(tmp_path) == "own file"
    write(tmp_path, additional_chat_templates__rag_DOT_jinja="more")
    assert rendered(ChatTemplate.load(tmp_path, None), name="rag") == "more"
    assert load(tmp_path) == "own file"


def test_a_given_file_wins(tmp_path: Path) -> None:
    write(
        tmp_path,
        chat_template_DOT_jinja="own file",
        tokenizer_config_DOT_json={"bos_token": "<b>", "eos_token": "<e>"},
        other_DOT_json={"chat_template": "other {{ bos_token }}", "bos_token": "<o>"},
        other_DOT_jinja="jinja {{ bos_token }}{{ eos_token }}",
        empty_DOT_json={},
    )
    assert load(tmp_path, tmp_path / "other.json") == "other <o>"
    assert load(tmp_path, tmp_path / "other.jinja") == "jinja <b><e>"
    assert load(tmp_path, tmp_path / "empty.json") is None
    with pytest.raises(ValueError, match=r"none\.json of --tokenizer-config-path does not exist"):
        load(tmp_path, tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer_config_DOT_json", "{", "is not valid JSON"),
        ("tokenizer_config_DOT_json", [], "must hold a JSON object, not a list"),
        ("tokenizer_config_DOT_json", {"chat_template": 3}, "must be a text or a list"),
        ("tokenizer_config_DOT_json", {"chat_template": [{"name": "a"}]}, "must be a text or"),
        ("chat_template_DOT_json", {"chat_template": ["a"]}, r"chat_template\.json must be a text"),
        ("chat_template_DOT_jinja", "\xff is no UTF-8", "can not be read"),
    ],
)
def test_broken_files_are_one_sentence(
    tmp_path: Path, name: str, content: Any, expected: str
) -> None:
    write(tmp_path, **{name: content})
    with pytest.raises(ValueError, match=expected):
        load(tmp_path)


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    template = ChatTemplate({"default": "\ud800a{{ eos_token }}"}, {"eos_token": "\udfff"})
    assert rendered(template) == "?a?"


STRICT = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the user speaks last') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHANGING = "{% for m in messages %}{{ m.content | length }};{% endfor %}{{ add_generation_prompt }}"


def test_a_template_that_takes_no_last_answer_is_continued_all_the_same() -> None:
    messages = [USER, {"role": "assistant", "content": "It is "}]
    prompt = render(STRICT, [USER])
    assert prompt.endswith("<assistant>")
    assert render(STRICT, messages, continue_final_message=True) == prompt + "It is "
    length = len(USER["content"])
    assert render(CHANGING, messages, continue_final_message=True) == f"{length};TrueIt is "
    messages = [messages[1], messages[1]]
    assert "speaks last" in refusal(STRICT, messages, continue_final_message=True)
