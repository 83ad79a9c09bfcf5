"""`litellm`: its openai/, text-completion-openai/ and huggingface/ routes."""

import json
from typing import Any

import litellm
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

ROUTES: tuple[dict[str, Any], ...] = (
    {"model": "openai/tgi", "api_base": f"{URL}/v1", "api_key": API_KEY},
    {"model": "huggingface/tgi", "api_base": URL, "api_key": API_KEY},
)
# Those whose errors litellm reads. For `huggingface/` it knows no sentence about the context.
PROVIDERS = (
    *("openai", "custom_openai", "hosted_vllm", "litellm_proxy", "lm_studio", "llamafile"),
    *("azure_ai", "together_ai"),
)
GREEDY = {"messages": USER, "max_tokens": 60, "temperature": 0, "timeout": 60}
SHAPE = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER_SCHEMA}}


@check
def completion() -> None:
    for route in ROUTES:
        answer = litellm.completion(**route, **GREEDY)
        equal(answer.choices[0].message.content, ANSWER)
        equal(answer.choices[0].finish_reason, "stop")
        equal(answer.usage.completion_tokens, 20)


@check
def stream() -> None:
    for route in ROUTES:
        chunks = list(litellm.completion(**route, **GREEDY, stream=True))
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), ANSWER)
        rebuilt = litellm.stream_chunk_builder(chunks, messages=USER)
        equal(rebuilt.choices[0].message.content, ANSWER)


@check
def stream_usage() -> None:
    asked = {**ROUTES[0], **GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**asked))
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    equal([usage.completion_tokens for usage in usages], [20])


@check
def tools() -> None:
    for route in ROUTES:
        answer = litellm.completion(
            **route,
            **{**GREEDY, "max_tokens": 150},
            tools=[WEATHER_TOOL],
            tool_choice="required",
            extra_body={"parallel_tool_calls": False},
        )
        call = answer.choices[0].message.tool_calls[0]
        equal(call.function.name, "get_weather")
        is_weather(call.function.arguments)
        equal(answer.choices[0].finish_reason, "tool_calls")


@check
def structured_output() -> None:
    for route in ROUTES:
        answer = litellm.completion(**route, **GREEDY, response_format=SHAPE)
        is_weather(answer.choices[0].message.content)
    answer = litellm.completion(**ROUTES[0], **GREEDY, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check
def text_completion() -> None:
    asked = {"prompt": QUESTION, "max_tokens": 40, "temperature": 0, "timeout": 60}
    route = {**ROUTES[0], "model": "text-completion-openai/tgi"}
    equal(litellm.text_completion(**route, **asked).choices[0].text.strip(), ANSWER)
    chunks = litellm.text_completion(**route, **asked, stream=True)
    equal("".join(chunk.choices[0].text or "" for chunk in chunks).strip(), ANSWER)


@check
def typed_exceptions() -> None:
    for route in ROUTES:
        raised(
            litellm.AuthenticationError,
            lambda route=route: litellm.completion(**{**route, "api_key": "wrong"}, **GREEDY),
        )
        raised(
            litellm.BadRequestError,
            lambda route=route: litellm.completion(**route, **{**GREEDY, "max_tokens": 10**6}),
        )


@check
def context_window() -> None:
    routes = [{**ROUTES[0], "model": f"{provider}/tgi"} for provider in PROVIDERS]
    routes.append({"model": "anthropic/tgi", "api_base": URL, "api_key": API_KEY})
    long = [{"role": "user", "content": "hi " * 1000}]
    for asked in ({"messages": USER, "max_tokens": 10**6}, {"messages": long, "max_tokens": 5}):
        for route in routes:
            for stream in (False, True):
                everything = {**route, **asked, "stream": stream}
                raised(
                    litellm.ContextWindowExceededError,
                    lambda everything=everything: litellm.completion(**everything),
                )
    for provider in ("text-completion-openai", "hosted_vllm"):
        route = {**ROUTES[0], "model": f"{provider}/tgi"}
        raised(
            litellm.ContextWindowExceededError,
            lambda route=route: litellm.text_completion(**route, prompt="hi " * 1000),
        )


@check
async def asynchronous() -> None:
    for route in ROUTES:
        answer = await litellm.acompletion(**route, **GREEDY)
        equal(answer.choices[0].message.content, ANSWER)
        text = ""
        async for chunk in await litellm.acompletion(**route, **GREEDY, stream=True):
            text += chunk.choices[0].delta.content or ""
        equal(text, ANSWER)


litellm.drop_params = False
litellm.suppress_debug_info = True
run()
