"""`instructor`: its modes over chat and responses, partial objects, retries."""

from typing import Literal

import instructor
import openai
from checks import API_KEY, URL, check, raised, run
from instructor.core import InstructorRetryException
from pydantic import BaseModel, field_validator

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60, max_retries=0)
async_client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60)
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
GREEDY = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
Mode = instructor.Mode


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


@check
def modes() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        found = patched.chat.completions.create(**GREEDY, response_model=Weather, max_retries=0)
        assert isinstance(found, Weather), (mode, found)


@check
def json_mode() -> None:
    # A JSON object is enforced, but not its schema: the small model writes one of its own.
    class Anything(BaseModel, extra="allow"):
        pass

    patched = instructor.from_openai(client, mode=Mode.JSON)
    found = patched.chat.completions.create(**GREEDY, response_model=Anything, max_retries=0)
    assert isinstance(found, Anything), found


@check
def responses() -> None:
    patched = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS)
    found = patched.responses.create(
        model="tgi",
        input="Weather in Paris?",
        temperature=0,
        max_output_tokens=200,
        response_model=Weather,
        max_retries=0,
    )
    assert isinstance(found, Weather), found


@check
def with_completion() -> None:
    patched = instructor.from_openai(client, mode=Mode.TOOLS)
    found, completion = patched.chat.completions.create_with_completion(
        **GREEDY, response_model=Weather, max_retries=0
    )
    assert isinstance(found, Weather), found
    assert completion.id.startswith("chatcmpl-") and completion.usage.completion_tokens > 0


@check
def partial() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        parts = list(patched.chat.completions.create_partial(**GREEDY, response_model=Weather))
        assert len(parts) > 1, parts
        Weather(**parts[-1].model_dump())


@check
def retries() -> None:
    # Each retry sends the answer that was refused, and why, as a tool's result.
    class Never(Weather):
        @field_validator("city")
        @classmethod
        def refuse(cls, city: str) -> str:
            raise ValueError("another city, please")

    patched = instructor.from_openai(client, mode=Mode.TOOLS)
    error = raised(
        InstructorRetryException,
        lambda: patched.chat.completions.create(**GREEDY, response_model=Never, max_retries=2),
    )
    assert "another city, please" in str(error), error
    assert error.n_attempts >= 2, error.n_attempts


@check
async def asynchronous() -> None:
    patched = instructor.from_openai(async_client, mode=Mode.TOOLS)
    found = await patched.chat.completions.create(**GREEDY, response_model=Weather, max_retries=0)
    assert isinstance(found, Weather), found


@check
def typed_exceptions() -> None:
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    patched = instructor.from_openai(stranger, mode=Mode.TOOLS)
    error = raised(
        InstructorRetryException,
        lambda: patched.chat.completions.create(**GREEDY, response_model=Weather, max_retries=0),
    )
    assert "401" in str(error), error
    patched = instructor.from_openai(client, mode=Mode.JSON_SCHEMA)
    asked = {**GREEDY, "max_tokens": 3}
    error = raised(
        InstructorRetryException,
        lambda: patched.chat.completions.create(**asked, response_model=Weather, max_retries=0),
    )
    assert "400" in str(error) and "max_tokens" in str(error), error


run()
