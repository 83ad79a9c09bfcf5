"""What answers have in common: ids, numbers as TGI prints them, headers with times."""

import struct
import uuid
from collections.abc import Mapping, Sequence
from math import isfinite

import orjson
from fastapi import Response

from text_generation_router.request import Ending
from text_generation_router.services import Services

_pack_float32 = struct.Struct("f").pack


def make_id(prefix: str) -> str:
    """A new id as OpenAI and Anthropic make them, such as msg_0f…"""
    return f"{prefix}_{uuid.uuid4().hex}"


def json_response(content: object, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON; NaN becomes null."""
    return Response(orjson.dumps(content), media_type="application/json", headers=headers)


def float32(value: float | None) -> float | None:
    """A 32-bit float as the shortest decimal that reads back as the same 32 bits."""
    return None if value is None or not isfinite(value) else float(_shortest(value))


def float32_json(value: float | None) -> str:
    """The JSON of `float32(value)`; one is written for every token."""
    if value is None or not isfinite(value):
        return "null"
    digits = _shortest(value)
    # Whole numbers and very small ones are spelled differently in JSON.
    if "." not in digits or "e" in digits:
        return orjson.dumps(float(digits)).decode()
    return digits


def _shortest(value: float) -> str:
    bits = _pack_float32(value)
    shortest = f"{value:.8g}"
    if _pack_float32(float(shortest)) != bits:
        return f"{value:.9g}"
    for shorter in (f"{value:.7g}", f"{value:.6g}"):
        if _pack_float32(float(shorter)) != bits:
            break
        shortest = shorter
    return shortest


def timing_headers(
    endings: Sequence[Ending], prompt_tokens: int, characters: int, services: Services
) -> dict[str, str]:
    """Sums over all sequences, as TGI has them: whole milliseconds, but x-compute-time in seconds.

    `prompt_tokens` and `characters` are those of all prompts, each counted once.
    """
    total_s = sum(each.total_s for each in endings)
    milliseconds = {
        "x-total-time": total_s,
        "x-validation-time": sum(each.validation_s for each in endings),
        "x-queue-time": sum(each.queue_s for each in endings),
        "x-inference-time": sum(each.inference_s for each in endings),
        "x-time-per-token": sum(each.time_per_token_s for each in endings),
    }
    return {
        "x-compute-type": services.compute_type,
        "x-compute-time": f"{total_s:.9f}",
        "x-compute-characters": str(characters),
        **{name: str(int(seconds * 1000)) for name, seconds in milliseconds.items()},
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(sum(ending.generated.generated_tokens for ending in endings)),
    }
