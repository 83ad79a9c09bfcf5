"""Renders chat templates; `TemplateWorkers` run this in processes that can be killed.

A template is a Jinja program of the model's author that turns a client's messages into a prompt.
All of it, even the folding of its constants, runs here, never in the router.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from text_generation_router.errors import TemplateError

MAX_CHARACTERS = 32_000_000
# Appended to the message to continue, to find its end in the prompt. A template that strips the
# message drops the mark's space; no template writes this space itself.
_MARK, _MARK_SPACE = "\ue0f0CONTINUE\ue0f1", "\u2003"
_SHOWN_CHARACTERS = 500


def prepare(argument: bytes) -> "Renderer":
    """`argument`: the arguments of `Renderer` in JSON."""
    return Renderer(**orjson.loads(argument))


class Renderer:
    """The templates of one model by their names; each is compiled when it is first rendered."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], max_bytes: int
    ) -> None:
        """max_bytes: the memory that this process may use."""
        self._sources = sources
        self._special_tokens = special_tokens
        self._max_bytes = max_bytes
        self._environment = _environment()
        self._programs: dict[str, jinja2.Template] = {}

    def answer(self, argument: bytes) -> bytes:
        """The prompt or an error, in JSON. `argument`: the arguments of `render`, the router's and
        the client's."""
        job = orjson.loads(argument)
        try:
            reply = {"prompt": self.render(**job["kwargs"], **job["arguments"])}
        except (TemplateError, TypeError) as error:
            reply = {"error": str(error)[:_SHOWN_CHARACTERS]}
        try:
            return orjson.dumps(reply)
        except TypeError:  # a lone surrogate, which only a template can write
            return b'{"error": "the prompt has characters that are not valid Unicode"}'

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

        `tools` are objects of OpenAI's API. With `continue_final_message` the prompt ends with the
        content of the last message, without a generation prompt; if the template refuses such a
        message or changes its text, that text is appended to the prompt of the other messages.
        `name` selects a template; by default `tool_use` if it exists and there are tools, else
        `default`. Raises TemplateError.
        """
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if not continue_final_message:
            variables = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
            return self._rendered(name, messages, tools, variables)
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": last["content"] + _MARK + _MARK_SPACE}]
        closed = {**template_kwargs, "add_generation_prompt": False}
        try:
            return _cut_at_mark(self._rendered(name, marked, tools, closed))
        except TemplateError:
            begun = {**template_kwargs, "add_generation_prompt": True}
            with suppress(TemplateError):
                if len(messages) > 1:
                    before = self._rendered(name, messages[:-1], tools, begun)
                    return f"{before}{last['content']}"
            raise

    def _rendered(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        more: Mapping[str, Any],
    ) -> str:
        """What the template writes. Raises TemplateError."""
        variables = {
            **self._special_tokens,
            "documents": None,
            **more,
            "messages": messages,
            "tools": tools or None,
        }
        try:
            return _run(self._program(name), variables)
        except TemplateError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"syntax error: {error.message} (line {error.lineno})") from error
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        except MemoryError as error:
            mib = self._max_bytes >> 20
            raise TemplateError(f"the template needs more than {mib} MiB") from error
        except Exception as error:  # the template is a program: it can raise anything
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _program(self, name: str) -> jinja2.Template:
        if name not in self._programs:
            if name not in self._sources:
                known = ", ".join(sorted(self._sources))
                raise TemplateError(f"the model has no template {name!r}; it has: {known}")
            self._programs[name] = self._environment.from_string(self._sources[name])
        return self._programs[name]


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja, set up as transformers does."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _run(program: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    for piece in program.generate(variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"the prompt has more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _cut_at_mark(rendered: str) -> str:
    prompt, mark, behind = rendered.rpartition(_MARK)
    if not mark:
        raise TemplateError("the last message can not be continued: the template changes its text")
    return prompt if behind.startswith(_MARK_SPACE) else prompt.rstrip()


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike Jinja's own filter, it does not escape for HTML. `options` of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
