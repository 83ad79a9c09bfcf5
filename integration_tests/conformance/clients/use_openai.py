"""`openai`: chat, completions, responses, tools, structured output, streams, typed exceptions."""

import json
from typing import Literal

import openai
from checks import (
    ANSWER,
    API_KEY,
    QUESTION,
    URL,
    USER,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    check,
    equal,
    is_weather,
    raised,
    run,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60, max_retries=0)
async_client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60, max_retries=0)
MODEL = client.models.list().data[0].id
GREEDY = {"model": MODEL, "messages": USER, "max_tokens": 60, "temperature": 0}
TOOLS = {**GREEDY, "tools": [WEATHER_TOOL], "max_tokens": 150}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
RESPONSE_TOOL = {"type": "function", "strict": True, **WEATHER_TOOL["function"]}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


@check
def models() -> None:
    model = client.models.retrieve(MODEL)
    equal((model.id, model.object), (MODEL, "model"))
    raised(openai.NotFoundError, lambda: client.models.retrieve("nothing"))


@check
def chat() -> None:
    answer = client.chat.completions.create(**GREEDY)
    equal(answer.object, "chat.completion")
    assert answer.id and answer.created > 1_700_000_000
    (choice,) = answer.choices
    equal((choice.index, choice.finish_reason), (0, "stop"))
    equal((choice.message.role, choice.message.content), ("assistant", ANSWER))
    equal(choice.message.tool_calls, None)
    equal(answer.usage.completion_tokens, 20)
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 20)


@check
def chat_options() -> None:
    asked = {**GREEDY, "max_tokens": openai.NOT_GIVEN, "max_completion_tokens": 5}
    answer = client.chat.completions.create(**asked)
    equal(answer.choices[0].finish_reason, "length")
    equal(answer.usage.completion_tokens, 5)
    answer = client.chat.completions.create(**GREEDY, stop="(text")
    equal(answer.choices[0].message.content, "`dedent")
    equal(answer.choices[0].finish_reason, "stop")
    answer = client.chat.completions.create(**GREEDY, stop=["Remove", "any"], top_p=1)
    equal(answer.choices[0].message.content, "`dedent(text)`: ")
    answer = client.chat.completions.create(**GREEDY, logit_bias={"66": -100}, user="somebody")
    assert not answer.choices[0].message.content.startswith("`")
    answer = client.chat.completions.create(
        **GREEDY, presence_penalty=0, frequency_penalty=0, n=1, store=False, metadata={"a": "b"}
    )
    equal(answer.choices[0].message.content, ANSWER)


@check
def chat_content_parts() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    asked = {**GREEDY, "messages": messages, "max_tokens": 5}
    assert client.chat.completions.create(**asked).choices[0].message.content
    parts = [{"type": "text", "text": "What does "}, {"type": "text", "text": QUESTION[10:]}]
    asked = {**GREEDY, "messages": [{"role": "user", "content": parts}]}
    equal(client.chat.completions.create(**asked).choices[0].message.content, ANSWER)


@check
def chat_several_choices() -> None:
    asked = {**GREEDY, "temperature": 1.5, "seed": 11, "n": 3, "max_tokens": 12}
    answers = [client.chat.completions.create(**asked) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    equal(texts[0], texts[1])
    equal([choice.index for choice in answers[0].choices], [0, 1, 2])
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    equal(streamed, texts[0])


@check
def chat_logprobs() -> None:
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    equal(b"".join(bytes(step.bytes) for step in content).decode(), ANSWER)
    for step in content:
        equal(len(step.top_logprobs), 3)
        equal(step.top_logprobs[0].token, step.token)
        assert step.logprob <= 0
    chunks = list(client.chat.completions.create(**asked, stream=True))
    steps = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    streamed = [step.token for one in steps if one for step in one.content]
    equal(streamed, [step.token for step in content])


@check
def chat_stream() -> None:
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    equal(len({chunk.id for chunk in chunks}), 1)
    equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"})
    equal(chunks[0].choices[0].delta.role, "assistant")
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), ANSWER)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    equal([reason for reason in reasons if reason], ["stop"])
    equal(reasons[-1], "stop")
    asked = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    equal([chunk.usage for chunk in chunks[:-1]], [None] * (len(chunks) - 1))
    equal(chunks[-1].choices, [])
    equal(chunks[-1].usage.completion_tokens, 20)


@check
def chat_stream_hides_stop_strings() -> None:
    for stop in ("(text", "Remove any", ["`:", "in `"]):
        whole = client.chat.completions.create(**GREEDY, stop=stop)
        chunks = client.chat.completions.create(**GREEDY, stop=stop, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        equal(text, whole.choices[0].message.content)
        assert ANSWER.startswith(text) and text != ANSWER, text


@check
def chat_stream_helper() -> None:
    with client.chat.completions.stream(**GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    equal(final.choices[0].message.content, ANSWER)


@check
def tools() -> None:
    for choice in ("required", NAMED):
        asked = {**TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**asked).choices[0]
        equal((answer.finish_reason, answer.message.content), ("tool_calls", None))
        (call,) = answer.message.tool_calls
        equal((call.type, call.function.name), ("function", "get_weather"))
        assert call.id
        is_weather(call.function.arguments)
    answer = client.chat.completions.create(**TOOLS, tool_choice="none").choices[0]
    equal((answer.message.tool_calls, answer.message.content), (None, ANSWER))
    answer = client.chat.completions.create(**TOOLS, tool_choice="auto").choices[0]
    assert answer.message.content or answer.message.tool_calls


@check
def tools_in_parallel() -> None:
    # The model calls as often as it may: its calls are whole all the same.
    asked = {**TOOLS, "tool_choice": "required", "max_tokens": 400}
    calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert len(calls) > 1, calls
    equal(len({call.id for call in calls}), len(calls))
    for call in calls:
        is_weather(call.function.arguments)
    deltas = [
        call
        for chunk in client.chat.completions.create(**asked, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    for index, call in enumerate(calls):
        pieces = [one.function.arguments or "" for one in deltas if one.index == index]
        equal("".join(pieces), call.function.arguments)


@check
def tools_stream() -> None:
    asked = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [c.choices[0].delta.tool_calls or [] for c in chunks]
    calls = [call for delta in deltas for call in delta]
    equal(calls[0].function.name, "get_weather")
    assert calls[0].id
    equal({call.index for call in calls}, {0})
    equal({call.function.name for call in calls[1:]} | {None}, {None})
    streamed = "".join(call.function.arguments or "" for call in calls)
    is_weather(streamed)
    equal(chunks[-1].choices[0].finish_reason, "tool_calls")
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    equal([call.function.arguments for call in whole], [streamed])


@check
def tools_stream_helper() -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    asked = {**TOOLS, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


@check
def tools_conversation() -> None:
    asked = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 7}'}
        for call in answer.tool_calls
    ]
    messages = [*USER, answer.model_dump(exclude_none=True), *results]
    answer = client.chat.completions.create(**{**TOOLS, "messages": messages, "max_tokens": 8})
    assert answer.choices[0].finish_reason in ("stop", "length")


@check
def structured_output() -> None:
    shape = {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        **GREEDY, response_format={"type": "json_schema", "json_schema": shape}
    )
    is_weather(answer.choices[0].message.content)
    answer = client.chat.completions.create(**GREEDY, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    answer = client.chat.completions.create(**GREEDY, response_format={"type": "text"})
    equal(answer.choices[0].message.content, ANSWER)
    parsed = client.chat.completions.parse(**GREEDY, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather), parsed
    tool = openai.pydantic_function_tool(Weather)
    asked = {**TOOLS, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    parsed = client.chat.completions.parse(**asked)
    arguments = parsed.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(arguments, Weather), parsed


PROMPT = {"model": MODEL, "prompt": QUESTION, "max_tokens": 40, "temperature": 0}


@check
def completions() -> None:
    answer = client.completions.create(**PROMPT)
    equal(answer.object, "text_completion")
    equal(answer.choices[0].text.strip(), ANSWER)
    equal(answer.choices[0].finish_reason, "stop")
    equal(answer.usage.prompt_tokens, 9)
    answer = client.completions.create(**{**PROMPT, "stop": ["ent"], "echo": True})
    equal(answer.choices[0].text, f"{QUESTION}\n`ded")
    answer = client.completions.create(**{**PROMPT, "max_tokens": 2})
    equal((answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 2))


@check
def completions_of_every_kind_of_prompt() -> None:
    ids = [366, 384, 1091, 2151, 16, 862, 400, 318, 33]
    for prompt in ([QUESTION], ids, [ids], [QUESTION, "import "], [ids, [879]]):
        answer = client.completions.create(**{**PROMPT, "prompt": prompt})
        count = len(prompt) if isinstance(prompt[0], str | list) else 1
        equal([choice.index for choice in answer.choices], list(range(count)))
        equal(answer.choices[0].text.strip(), ANSWER)


@check
def completions_several_and_logprobs() -> None:
    asked = {**PROMPT, "temperature": 1.5, "seed": 3, "max_tokens": 6}
    answer = client.completions.create(**asked, n=2, best_of=2)
    equal([choice.index for choice in answer.choices], [0, 1])
    answer = client.completions.create(**{**PROMPT, "max_tokens": 3}, logprobs=2)
    found = answer.choices[0].logprobs
    equal(found.tokens, ["\n", "`", "ded"])
    equal(found.text_offset, [0, 1, 2])
    equal([len(one) for one in found.top_logprobs], [2, 2, 2])
    equal(len(found.token_logprobs), 3)
    raised(openai.APIStatusError, lambda: client.completions.create(**PROMPT, suffix="end"))


@check
def completions_stream() -> None:
    asked = {**PROMPT, "prompt": [QUESTION, "import "], "stream": True}
    chunks = list(client.completions.create(**asked, stream_options={"include_usage": True}))
    texts, reasons = ["", ""], ["", ""]
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason or ""
    equal(texts[0].strip(), ANSWER)
    assert reasons[0] == "stop" and reasons[1] in ("stop", "length"), reasons
    equal(chunks[-1].choices, [])
    assert chunks[-1].usage.completion_tokens > 20
    whole = client.completions.create(**{**asked, "stream": False})
    equal([choice.text for choice in whole.choices], texts)


@check
def responses() -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
    answer = client.responses.create(**asked, input=QUESTION)
    equal((answer.object, answer.status), ("response", "completed"))
    equal(answer.output_text, ANSWER)
    equal(answer.usage.output_tokens, 20)
    answer = client.responses.create(
        **asked, input=[{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    )
    equal(answer.output_text, ANSWER)
    answer = client.responses.create(**{**asked, "max_output_tokens": 16}, input=QUESTION)
    equal((answer.status, answer.incomplete_details.reason), ("incomplete", "max_output_tokens"))
    parsed = client.responses.parse(**asked, input=QUESTION, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather), parsed


@check
def responses_stream() -> None:
    asked = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    events = list(client.responses.create(**asked, stream=True))
    equal((events[0].type, events[-1].type), ("response.created", "response.completed"))
    equal([event.sequence_number for event in events], list(range(len(events))))
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    equal("".join(deltas), ANSWER)
    equal(events[-1].response.output_text, ANSWER)
    with client.responses.stream(**asked) as stream:
        list(stream)
        equal(stream.get_final_response().output_text, ANSWER)


@check
def responses_tools() -> None:
    asked = {
        "model": MODEL,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 150,
        "tools": [RESPONSE_TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    answer = client.responses.create(**asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    equal(call.name, "get_weather")
    is_weather(call.arguments)
    events = list(client.responses.create(**asked, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    equal("".join(pieces), call.arguments)
    follow_up = [
        {"role": "user", "content": QUESTION},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 7}'},
    ]
    answer = client.responses.create(
        model=MODEL, input=follow_up, tools=[RESPONSE_TOOL], max_output_tokens=16, temperature=0
    )
    assert answer.status in ("completed", "incomplete")


@check
def typed_exceptions() -> None:
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    raised(openai.AuthenticationError, lambda: stranger.chat.completions.create(**GREEDY))
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**{**GREEDY, "temperature": -1}),
    )
    equal((error.param, error.type), ("temperature", "invalid_request_error"))
    assert "temperature" in error.message
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**{**GREEDY, "max_tokens": 1_000_000}),
    )
    equal(error.code, "context_length_exceeded")
    error = raised(openai.NotFoundError, lambda: client.models.retrieve("gpt-nothing"))
    equal(error.code, "model_not_found")
    answer = client.chat.completions.create(**{**GREEDY, "model": "gpt-nothing"})
    equal(answer.model, client.models.list().data[0].id)
    assert answer._request_id
    raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**{**GREEDY, "messages": []}),
    )
    raised(
        openai.BadRequestError,
        lambda: list(client.chat.completions.create(**{**GREEDY, "top_p": 7}, stream=True)),
    )
    raised(openai.NotFoundError, lambda: client.get("/nowhere", cast_to=object))


@check
def embeddings() -> None:
    # The client asks for base64 by itself, and gives numbers.
    answer = client.embeddings.create(model=MODEL, input=[QUESTION, ANSWER])
    equal([one.index for one in answer.data], [0, 1])
    equal(answer.model, MODEL)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    for one in answer.data:
        assert abs(sum(value * value for value in one.embedding) - 1) < 1e-5
    plain = client.embeddings.create(model=MODEL, input=QUESTION, encoding_format="float")
    differences = zip(plain.data[0].embedding, answer.data[0].embedding, strict=True)
    assert max(abs(one - other) for one, other in differences) < 1e-5
    cut = client.embeddings.create(model=MODEL, input=QUESTION, dimensions=8, user="somebody")
    equal(len(cut.data[0].embedding), 8)
    raised(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=""))


@check
async def asynchronous() -> None:
    answer = await async_client.chat.completions.create(**GREEDY)
    equal(answer.choices[0].message.content, ANSWER)
    text = ""
    async for chunk in await async_client.chat.completions.create(**GREEDY, stream=True):
        text += chunk.choices[0].delta.content or ""
    equal(text, ANSWER)
    answer = await async_client.completions.create(**PROMPT)
    equal(answer.choices[0].text.strip(), ANSWER)


run()
