"""Turns conversations into the events of the next message, independent of any API."""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from text_generation_router.chat.constraint import answer_grammar
from text_generation_router.chat.conversation import (
    Conversation,
    Message,
    fitted,
    plain_messages,
    strict_form,
    with_instructions,
)
from text_generation_router.chat.format import ChatFormat
from text_generation_router.chat.parser import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from text_generation_router.chat.template import Job, TemplateWorkers
from text_generation_router.errors import (
    GrammarError,
    NoTemplateError,
    RefusedByTemplateError,
    ToolError,
)
from text_generation_router.infer import Infer
from text_generation_router.request import Grammar, TokenOutput
from text_generation_router.request_options import NO_OPTIONS, RequestOptions
from text_generation_router.scheduler.entry import Entry
from text_generation_router.validation import GenerateParameters


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call; `arguments` is JSON text, incomplete if the token limit cut the answer."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatStep:
    """The tokens since the previous step, and the events that the last of them completed."""

    events: tuple[ChatEvent, ...]
    outputs: tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A whole message; `content` is None if it consists of calls only."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    steps: tuple[ChatStep, ...]

    @property
    def outputs(self) -> tuple[TokenOutput, ...]:
        """All generated tokens."""
        return tuple(output for step in self.steps for output in step.outputs)


class ChatGeneration:
    """Reads `entry`, one sequence, as a chat: an iterator over lists of steps that are ready
    together. Every step has events, except that the last one may have tokens only.
    """

    def __init__(self, entry: Entry, parser: ChatParser) -> None:
        self.entry = entry
        self._parser = parser
        self._held: list[TokenOutput] = []
        self._num_tokens = 0
        self._has_answer_begun = False
        self.has_tool_calls = False
        self.reasoning_tokens = 0
        """Tokens of the reasoning, markers included."""

    def __aiter__(self) -> AsyncIterator[list[ChatStep]]:
        return self

    async def __anext__(self) -> list[ChatStep]:
        steps: list[ChatStep] = []
        while not steps:
            for output in await anext(self.entry):
                steps += self._steps(output)
        return steps

    async def collect(self) -> ChatMessage:
        """The whole message."""
        self.entry.is_shown = False
        return message_of([step async for steps in self for step in steps])

    def _steps(self, output: TokenOutput) -> list[ChatStep]:
        self._held.append(output)
        events = self._parser.feed(output.delta)
        self._num_tokens += 1
        if self._parser.has_reasoned and not self._has_answer_begun:
            self.reasoning_tokens = self._num_tokens
            self._has_answer_begun = not self._parser.is_reasoning
        is_last = output.generated is not None
        if is_last:
            events += self._parser.finish()
        if not events and not is_last:
            return []
        self.has_tool_calls |= any(isinstance(event, ToolCallStart) for event in events)
        step = ChatStep(tuple(events), tuple(self._held))
        self._held.clear()
        return [step]


def message_of(steps: list[ChatStep]) -> ChatMessage:
    """The message that the steps add up to."""
    # The pieces of each kind of text, and of the arguments of each call by its index.
    pieces: defaultdict[object, list[str]] = defaultdict(list)
    names: list[str] = []
    for event in (event for step in steps for event in step.events):
        match event:
            case ToolCallStart(_, name):
                names.append(name)
            case ToolCallArguments(index, text):
                pieces[index].append(text)
            case _:
                pieces[type(event)].append(event.text)
    texts = {kind: "".join(some) for kind, some in pieces.items()}
    return ChatMessage(
        content=texts.get(ContentDelta, None if names else ""),
        reasoning=texts.get(ReasoningDelta),
        tool_calls=tuple(ToolCall(name, texts.get(i, "")) for i, name in enumerate(names)),
        steps=tuple(steps),
    )


@dataclass(frozen=True, slots=True)
class ChatService:
    """The served model's template and chat format; does not own the `workers`."""

    infer: Infer
    workers: TemplateWorkers
    chat_format: ChatFormat
    special_ids: Mapping[str, int]
    """The format's markers that are special tokens, with their ids."""

    async def render(self, conversation: Conversation) -> str:
        """The prompt, rendered off the event loop. Raises TemplateError and OverloadedError.

        The error is what the template says of the messages as they are.
        """
        try:
            return await self.workers.render(partial(self._job, conversation, list))
        except RefusedByTemplateError:
            for form in _STRICT_FORMS if conversation.may_be_rewritten else ():
                with suppress(RefusedByTemplateError):
                    return await self.workers.render(partial(self._job, conversation, form))
            raise

    @asynccontextmanager
    async def start(
        self, conversation: Conversation, options: RequestOptions = NO_OPTIONS
    ) -> AsyncIterator[list[ChatGeneration]]:
        """Starts `num_sequences` answers. Leaving the block cancels those that have not ended.

        Raises RouterError: TemplateError, ToolError, and those of `Infer.start_many`.
        """
        grammar: Grammar | None = None

        async def parameters() -> GenerateParameters:
            nonlocal grammar
            made = await self._parameters(conversation)
            grammar = made.grammar
            return made

        num_sequences = conversation.num_sequences
        try:
            async with self.infer.start_many(parameters, num_sequences, options) as entries:
                prompt = entries[0].request.asked.inputs
                yield [
                    ChatGeneration(entry, self._parser(conversation, prompt)) for entry in entries
                ]
        except GrammarError as error:
            if error.retry_after_s is not None:
                raise
            if conversation.usable_tools:
                raise ToolError(_complaint(conversation, grammar, str(error))) from error
            if grammar == conversation.parameters.grammar:
                raise
            # The line is none of the client's.
            raise GrammarError(_LINE.sub("", str(error))) from error

    async def _parameters(self, conversation: Conversation) -> GenerateParameters:
        """The parameters of the generation. Raises TemplateError and ToolError."""
        _check_tools(conversation)
        prompt = await self.render(conversation)
        grammar, has_tools = conversation.parameters.grammar, bool(conversation.usable_tools)
        if has_tools or grammar is not None:
            grammar = await asyncio.to_thread(self._grammar, conversation, prompt)
        form = self.chat_format
        return replace(
            conversation.parameters,
            inputs=prompt,
            add_special_tokens=conversation.add_special_tokens,
            keeps_stop_sequence=False,
            grammar=grammar,
            visible_special_tokens=(
                form.special_tokens if has_tools else form.special_tokens_of_text
            ),
        )

    def _grammar(self, conversation: Conversation, prompt: str) -> Grammar | None:
        """The grammar of the answer. Raises ToolError and GrammarError. From any thread."""
        grammar, form = conversation.parameters.grammar, self.chat_format
        tools = conversation.callable_tools
        if form.has_channels and not prompt.endswith(form.separator):
            # The answer continues a message, without a header.
            if tools and conversation.tool_choice != "auto":
                raise ToolError(
                    "an answer that continues a message cannot call a tool in this model's format: "
                    "leave `tool_choice` out or end with another role"
                )
            return grammar
        if not tools and not self._reasons(conversation, prompt):
            return grammar
        try:
            return answer_grammar(
                form,
                grammar,
                tools,
                conversation.tool_choice if tools else "auto",
                parallel=conversation.parallel_tool_calls,
                special_ids=self.special_ids,
                starts_in_reasoning=form.starts_in_reasoning(prompt),
            )
        except RecursionError as error:
            raise GrammarError("grammar is too large: nest its values less") from error

    def _parser(self, conversation: Conversation, prompt: str) -> ChatParser:
        reasons = self._reasons(conversation, prompt)
        return ChatParser(
            self.chat_format if reasons else replace(self.chat_format, reasoning=None),
            parses_tools=bool(conversation.usable_tools),
            starts_in_reasoning=reasons and self.chat_format.starts_in_reasoning(prompt),
            tools=conversation.usable_tools,
        )

    def _reasons(self, conversation: Conversation, prompt: str) -> bool:
        """Whether reasoning may precede the answer."""
        grammar, markers = conversation.parameters.grammar, self.chat_format.reasoning
        if markers is None or grammar is None or conversation.usable_tools:
            return markers is not None
        if prompt.rstrip().endswith(markers[1]):
            return False
        # A schema's JSON begins with no marker; another grammar may have its own reasoning.
        return grammar.kind == "json_schema" or not any(m in grammar.source for m in markers)

    def _job(
        self,
        conversation: Conversation,
        form: Callable[[Sequence[Message]], list[Message]],
    ) -> tuple[Job, Mapping[str, Any]]:
        """A worker's job. `form` says in which form the template gets the messages."""
        template, tools = self.workers.template, conversation.usable_tools
        if template is None:
            raise NoTemplateError
        source = template.tool_source if tools else template.source
        messages = form(plain_messages(conversation.messages, source, self.chat_format))
        described = [tool.as_openai() for tool in tools]
        if tools and not self.chat_format.describes_tools:
            messages = with_instructions(messages, self.chat_format.tools_prompt(tools))
            # The template could describe them in a form that contradicts this one.
            described = []
        if tools and conversation.tool_prompt:
            last = messages[-1]
            behind = f"{last['content']}\n---\n{conversation.tool_prompt}"
            messages = [*messages[:-1], {**last, "content": behind}]
        last = messages[-1]
        begins, continues = conversation.add_generation_prompt, conversation.continue_final_message
        if continues is None:
            is_open = last["role"] == "assistant" and not last.get("tool_calls")
            continues = is_open and begins is None
        arguments = {
            "messages": fitted(messages, source),
            "tools": described or None,
            "add_generation_prompt": not continues if begins is None else begins,
            "continue_final_message": continues,
        }
        return arguments, conversation.template_kwargs


# Tried in this order after the messages as they are.
_STRICT_FORMS = (strict_form, partial(strict_form, has_system=False))
_BOTH = "`tools` and `response_format`"
_REFUSED_LINE = re.compile(r"grammar is not valid: line (\d+): (.*)", re.S)
_LINE = re.compile(r"(?<=^grammar is not valid: )line \d+: ")


def _complaint(conversation: Conversation, grammar: Grammar | None, error: str) -> str:
    """What can not be enforced and why, by the error about a grammar that was made of tools; None:
    it could not be made."""
    if grammar is not None and (found := _REFUSED_LINE.fullmatch(error)):
        error = found[2]
        rule = re.match(r"call_(\d+)\w*:", grammar.source.split("\n")[int(found[1]) - 1])
        if rule is not None:
            names = [tool.name for tool in conversation.callable_tools]
            if conversation.tool_choice in names:
                names = [conversation.tool_choice]
            name = names[int(rule[1])][:64]
            return f"The parameters of the tool {name} can not be enforced: {error}"
    # The grammar was made from these fields.
    fields = "`tools`" if conversation.parameters.grammar is None else _BOTH
    return f"{fields} can not be enforced: {error}"


def _check_tools(conversation: Conversation) -> None:
    """Raises ToolError for tools that contradict each other or another field."""
    tools, choice = conversation.usable_tools, conversation.tool_choice
    names = [tool.name for tool in tools]
    if not tools and choice not in ("auto", "none"):
        raise ToolError(f"`tool_choice` is {choice[:64]!r}, but there are no `tools`")
    grammar = conversation.parameters.grammar
    if tools and grammar is not None and grammar.kind != "json_schema":
        raise ToolError(
            "Tools and a `response_format` that is not JSON are mutually exclusive; leave one out, "
            'or send `tool_choice: "none"`'
        )
    if len(set(names)) < len(names):
        raise ToolError("Two of `tools` have the same name; give each tool a different name")
    if unknown := [name for name in conversation.allowed_tools or () if name not in names]:
        raise ToolError(
            f"Tool with name {unknown[0][:64]} not found; `tool_choice` may only name tools that "
            "are in `tools`"
        )
    if tools and choice not in ("auto", "required", *names):
        raise ToolError(
            f"Tool with name {choice[:64]} not found; `tool_choice` must name one of `tools`"
        )
