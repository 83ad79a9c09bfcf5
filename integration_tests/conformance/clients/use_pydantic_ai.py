"""`pydantic-ai`: agents over chat, responses and messages: tools, outputs of three kinds."""

from collections.abc import Callable
from typing import Any, Literal

from checks import ANSWER, API_KEY, QUESTION, URL, check, equal, is_weather, run
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    ModelSettings,
    NativeOutput,
    PromptedOutput,
    RunContext,
    ToolOutput,
)
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def models(key: str = API_KEY) -> list[Any]:
    """The same model through three routes."""
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=key)
    anthropic = AnthropicProvider(base_url=URL, api_key=key)
    return [
        OpenAIChatModel("tgi", provider=openai),
        OpenAIResponsesModel("tgi", provider=openai),
        AnthropicModel("tgi", provider=anthropic),
    ]


GREEDY = ModelSettings(temperature=0, max_tokens=150)
FORCED = ModelSettings(**GREEDY, parallel_tool_calls=False)


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


class Anything(BaseModel, extra="allow"):
    """Any JSON object."""


@check
async def answer() -> None:
    for model in models():
        result = await Agent(model, model_settings=GREEDY).run(QUESTION)
        equal(result.output, ANSWER)
        usage = result.usage
        equal((usage.requests, usage.output_tokens), (1, 20))
        equal(result.response.finish_reason, "stop")
        assert result.response.provider_response_id


@check
async def conversation() -> None:
    for model in models():
        agent = Agent(model, model_settings=GREEDY, instructions="Be brief.")
        first = await agent.run(QUESTION)
        second = await agent.run(QUESTION, message_history=first.all_messages())
        assert second.output


@check
async def stream() -> None:
    for model in models():
        async with Agent(model, model_settings=GREEDY).run_stream(QUESTION) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            equal("".join(pieces), ANSWER)
            equal(result.usage.output_tokens, 20)
        assert len(pieces) > 1, pieces


async def weather_of(output: Callable[[type[Weather]], Any], route: Any) -> None:
    """An output in one of the three ways, whole and streamed."""
    agent = Agent(route, output_type=output(Weather), model_settings=FORCED, retries=0)
    result = await agent.run("Weather in Paris?")
    assert isinstance(result.output, Weather), result
    async with agent.run_stream("Weather in Paris?") as streamed:
        last = [found async for found in streamed.stream_output()][-1]
    assert isinstance(last, Weather), last


@check
async def output_by_tool() -> None:
    for model in models():
        await weather_of(ToolOutput, model)


@check
async def output_by_format() -> None:
    for model in models()[:2]:
        await weather_of(NativeOutput, model)


@check
async def output_by_prompt() -> None:
    # A JSON object is enforced, but not its schema: the small model writes one of its own.
    for model in models()[:2]:
        output = PromptedOutput(Anything)
        agent = Agent(model, output_type=output, model_settings=GREEDY, retries=0)
        found = (await agent.run("Weather in Paris?")).output
        assert isinstance(found, Anything), found


def forced_once(context: RunContext[None]) -> ModelSettings:
    """The first request of a run must call a function; later ones are free."""
    choice: Any = "required" if context.run_step <= 1 else "none"
    return ModelSettings(**FORCED, tool_choice=choice)


async def tool_loop(model: Any) -> None:
    """A call, its result, and an answer."""
    called: list[dict[str, str]] = []
    agent = Agent(model, model_settings=forced_once, retries=0)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
        """The weather in a city."""
        called.append({"city": city, "unit": unit})
        return "7 degrees"

    result = await agent.run("Weather in Paris?")
    (found,) = called
    is_weather(found)
    equal((result.usage.requests, result.usage.tool_calls), (2, 1))
    assert result.output


@check
async def tools() -> None:
    for model in models():
        await tool_loop(model)


@check
async def hints() -> None:
    asked = OpenAIChatModelSettings(
        **GREEDY, openai_reasoning_effort="low", openai_store=True, openai_service_tier="auto"
    )
    result = await Agent(models()[0], model_settings=asked).run(QUESTION)
    equal(result.output, ANSWER)
    thinking = AnthropicModelSettings(
        max_tokens=1100, anthropic_thinking={"type": "enabled", "budget_tokens": 1024}
    )
    result = await Agent(models()[2], model_settings=thinking).run(QUESTION)
    assert result.output


@check
async def typed_exceptions() -> None:
    for model, bad in zip(models("wrong"), models(), strict=True):
        try:
            await Agent(model).run(QUESTION)
        except ModelHTTPError as error:
            equal(error.status_code, 401)
        else:
            raise AssertionError("a wrong key was taken")
        try:
            await Agent(bad, model_settings=ModelSettings(max_tokens=10**6)).run(QUESTION)
        except ModelHTTPError as error:
            equal(error.status_code, 400)
            assert "max_tokens" in str(error) or "tokens" in str(error), error
        else:
            raise AssertionError("a million tokens were taken")


run()
