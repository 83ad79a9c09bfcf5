"""`openai-agents`: agent loops over chat and responses: tools, output types, hand-offs, streams."""

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ItemHelpers,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import ANSWER, API_KEY, QUESTION, URL, check, equal, is_weather, run
from pydantic import BaseModel

set_tracing_disabled(True)  # it would tell OpenAI
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60, max_retries=0)
MODELS = (OpenAIChatCompletionsModel("tgi", client), OpenAIResponsesModel("tgi", client))
GREEDY = ModelSettings(temperature=0, max_tokens=150, include_usage=True)
FORCED = GREEDY.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
called: list[dict[str, str]] = []


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


@function_tool
def get_weather(city: Literal["Paris", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city."""
    called.append({"city": city, "unit": unit})
    return "7 degrees"


def agent(model: Any, **options: Any) -> Agent[None]:
    """An agent that answers greedily."""
    return Agent(**{"name": "Clerk", "model": model, "model_settings": GREEDY, **options})


@check
async def answer() -> None:
    for model in MODELS:
        result = await Runner.run(agent(model), QUESTION)
        equal(result.final_output, ANSWER)
        usage = result.context_wrapper.usage
        equal((usage.requests, usage.output_tokens), (1, 20))


@check
async def hints() -> None:
    # What its users set for OpenAI's models.
    asked = ModelSettings(
        reasoning={"effort": "low"}, verbosity="low", store=True, metadata={"a": "b"}
    )
    for model in MODELS:
        result = await Runner.run(agent(model, model_settings=GREEDY.resolve(asked)), QUESTION)
        equal(result.final_output, ANSWER)


@check
async def conversation() -> None:
    for model in MODELS:
        first = await Runner.run(agent(model), QUESTION)
        more = [*first.to_input_list(), {"role": "user", "content": QUESTION}]
        second = await Runner.run(agent(model, instructions="Be brief."), more)
        assert second.final_output, second


@check
async def tools() -> None:
    # The tool is called once, as it must; what is said after its result is free.
    for model in MODELS:
        called.clear()
        clerk = agent(model, tools=[get_weather], model_settings=FORCED)
        result = await Runner.run(clerk, "Weather in Paris?", max_turns=4)
        kinds = [item.type for item in result.new_items]
        equal(kinds[:2], ["tool_call_item", "tool_call_output_item"])
        assert called, kinds
        for arguments in called:
            is_weather(arguments)
        assert result.final_output, kinds
        clerk = clerk.clone(tool_use_behavior="stop_on_first_tool")
        equal((await Runner.run(clerk, "Weather in Paris?")).final_output, "7 degrees")


@check
async def output_type() -> None:
    for model in MODELS:
        result = await Runner.run(agent(model, output_type=Weather), "Weather in Paris?")
        assert isinstance(result.final_output, Weather), result.final_output


@check
async def tools_and_output_type() -> None:
    for model in MODELS:
        called.clear()
        clerk = agent(model, tools=[get_weather], output_type=Weather, model_settings=FORCED)
        result = await Runner.run(clerk, "Weather in Paris?", max_turns=6)
        assert called
        assert isinstance(result.final_output, Weather), result.final_output


@check
async def hand_off() -> None:
    for model in MODELS:
        specialist = agent(model, name="Specialist")
        clerk = agent(model, handoffs=[specialist], model_settings=FORCED)
        result = await Runner.run(clerk, QUESTION)
        equal(result.last_agent.name, "Specialist")
        assert result.final_output


@check
async def max_turns() -> None:
    for model in MODELS:
        clerk = agent(model, tools=[get_weather], model_settings=FORCED, reset_tool_choice=False)
        try:
            await Runner.run(clerk, "Weather in Paris?", max_turns=3)
        except MaxTurnsExceeded:
            continue
        raise AssertionError("the loop ended by itself")


@check
async def stream() -> None:
    for model in MODELS:
        result = Runner.run_streamed(agent(model), QUESTION)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        equal("".join(pieces), ANSWER)
        equal(result.final_output, ANSWER)
        equal(result.context_wrapper.usage.output_tokens, 20)


@check
async def stream_of_tools() -> None:
    for model in MODELS:
        called.clear()
        clerk = agent(model, tools=[get_weather], model_settings=FORCED)
        result = Runner.run_streamed(clerk, "Weather in Paris?", max_turns=4)
        names = [
            event.name
            async for event in result.stream_events()
            if event.type == "run_item_stream_event"
        ]
        equal(names[:2], ["tool_called", "tool_output"])
        equal(names[-1], "message_output_created")
        assert called
        assert ItemHelpers.text_message_outputs(result.new_items)


@check
async def typed_exceptions() -> None:
    stranger = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        try:
            await Runner.run(agent(kind("tgi", stranger)), QUESTION)
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("a wrong key was taken")
        asked = ModelSettings(temperature=-1)
        try:
            await Runner.run(agent(kind("tgi", client), model_settings=asked), QUESTION)
        except openai.BadRequestError as error:
            equal(error.param, "temperature")
        else:
            raise AssertionError("a temperature below 0 was taken")


run()
