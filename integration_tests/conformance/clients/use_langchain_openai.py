"""`langchain-openai`: ChatOpenAI (chat and responses) and OpenAI (completions)."""

from typing import Literal

import openai
from checks import (
    ANSWER,
    API_KEY,
    QUESTION,
    URL,
    WEATHER_TOOL,
    check,
    equal,
    is_weather,
    raised,
    run,
)
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

SERVER = {"base_url": f"{URL}/v1", "api_key": API_KEY, "model": "tgi", "temperature": 0}
chat = ChatOpenAI(**SERVER, max_tokens=60, max_retries=0)
through_responses = ChatOpenAI(**SERVER, max_tokens=60, use_responses_api=True)
text = OpenAI(**SERVER, max_tokens=40)
MESSAGES = [HumanMessage(QUESTION)]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


@check
def chat_invoke() -> None:
    answer = chat.invoke(MESSAGES)
    equal(answer.content, ANSWER)
    equal(answer.usage_metadata["output_tokens"], 20)
    equal(answer.response_metadata["finish_reason"], "stop")
    assert chat.invoke([SystemMessage("Be brief."), *MESSAGES]).content


@check
def chat_stream() -> None:
    pieces = list(chat.stream(MESSAGES, stream_usage=True))
    equal("".join(piece.content for piece in pieces), ANSWER)
    counts = [p.usage_metadata["output_tokens"] for p in pieces if p.usage_metadata]
    equal(sum(counts), 20)


@check
async def chat_asynchronous() -> None:
    equal((await chat.ainvoke(MESSAGES)).content, ANSWER)
    equal("".join([piece.content async for piece in chat.astream(MESSAGES)]), ANSWER)
    answers = await chat.abatch([MESSAGES] * 3)
    equal([answer.content for answer in answers], [ANSWER] * 3)


@check
def chat_tools() -> None:
    bound = chat.bind_tools([WEATHER_TOOL], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(MESSAGES)
    (call,) = answer.tool_calls
    equal(call["name"], "get_weather")
    is_weather(call["args"])
    whole = None
    for piece in bound.stream(MESSAGES):
        whole = piece if whole is None else whole + piece
    equal([one["args"] for one in whole.tool_calls], [call["args"]])
    results = [ToolMessage("7 degrees", tool_call_id=call["id"])]
    assert chat.invoke([*MESSAGES, answer, *results]).response_metadata["finish_reason"]


@check
def chat_structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Weather, method=method).invoke(MESSAGES)
        assert isinstance(found, Weather), found


@check
def responses() -> None:
    equal(through_responses.invoke(MESSAGES).text, ANSWER)
    equal("".join(piece.text for piece in through_responses.stream(MESSAGES)), ANSWER)


@check
def completions() -> None:
    equal(text.invoke(QUESTION).strip(), ANSWER)
    equal("".join(text.stream(QUESTION)).strip(), ANSWER)
    equal([one.strip() for one in text.batch([QUESTION] * 2)], [ANSWER] * 2)


@check
def typed_exceptions() -> None:
    raised(openai.BadRequestError, lambda: chat.invoke(MESSAGES, max_tokens=10**6))


run()
