"""How bodies are typed: literally, with TGI's treatment of null and of absence."""

import struct
from typing import Any

import orjson
import pytest
from pydantic import ValidationError
from text_generation_router.api.tgi.generate import (
    CompatGenerateRequest,
    GenerateParametersBody,
    GenerateRequest,
)
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters


def parse(parameters: str) -> GenerateParameters:
    body = orjson.loads(f'{{"inputs": "x", "parameters": {parameters}}}')
    return GenerateRequest.model_validate(body).to_parameters()


OTHERS = {
    "stop": ["a", ""],
    "logit_bias": {"42": -100, "7": 0.5},
    "grammar": {"type": "regex", "value": "a"},
}


def test_every_field_is_a_parameter_of_the_same_value() -> None:
    given: dict[str, Any] = {
        **{"best_of": 2, "temperature": 1.0, "repetition_penalty": 2.0, "frequency_penalty": -1.0},
        **{"presence_penalty": 0.5, "top_k": 3, "top_p": 0.5, "typical_p": 0.25, "truncate": 7},
        **{"max_new_tokens": 2**32 - 1, "min_new_tokens": 1, "seed": 2**64 - 1, "top_n_tokens": 5},
        **dict.fromkeys(("do_sample", "ignore_eos_token", "return_full_text", "watermark"), True),
        **dict.fromkeys(("details", "decoder_input_details", "deterministic"), True),
        **{"adapter_id": "a", "cache_salt": "s"},
    }
    assert given.keys() | OTHERS.keys() == GenerateParametersBody.model_fields.keys()
    asked = parse(orjson.dumps({**given, **OTHERS, "surprise": [1]}).decode())
    assert asked == GenerateParameters.of(
        inputs="x",
        **given,
        stop=("a", ""),
        logit_bias={42: -100.0, 7: 0.5},
        grammar=Grammar("regex", "a"),
    )


def test_null_is_absence_for_optional_fields() -> None:
    fields = GenerateParametersBody.model_fields
    nullable = [name for name, field in fields.items() if field.default is None]
    assert len(nullable) == 18
    assert parse(orjson.dumps(dict.fromkeys(nullable)).decode()) == parse("{}")


# Beside those of integration_tests/test_bad_input.py.
WRONG = [
    *(f'{{"{name}": null}}' for name in ("watermark", "decoder_input_details", "ignore_eos_token")),
    '{"best_of": -1}',
    '{"top_p": "1"}',
    '{"seed": true}',
    '{"temperature": 1e39}',
    '{"grammar": "a"}',
    '{"adapter_id": 1}',
    *(f'{{"logit_bias": {{"{key}": 1}}}}' for key in ("-1", "01", "²")),
    '{"logit_bias": {"1": "1"}}',
]


@pytest.mark.parametrize("parameters", WRONG)
def test_wrong_types(parameters: str) -> None:
    with pytest.raises(ValidationError):
        parse(parameters)


def test_floats_are_32_bit() -> None:
    (temperature,) = struct.unpack("<f", b"\xcd\xcc\xcc=")
    assert parse('{"temperature": 0.1}').sampling["temperature"] == temperature
    assert parse('{"temperature": 1e-320}').sampling["temperature"] == 0.0


@pytest.mark.parametrize("stream", ["null", "1", '"true"'])
def test_stream_is_a_boolean(stream: str) -> None:
    with pytest.raises(ValidationError):
        CompatGenerateRequest.model_validate(orjson.loads(f'{{"inputs":"x","stream":{stream}}}'))


def test_compat_returns_the_full_text_unless_told_otherwise() -> None:
    def full_text(body: dict[str, object]) -> bool | None:
        request = CompatGenerateRequest.model_validate(body)
        return request.to_parameters(return_full_text=True).return_full_text

    assert full_text({"inputs": "x"}) is True
    assert full_text({"inputs": "x", "parameters": {"return_full_text": None}}) is True
    assert full_text({"inputs": "x", "parameters": {"return_full_text": False}}) is False
