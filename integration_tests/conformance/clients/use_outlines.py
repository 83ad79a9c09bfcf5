"""`outlines`: JSON, expressions, choices and grammars over TGI's, OpenAI's and vLLM's fields."""

import json
from enum import Enum
from typing import Any, Literal

import openai
import outlines
from checks import ANSWER, API_KEY, END, QUESTION, URL, check, equal, run
from huggingface_hub import AsyncInferenceClient, InferenceClient
from outlines.types import CFG, Regex
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60, max_retries=0)
of_openai = outlines.from_openai(client, "tgi")
of_vllm = outlines.from_vllm(client, "tgi")
of_tgi = outlines.from_tgi(InferenceClient(URL, token=API_KEY))
ASKED = "Weather?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
TGI_GREEDY: dict[str, Any] = {"max_new_tokens": 60, "return_full_text": False}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


class City(Enum):
    PARIS = "Paris"
    OSLO = "Oslo"


@check
def text() -> None:
    equal(of_openai(QUESTION, **GREEDY), ANSWER)
    equal(of_vllm(QUESTION, **GREEDY), ANSWER)
    equal("".join(of_openai.stream(QUESTION, **GREEDY)), ANSWER)
    equal(of_tgi(QUESTION, **TGI_GREEDY).strip(), ANSWER)
    equal("".join(of_tgi.stream(QUESTION, **TGI_GREEDY)).strip().removesuffix(END), ANSWER)


@check
def json_schema() -> None:
    for found in (
        of_openai(ASKED, Weather, **GREEDY),
        of_vllm(ASKED, Weather, **GREEDY),
        "".join(of_vllm.stream(ASKED, Weather, **GREEDY)),
        of_tgi(ASKED, Weather, **TGI_GREEDY),
    ):
        Weather.model_validate_json(found)


@check
def json_of_any_kind() -> None:
    assert isinstance(json.loads(of_openai(ASKED, dict, **GREEDY)), dict)


@check
def regular_expression() -> None:
    wanted = Regex("[0-9]{3}-[a-c]{2}")
    for found in (of_vllm(ASKED, wanted, **GREEDY), of_tgi(ASKED, wanted, **TGI_GREEDY)):
        assert wanted.matches(found), found


@check
def choices() -> None:
    for wanted in (Literal["Paris", "Oslo"], City):
        for found in (of_vllm(ASKED, wanted, **GREEDY), of_tgi(ASKED, wanted, **TGI_GREEDY)):
            assert found in ("Paris", "Oslo"), found


@check
def numbers() -> None:
    for wanted in (int, float, bool):
        for found in (of_vllm(ASKED, wanted, **GREEDY), of_tgi(ASKED, wanted, **TGI_GREEDY)):
            json.loads(found.lower().removeprefix("+"))


@check
def grammar() -> None:
    found = of_vllm(ASKED, CFG('start: ("yes" | "no") "!"'), **GREEDY)
    assert found in ("yes!", "no!"), found


@check
async def asynchronous() -> None:
    model = outlines.from_tgi(AsyncInferenceClient(URL, token=API_KEY))
    Weather.model_validate_json(await model(ASKED, Weather, **TGI_GREEDY))
    asked = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=API_KEY, timeout=60)
    model = outlines.from_vllm(asked, "tgi")
    Weather.model_validate_json(await model(ASKED, Weather, **GREEDY))


run()
