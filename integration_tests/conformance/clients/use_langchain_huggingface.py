"""`langchain-huggingface`: HuggingFaceEndpoint (text) and ChatHuggingFace (chat)."""

import warnings

from checks import (
    ANSWER,
    API_KEY,
    END,
    QUESTION,
    URL,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    check,
    equal,
    is_weather,
    run,
)
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

warnings.simplefilter("ignore")

# It does not send its token to servers that are not Hugging Face's.
HEADERS = {"headers": {"Authorization": f"Bearer {API_KEY}"}}
# Of a temperature of 0 the chat thinks that it was given none, and takes the endpoint's of 0.8.
COLD = 0.01
endpoint = HuggingFaceEndpoint(
    endpoint_url=URL,
    max_new_tokens=40,
    top_k=1,
    temperature=COLD,
    server_kwargs=HEADERS,
)
chat = ChatHuggingFace(llm=endpoint, max_tokens=60, temperature=COLD)
MESSAGES = [HumanMessage(QUESTION)]


@check
def endpoint_invoke() -> None:
    equal(endpoint.invoke(QUESTION).strip(), ANSWER)
    equal(endpoint.invoke(QUESTION, stop=["ent("]), "\n`ded")


@check
def endpoint_stream() -> None:
    equal("".join(endpoint.stream(QUESTION)), f"\n{ANSWER}{END}")


@check
async def endpoint_asynchronous() -> None:
    equal((await endpoint.ainvoke(QUESTION)).strip(), ANSWER)
    equal("".join([piece async for piece in endpoint.astream(QUESTION)]), f"\n{ANSWER}{END}")


@check
def chat_invoke() -> None:
    answer = chat.invoke(MESSAGES)
    equal(answer.content, ANSWER)
    equal(answer.usage_metadata["output_tokens"], 20)
    equal(answer.response_metadata["finish_reason"], "stop")
    assert chat.invoke([SystemMessage("Be brief."), *MESSAGES]).content


@check
def chat_stream() -> None:
    equal("".join(piece.content for piece in chat.stream(MESSAGES)), ANSWER)


@check
async def chat_asynchronous() -> None:
    equal((await chat.ainvoke(MESSAGES)).content, ANSWER)
    equal("".join([piece.content async for piece in chat.astream(MESSAGES)]), ANSWER)


@check
def chat_tools() -> None:
    answer = chat.bind_tools([WEATHER_TOOL], tool_choice="get_weather").invoke(MESSAGES)
    equal([call["name"] for call in answer.tool_calls], ["get_weather"])
    is_weather(answer.tool_calls[0]["args"])


@check
def chat_structured_output() -> None:
    schema = {"title": "Weather", "description": "The weather", **WEATHER_SCHEMA}
    for method in ("function_calling", "json_schema"):
        is_weather(chat.with_structured_output(schema, method=method).invoke(MESSAGES))


run()
