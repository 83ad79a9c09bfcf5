"""`huggingface_hub`: InferenceClient and AsyncInferenceClient with the URL of a server."""

from typing import Any

from checks import (
    ANSWER,
    API_KEY,
    END,
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
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

client = InferenceClient(URL, provider="hf-inference", token=API_KEY, timeout=60)
by_base_url = InferenceClient(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60)
async_client = AsyncInferenceClient(URL, token=API_KEY, timeout=60)


@check
def text_generation() -> None:
    # As in TGI, POST / returns the prompt as well by default.
    equal(client.text_generation(QUESTION, max_new_tokens=40), f"{QUESTION}\n{ANSWER}")
    text = client.text_generation(QUESTION, max_new_tokens=40, return_full_text=False)
    equal(text.strip(), ANSWER)
    details = client.text_generation(
        QUESTION, max_new_tokens=6, details=True, decoder_input_details=True, top_n_tokens=2
    ).details
    equal(details.finish_reason, "length")
    equal(details.generated_tokens, 6)
    equal("".join(token.text for token in details.prefill), QUESTION)
    equal([len(step) for step in details.top_tokens], [2] * 6)


@check
def text_generation_stream() -> None:
    pieces = client.text_generation(QUESTION, max_new_tokens=40, stream=True)
    equal("".join(pieces), f"\n{ANSWER}{END}")
    events = list(client.text_generation(QUESTION, max_new_tokens=40, stream=True, details=True))
    equal(events[-1].details.finish_reason, "eos_token")
    equal(events[-1].generated_text, f"{QUESTION}\n{ANSWER}")


@check
def text_generation_options() -> None:
    def ask(**asked: Any) -> str:
        return client.text_generation(QUESTION, return_full_text=False, **asked)

    equal(ask(max_new_tokens=20, stop=["dedent"]), "\n`dedent")
    sampled = {"do_sample": True, "seed": 3, "temperature": 1.5, "top_p": 0.9, "top_k": 50}
    equal(ask(max_new_tokens=8, **sampled), ask(max_new_tokens=8, **sampled))
    assert ask(max_new_tokens=9, grammar={"type": "regex", "value": "[0-9]{3}"}).isdecimal()


@check
def text_generation_errors() -> None:
    error = raised(
        ValidationError, lambda: client.text_generation(QUESTION, max_new_tokens=100_000)
    )
    assert "max_new_tokens" in str(error), error
    raised(
        ValidationError,
        lambda: list(client.text_generation(QUESTION, max_new_tokens=100_000, stream=True)),
    )


@check
def chat_completion() -> None:
    for one in (client, by_base_url):
        answer = one.chat_completion(USER, max_tokens=40, temperature=0.0)
        equal(answer.choices[0].message.content, ANSWER)
        equal(answer.choices[0].finish_reason, "stop")
        equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 20)


@check
def chat_completion_like_openai() -> None:
    answer = by_base_url.chat.completions.create(
        model="tgi",
        messages=USER,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stop=["never there"],
        presence_penalty=0.0,
    )
    equal(answer.choices[0].finish_reason, "length")
    content = answer.choices[0].logprobs.content
    equal("".join(step.token for step in content), answer.choices[0].message.content)
    equal([len(step.top_logprobs) for step in content], [2] * 5)


@check
def chat_completion_stream() -> None:
    chunks = list(
        client.chat_completion(
            USER,
            max_tokens=40,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    equal(text, ANSWER)
    equal([c.choices[0].finish_reason for c in chunks if c.choices][-1], "stop")
    equal(chunks[-1].usage.completion_tokens, 20)


@check
def chat_completion_tools() -> None:
    answer = client.chat_completion(
        USER,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        max_tokens=100,
        temperature=0.0,
        extra_body={"parallel_tool_calls": False},
    )
    (call,) = answer.choices[0].message.tool_calls
    equal(call.function.name, "get_weather")
    is_weather(call.function.arguments)
    equal(answer.choices[0].finish_reason, "tool_calls")
    named = {"type": "function", "function": {"name": "get_weather"}}
    pieces = client.chat_completion(
        USER,
        tools=[WEATHER_TOOL],
        tool_choice=named,
        max_tokens=100,
        temperature=0.0,
        stream=True,
    )
    deltas = [piece.choices[0].delta.tool_calls or [] for piece in pieces if piece.choices]
    calls = [call for delta in deltas for call in delta]
    equal(calls[0].function.name, "get_weather")
    is_weather("".join(call.function.arguments or "" for call in calls))


@check
def chat_completion_response_format() -> None:
    shape = {"name": "weather", "schema": WEATHER_SCHEMA}
    for asked in (
        # The client turns this one into TGI's.
        {"type": "json_schema", "json_schema": shape},
        {"type": "json", "value": WEATHER_SCHEMA},
    ):
        answer = client.chat_completion(
            USER, response_format=asked, max_tokens=100, temperature=0.0
        )
        is_weather(answer.choices[0].message.content)


@check
def chat_completion_errors() -> None:
    error = raised(HfHubHTTPError, lambda: client.chat_completion([], max_tokens=5))
    assert error.response.status_code in (400, 422), error
    wrong_key = InferenceClient(URL, token="wrong", timeout=60)
    error = raised(HfHubHTTPError, lambda: wrong_key.chat_completion(USER, max_tokens=5))
    equal(error.response.status_code, 401)


@check
def endpoint() -> None:
    equal(client.get_endpoint_info()["router"], "text-generation-router")
    assert client.health_check()


@check
async def asynchronous() -> None:
    answer = await async_client.text_generation(QUESTION, max_new_tokens=40)
    equal(answer, f"{QUESTION}\n{ANSWER}")
    pieces = await async_client.text_generation(QUESTION, max_new_tokens=40, stream=True)
    equal("".join([piece async for piece in pieces]), f"\n{ANSWER}{END}")
    answer = await async_client.chat_completion(USER, max_tokens=40, temperature=0.0)
    equal(answer.choices[0].message.content, ANSWER)
    text = ""
    async for chunk in await async_client.chat_completion(
        USER, max_tokens=40, temperature=0.0, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    equal(text, ANSWER)


run()
