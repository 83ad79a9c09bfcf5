"""Too long a prompt, or too long an answer behind it: each API says it in its vendor's sentence,
whose numbers clients read."""

import re
from typing import Any

from router.tests.chats import named_events, serve_chat
from router.tests.serving import Server, shared_server

MOST_INPUT, MOST_TOTAL = 500, 600
USER = len("<user><assistant>")
SHORT, LONG = 100, MOST_INPUT + 1


LIMITS = {"max_input_tokens": MOST_INPUT, "max_total_tokens": MOST_TOTAL}
running, server = shared_server(serve_chat, "yes", ends=True, **LIMITS)


def body_of(path: str, num_tokens: int, asked: int) -> dict[str, Any]:
    """A request whose prompt has `num_tokens`, and that asks for `asked` more."""
    text = "a" * (num_tokens - USER)
    if path in ("/v1/messages", "/v1/chat/completions"):
        return {
            "model": "tgi",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": asked,
        }
    if path == "/v1/responses":
        return {"model": "tgi", "input": text, "max_output_tokens": asked}
    plain = "a" * (num_tokens - len(["<s>"]))
    if path == "/v1/completions":
        return {"model": "tgi", "prompt": plain, "max_tokens": asked}
    return {"inputs": plain, "parameters": {"max_new_tokens": asked}}


async def refusal(server: Server, path: str, num_tokens: int, asked: int, **fields: Any) -> Any:
    body = body_of(path, num_tokens, asked) | fields
    response = await server.client.post(path, json=body)
    assert response.status_code == (400 if path.startswith("/v1/") else 422), response.text
    return response.json()["error"]


async def test_a_response_that_is_streamed_fails_in_an_event(server: Server) -> None:
    for num_tokens, asked in ((SHORT, MOST_TOTAL), (LONG, 1)):
        sentence = (await refusal(server, "/v1/responses", num_tokens, asked))["message"]
        body = body_of("/v1/responses", num_tokens, asked) | {"stream": True}
        response = await server.client.post("/v1/responses", json=body)
        assert response.status_code == 200
        events = named_events(response.text)
        kinds = [event["type"] for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.failed"]
        assert [event["sequence_number"] for event in events] == [0, 1, 2]
        last = events[-1]["response"]
        assert last["error"] == {"code": "context_length_exceeded", "message": sentence}
        assert last["status"] == "failed"


async def test_numbers_in_the_refusal_lead_to_a_request_that_fits(server: Server) -> None:
    """As Claude Code does: it asks again for fewer tokens, and cuts the prompt only where it is
    told that the prompt is too long."""
    message = (await refusal(server, "/v1/messages", MOST_INPUT, 32_000))["message"]
    found = re.search(r"exceed context limit: (\d+) \+ (\d+) > (\d+)", message)
    assert found is not None
    prompt, _, most = map(int, found.groups())
    fewer = body_of("/v1/messages", prompt, most - prompt)
    assert (await server.client.post("/v1/messages", json=fewer)).status_code == 200
    message = (await refusal(server, "/v1/messages", 5000, 32_000))["message"]
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
    assert found is not None
    shorter = body_of("/v1/messages", 5000 - (int(found[1]) - int(found[2])), 1)
    assert (await server.client.post("/v1/messages", json=shorter)).status_code == 200


async def test_a_text_that_is_not_even_tokenized(server: Server) -> None:
    """Its number of tokens is a lower bound, which only TGI's sentence has room to say."""
    message = (await refusal(server, "/v1/messages", 100_000, 1))["message"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 500 maximum", message)
    assert "Given: at least" in await refusal(server, "/generate", 100_000, 1)


async def test_a_prompt_that_is_cut_is_not_too_long(server: Server) -> None:
    body = body_of("/v1/chat/completions", 5000, 50) | {"truncate_prompt_tokens": -1}
    response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == MOST_INPUT
