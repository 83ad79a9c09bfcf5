"""`anthropic`: messages, streams, tools, typed exceptions."""

import anthropic
from checks import (
    ANSWER,
    API_KEY,
    QUESTION,
    URL,
    USER,
    WEATHER_SCHEMA,
    check,
    equal,
    is_weather,
    raised,
    run,
)

client = anthropic.Anthropic(base_url=URL, api_key=API_KEY, timeout=60, max_retries=0)
async_client = anthropic.AsyncAnthropic(base_url=URL, api_key=API_KEY, timeout=60, max_retries=0)
# Its second major version has no sampling parameters of its own any more.
GREEDY = {"model": "tgi", "messages": USER, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": WEATHER_SCHEMA}
TOOLS = {**GREEDY, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 150}


@check
def messages() -> None:
    answer = client.messages.create(**GREEDY)
    equal((answer.type, answer.role, answer.stop_reason), ("message", "assistant", "end_turn"))
    assert answer.id
    (block,) = answer.content
    equal((block.type, block.text), ("text", ANSWER))
    equal(answer.usage.output_tokens, 20)
    length = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    again = client.messages.create(**GREEDY).usage
    assert again.cache_read_input_tokens > 0
    equal(again.input_tokens + again.cache_read_input_tokens, length)


@check
def options() -> None:
    answer = client.messages.create(**{**GREEDY, "max_tokens": 5})
    equal((answer.stop_reason, answer.usage.output_tokens), ("max_tokens", 5))
    answer = client.messages.create(**GREEDY, stop_sequences=["(text"])
    equal((answer.stop_reason, answer.stop_sequence), ("stop_sequence", "(text"))
    equal(answer.content[0].text, "`dedent")
    system = [{"type": "text", "text": "Be brief."}]
    for one in ("Be brief.", system):
        answer = client.messages.create(**{**GREEDY, "max_tokens": 5}, system=one)
        assert answer.content[0].text
    parts = [{"type": "text", "text": QUESTION}]
    answer = client.messages.create(**{**GREEDY, "messages": [{"role": "user", "content": parts}]})
    equal(answer.content[0].text, ANSWER)
    sampled = {"temperature": 1.0, "top_k": 1, "top_p": 0.9}
    answer = client.messages.create(**{**GREEDY, "extra_body": sampled})
    equal(answer.content[0].text, ANSWER)


@check
def stream() -> None:
    events = list(client.messages.create(**GREEDY, stream=True))
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    equal(
        kinds,
        [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ],
    )
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    equal("".join(deltas), ANSWER)
    equal(events[-2].delta.stop_reason, "end_turn")
    equal(events[-2].usage.output_tokens, 20)


@check
def stream_helper() -> None:
    with client.messages.stream(**GREEDY) as stream:
        equal("".join(stream.text_stream), ANSWER)
        final = stream.get_final_message()
    equal((final.content[0].text, final.stop_reason), (ANSWER, "end_turn"))
    equal(final.usage.output_tokens, 20)


@check
def tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        asked = {**TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        answer = client.messages.create(**asked)
        equal(answer.stop_reason, "tool_use")
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        equal(call.name, "get_weather")
        is_weather(call.input)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        equal(final.stop_reason, "tool_use")
        (streamed,) = [block for block in final.content if block.type == "tool_use"]
        equal(streamed.input, call.input)


@check
def tools_conversation() -> None:
    answer = client.messages.create(**TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees"}
        for call in answer.content
        if call.type == "tool_use"
    ]
    follow_up = [
        *USER,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": results},
    ]
    asked = {**TOOLS, "messages": follow_up, "tool_choice": {"type": "none"}, "max_tokens": 5}
    equal(client.messages.create(**asked).stop_reason, "max_tokens")


@check
def typed_exceptions() -> None:
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    error = raised(anthropic.AuthenticationError, lambda: stranger.messages.create(**GREEDY))
    equal(error.type, "authentication_error")
    error = raised(
        anthropic.BadRequestError, lambda: client.messages.create(**{**GREEDY, "messages": []})
    )
    equal(error.type, "invalid_request_error")
    assert error.api_message
    raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(**{**GREEDY, "max_tokens": 1_000_000}),
    )
    error = raised(
        anthropic.NotFoundError, lambda: client.get("/v1/messages/nowhere", cast_to=object)
    )
    equal(error.type, "not_found_error")
    answer = client.messages.create(**{**GREEDY, "model": "nothing"})
    assert answer._request_id


@check
async def asynchronous() -> None:
    answer = await async_client.messages.create(**GREEDY)
    equal(answer.content[0].text, ANSWER)
    async with async_client.messages.stream(**GREEDY) as stream:
        equal("".join([text async for text in stream.text_stream]), ANSWER)


run()
