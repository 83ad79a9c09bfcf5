"""Chat templates: Jinja programs, written for Hugging Face, that turn messages into a prompt."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from text_generation_router.errors import TemplateError

# A rendering is the model author's program at work on a client's text: it may not go on forever.
MAX_SECONDS = 2.0
MAX_CHARACTERS = 32_000_000
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# Stands behind the message to continue, so that its end is found whatever is written around it. A
# template that strips the message takes the mark's space away; no template writes such a space.
_MARK, _MARK_SPACE = "\ue0f0CONTINUE\ue0f1", "\u2003"


class ChatTemplate:
    """The templates of one model, compiled; never changes, can be rendered in several threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` has a template `default`, `tool_use` or both, and any others by their names;
        `special_tokens` are variables of the templates, as `bos_token`."""
        self._programs = {name: _compiled(source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)
        self.source = sources.get(_DEFAULT) or next(iter(sources.values()))
        """The text of the template that is taken where nothing else is asked for."""
        self.tool_source = sources.get(_WITH_TOOLS, self.source)
        """The text of the template that is taken where there are tools."""

    @classmethod
    def load(
        cls,
        directory: Path,
        tokenizer_config_path: Path | None,
        bos_token: str | None,
        eos_token: str | None,
    ) -> "ChatTemplate | None":
        """Reads the model's templates; None if it has none.

        A `tokenizer_config_path` is read in place of the model's own files; it is like a
        tokenizer_config.json, or a template if it ends in `.jinja`. Raises ValueError, one
        sentence, for a file that can not be read; a template that is not valid Jinja is told to
        those who render it.
        """
        sources: dict[str, str] = {}
        config: dict[str, Any] = {}
        if tokenizer_config_path is None:
            config = _read_object(directory / "tokenizer_config.json")
            sources = _read_sources(directory, config)
        elif tokenizer_config_path.suffix == ".jinja":
            sources = {_DEFAULT: _read_text(tokenizer_config_path)}
            config = _read_object(directory / "tokenizer_config.json")
        elif not tokenizer_config_path.is_file():
            raise ValueError(
                f"The file {tokenizer_config_path} of --tokenizer-config-path does not exist; give "
                "a tokenizer_config.json or a .jinja file."
            )
        else:
            config = _read_object(tokenizer_config_path)
            sources = _named(config.get("chat_template"), tokenizer_config_path)
        given = {"bos_token": bos_token, "eos_token": eos_token}
        special_tokens = {name: text for name, text in given.items() if text is not None}
        special_tokens |= _special_tokens(config)
        return cls(sources, special_tokens) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        name: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt.

        `tools` are objects of OpenAI's API. `continue_final_message` ends the prompt right behind
        the content of the last message, without a generation prompt. `name` is a named template;
        by default it is `tool_use` where there are tools and one of that name, else `default`.
        Raises TemplateError.
        """
        program = self._program(name, bool(tools))
        shown = _marked(messages) if continue_final_message else messages
        variables = {
            **self._special_tokens,
            "documents": None,
            **template_kwargs,
            "messages": shown,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            rendered = _run(program, variables)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        except Exception as error:  # the template is a program, it can fail in any way
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return _cut_at_mark(rendered) if continue_final_message else rendered

    def _program(self, name: str | None, has_tools: bool) -> CodeType:
        if name is None:
            name = _WITH_TOOLS if has_tools and _WITH_TOOLS in self._programs else _DEFAULT
        program = self._programs.get(name)
        if program is None:
            known = ", ".join(sorted(self._programs))
            raise TemplateError(f"the model has no template {name!r}; it has: {known}")
        if isinstance(program, str):
            raise TemplateError(program)
        return program


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up. Made for one rendering, which ends at the deadline."""

    def __init__(self, deadline: float) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self._deadline = deadline
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    # Whatever takes long does one of these again and again.

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_deadline()
        return super().call(context, called, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_deadline()
        return super().getitem(obj, argument)

    def check_deadline(self) -> None:
        """Raises TemplateError when the time is up."""
        if time.monotonic() > self._deadline:
            raise TemplateError(f"the template did not end within {MAX_SECONDS:g} s")


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model learns from; it renders as is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _compiled(source: str) -> CodeType | str:
    """The template's program, or the sentence that says why it has none."""
    try:
        program: CodeType = _Environment(deadline=0).compile(source)
    except jinja2.TemplateSyntaxError as error:
        return f"syntax error: {error.message} (line {error.lineno})"
    except Exception as error:  # nested too deep, constants that can not be folded
        return f"{type(error).__name__}: {error}"
    return program


def _run(program: CodeType, variables: Mapping[str, Any]) -> str:
    environment = _Environment(time.monotonic() + MAX_SECONDS)
    template = jinja2.Template.from_code(environment, program, environment.make_globals(None))
    pieces, length = [], 0
    for piece in template.generate(variables):
        environment.check_deadline()
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"the prompt has more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the mark behind the content of the last one."""
    if not messages:
        raise TemplateError("there is no message to continue")
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK + _MARK_SPACE
    elif isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        text = content[-1]["text"] + _MARK + _MARK_SPACE
        last["content"] = [*content[:-1], {**content[-1], "text": text}]
    else:
        raise TemplateError("the last message has no text to continue")
    return [*messages[:-1], last]


def _cut_at_mark(rendered: str) -> str:
    prompt, mark, behind = rendered.rpartition(_MARK)
    if not mark:
        raise TemplateError("the last message can not be continued: the template changes its text")
    return prompt if behind.startswith(_MARK_SPACE) else prompt.rstrip()


def _read_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates in a model's directory, by name."""
    own_file = directory / "chat_template.jinja"
    old_file = directory / "chat_template.json"
    if own_file.is_file():
        sources = {_DEFAULT: _read_text(own_file)}
    elif old_file.is_file():
        sources = _named(_read_object(old_file).get("chat_template"), old_file)
    else:
        sources = _named(config.get("chat_template"), directory / "tokenizer_config.json")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_text(path)
    return sources


def _named(template: Any, path: Path) -> dict[str, str]:
    """The `chat_template` field of a file: a text, a list of named texts, or texts by name."""
    if template is None:
        return {}
    if isinstance(template, str):
        return {_DEFAULT: template}
    if isinstance(template, list) and all(isinstance(item, dict) for item in template):
        template = {item.get("name"): item.get("template") for item in template}
    if isinstance(template, dict) and all(
        isinstance(part, str) for item in template.items() for part in item
    ):
        return template
    raise ValueError(
        f"The chat_template in {path} must be a text or a list of objects with `name` and "
        "`template`."
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a tokenizer_config.json names, by their names."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The chat template {path} can not be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, for text that is no part of a web page."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
