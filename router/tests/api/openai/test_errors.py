"""Errors of OpenAI's routes: status, body, and where they must not change TGI's."""

from pathlib import Path

import pytest
from text_generation_router.api.errors import describe, shape_complaint
from text_generation_router.errors import (
    ContextLengthError,
    GenerationError,
    GrammarFailedError,
    IncompleteGenerationError,
    OverloadedError,
    RouterError,
    TemplateError,
    ValidationError,
)

from router.tests.serving import serve, shared_server

CHAT = "/v1/chat/completions"


running, server = shared_server(serve, "hello ")


TOO_LONG = ContextLengthError(
    num_prompt_tokens=6, max_new_tokens=1, max_input_tokens=5, max_total_tokens=9
)
TOO_LONG_SENTENCE = (
    "This model's maximum context length is 5 tokens. However, your messages resulted in 6 tokens. "
    "Please reduce the length of the messages."
)
STOPS = "`stop` supports up to 4 stop sequences. Given: 5"
FAILED = "Request failed during generation: "


@pytest.mark.parametrize(
    ("error", "status", "message", "kind", "param", "code"),
    [
        (TOO_LONG, 400, TOO_LONG_SENTENCE, None, "messages", "context_length_exceeded"),
        (ValidationError(STOPS), 400, STOPS, None, "stop", None),
        (TemplateError("no"), 400, "Template error: no", None, None, None),
        (GrammarFailedError("too complex"), 400, f"{FAILED}too complex", None, None, None),
        (GenerationError("no memory"), 500, f"{FAILED}no memory", "server_error", None, None),
        (IncompleteGenerationError(), 500, "Incomplete generation", "server_error", None, None),
        (
            *(OverloadedError(3), 429, "Model is overloaded", "rate_limit_error", None),
            "rate_limit_exceeded",
        ),
    ],
)
def test_errors_have_openais_form(
    error: RouterError,
    status: int,
    message: str,
    kind: str | None,
    param: str | None,
    code: str | None,
) -> None:
    kind = kind or "invalid_request_error"
    detail = {"message": message, "type": kind, "param": param, "code": code}
    assert describe(error, CHAT) == (status, detail)


def test_the_form_that_fits_furthest_is_complained_about() -> None:
    body = {"content": [{"text": 5}]}
    errors = [
        {"loc": ("body", "content", "str"), "type": "string_type", "msg": "A", "input": []},
        {
            "loc": ("body", "content", "list[Part]", 0, "text"),
            "type": "string_type",
            "msg": "B",
            "input": 5,
        },
    ]
    told = ("`content.0.text`: B. Given: 5", "content.0.text")
    assert shape_complaint(errors, body) == told
    missing = {"loc": ("body", "prompt"), "type": "missing", "msg": "Field required", "input": {}}
    assert shape_complaint([missing], {}) == ("`prompt`: Field required", "prompt")
    whole = {"loc": ("body",), "type": "dict_type", "msg": "C", "input": "é" * 99}
    sentence, param = shape_complaint([whole], "é" * 99)
    assert param is None and sentence.endswith("é…")


BODY = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


async def test_the_names_that_the_model_was_given(tmp_path: Path) -> None:
    names = ("mine", "org/other")
    async with serve(tmp_path, served_model_name=names, any_model_name=False) as server:
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["mine", "org/other"]
        for name, told in {"mine": "mine", "other": "org/other", "tgi": "mine"}.items():
            found = (await server.client.get(f"/v1/models/{name}")).json()
            assert found["id"] == told
            answer = await server.client.post("/v1/completions", json={"model": name, **BODY})
            assert answer.json()["model"] == "mine"
        served = server.services.config.served_model_id
        assert (await server.client.get("/info")).json()["model_id"] == served
        refused = await server.client.post("/v1/completions", json={"model": served, **BODY})
        assert refused.status_code == 404
