"""vLLM's fields on /v1/chat/completions and /v1/completions of a running server."""

import json
from typing import Any

import httpx
import orjson
import pytest
from text_generation_router.api.openai.chat import ChatRequest
from text_generation_router.api.openai.completions import CompletionRequest
from text_generation_router.chat.constraint import answer_grammar
from text_generation_router.chat.format import detect_format
from text_generation_router.grammar import write
from text_generation_router.request import Grammar, Request

from router.tests.api.openai.test_chat import chunks
from router.tests.serving import BOS_ID, EOS_ID, Server, script_of, serve, shared_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, Any] = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, TEXT: {}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if documents %}[{{ documents[0].text }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# <think></think> #}"
)
LOGPROBS: dict[str, Any] = {CHAT: {"logprobs": True}, TEXT: {"logprobs": 1}}
Json = dict[str, Any]


running, server = shared_server(serve, "héllo ", chat_template=TEMPLATE)


@pytest.fixture(params=[CHAT, TEXT])
def path(request: pytest.FixtureRequest) -> str:
    route: str = request.param
    return route


async def post(server: Server, path: str, **body: Any) -> httpx.Response:
    prompt = {"prompt": "Hi"} if path == TEXT else PROMPTS[CHAT]
    return await server.client.post(path, json={**prompt, "max_tokens": 12} | body)


async def answer(server: Server, path: str, **body: Any) -> Json:
    response = await post(server, path, **body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def text_of(choice: Json) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def new_text(choice: Json) -> str:
    return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


def asked(server: Server) -> Request:
    """What the shard was asked last."""
    return server.shards.requests[-1]


async def test_sampling_and_stopping_fields_reach_the_shards(server: Server, path: str) -> None:
    given = {"min_p": 0.25, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [300, 7, 7]}
    response = await post(server, path, **given)
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop_token_ids"
    await answer(server, path, **given | {"stop_token_ids": [200, 7, 7]})
    request = asked(server)
    assert request.sampling.min_p == 0.25 and request.sampling.is_sampling
    assert (request.asked.min_new_tokens, request.asked.ignore_eos_token) == (3, True)
    assert request.asked.stop_token_ids == (200, 7)
    # Nothing is drawn, and so nothing is left out.
    await answer(server, path, min_p=0.25, temperature=0)
    assert asked(server).sampling.min_p == 0 and not asked(server).sampling.is_sampling
    await answer(server, path, min_p=0, min_tokens=0, ignore_eos=False, stop_token_ids=[])
    assert asked(server).asked.stop_token_ids == () and asked(server).sampling.min_p == 0


async def test_too_many_min_tokens(server: Server, path: str) -> None:
    response = await post(server, path, min_tokens=13)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "min_tokens"
    assert error["message"] == "`min_tokens` must be <= `max_tokens`. Given: 13 and 12"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("given", "text", "reason"),
    [
        ({}, "hé", 0),
        ({"include_stop_str_in_output": True}, "hél", 0),
        ({"stop_token_ids": [], "stop": "lo"}, "hél", "lo"),
        ({"stop_token_ids": [], "stop": ["lo"], "include_stop_str_in_output": True}, "héllo", "lo"),
        # A stop string within the first tokens ends nothing.
        ({"stop_token_ids": [], "stop": "h", "min_tokens": 3}, "héllo ", "h"),
        ({"stop": "nothing", "stop_token_ids": []}, "héllo héll", None),
    ],
)
async def test_stops(
    server: Server, path: str, is_stream: bool, given: Json, text: str, reason: Any
) -> None:
    (stop_id,) = script_of("l")
    reason = stop_id if reason == 0 else reason
    body = {"stop_token_ids": [stop_id], "stream": is_stream, **given}
    if is_stream:
        events = [
            choice
            for event in chunks(await post(server, path, **body))
            for choice in event["choices"]
        ]
        last, found = events[-1], "".join(map(new_text, events))
    else:
        last = (await answer(server, path, **body))["choices"][0]
        found = text_of(last)
    assert found == text
    assert last["stop_reason"] == reason
    assert last["finish_reason"] == ("length" if reason is None else "stop")


async def test_an_end_token_is_no_stop_reason(server: Server, path: str) -> None:
    server.shards.script = [*script_of("ab"), EOS_ID]
    choice = (await answer(server, path, stop_token_ids=[EOS_ID]))["choices"][0]
    assert choice["stop_reason"] is None and choice["finish_reason"] == "stop"
    # Ignored as such, it ends the text all the same.
    choice = (await answer(server, path, stop_token_ids=[EOS_ID], ignore_eos=True))["choices"][0]
    assert choice["stop_reason"] == EOS_ID and text_of(choice) == "ab"
    assert "stop_reason" not in (await answer(server, path))["choices"][0]


async def test_special_tokens_are_shown(server: Server, path: str) -> None:
    server.shards.script = [*script_of("a"), BOS_ID, *script_of("b"), EOS_ID]
    assert text_of((await answer(server, path))["choices"][0]) == "ab"
    shown = await answer(server, path, skip_special_tokens=False)
    assert text_of(shown["choices"][0]) == "a<s>b"
    (scored,) = (await answer(server, path, skip_special_tokens=False, **LOGPROBS[path]))["choices"]
    logprobs = scored["logprobs"]
    names = logprobs["tokens"] if path == TEXT else [one["token"] for one in logprobs["content"]]
    assert names == ["a", "<s>", "b"]
    # vLLM shows the end token, too, where what ended the text is to be in it.
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text_of((await answer(server, path, **both))["choices"][0]) == "a<s>b</s>"
    going_on = await answer(server, path, skip_special_tokens=False, ignore_eos=True)
    assert text_of(going_on["choices"][0]) == "a<s>b</s>" * 3


async def test_special_tokens_before_the_prompt(server: Server, path: str) -> None:
    default = await answer(server, path)
    other = await answer(server, path, add_special_tokens=path == CHAT)
    difference = other["usage"]["prompt_tokens"] - default["usage"]["prompt_tokens"]
    assert difference == (1 if path == CHAT else -1)
    assert (asked(server).input_ids[0] == BOS_ID) is (path == CHAT)


async def test_the_end_of_the_prompt_is_kept(server: Server, path: str) -> None:
    whole = (await answer(server, path, return_token_ids=True))["usage"]["prompt_tokens"]
    assert (await answer(server, path, truncate_prompt_tokens=2))["usage"]["prompt_tokens"] == 2
    assert (await answer(server, path, truncate_prompt_tokens=-1, truncation_side="left"))["usage"][
        "prompt_tokens"
    ] == whole
    long = {"prompt": "x" * 5000, "messages": [{"role": "user", "content": "x" * 5000}]}
    assert (await post(server, path, **long)).status_code == 400
    fits = await answer(server, path, **long, truncate_prompt_tokens=-1)
    assert fits["usage"]["total_tokens"] == 4096
    for size, side, param in ((0, "left", "prompt_tokens"), (4, "right", "ation_side")):
        response = await post(server, path, truncate_prompt_tokens=size, truncation_side=side)
        assert response.status_code == 400 and response.json()["error"]["param"].endswith(param)
    error = (await post(server, path, truncate_prompt_tokens=99999)).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


async def test_token_ids(server: Server, path: str) -> None:
    (stop_id,) = script_of("o")
    given = {"return_token_ids": True, "stop_token_ids": [stop_id]}
    whole = await answer(server, path, **given)
    choice = whole["choices"][0]
    assert choice["token_ids"] == script_of("héllo")
    prompt = (whole if path == CHAT else choice)["prompt_token_ids"]
    assert prompt == list(asked(server).input_ids)
    events = chunks(await post(server, path, **given, stream=True))
    parts = [choice for event in events for choice in event["choices"]]
    told = [token for part in parts for token in part.get("token_ids", ())]
    assert told == choice["token_ids"]
    carriers = events if path == CHAT else parts
    assert carriers[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in carrier for carrier in carriers[1:])
    assert "token_ids" not in (await answer(server, path))["choices"][0]


async def test_token_ids_in_place_of_texts(server: Server) -> None:
    given = {"return_tokens_as_token_ids": True}
    names = [f"token_id:{token}" for token in script_of("héllo héll")]
    found = await answer(server, TEXT, logprobs=1, **given)
    logprobs = found["choices"][0]["logprobs"]
    assert logprobs["tokens"] == names
    assert set(logprobs["top_logprobs"][0]) == {names[0], "token_id:0"}
    streamed = chunks(await post(server, TEXT, logprobs=1, stream=True, **given))
    pieces = [c["logprobs"]["tokens"] for e in streamed for c in e["choices"] if c["logprobs"]]
    assert [name for piece in pieces for name in piece] == names
    found = await answer(server, CHAT, logprobs=True, top_logprobs=1, **given)
    content = found["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == names
    assert content[0]["top_logprobs"][0]["token"] == "token_id:0"


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_in_each_chunk(server: Server, path: str, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(await post(server, path, stream=True, n=n, stream_options=options))
    *during, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12 * n
    for index in range(n):
        own = [event["usage"] for event in during if event["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in own]
        assert counts == sorted(counts) and counts[-1] == 12
        assert {usage["prompt_tokens"] for usage in own} == {last["usage"]["prompt_tokens"]}
    plain = chunks(await post(server, path, stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] for event in plain[:-1]] == [None] * (len(plain) - 1)
    alone = {"continuous_usage_stats": True}
    without = chunks(await post(server, path, stream=True, stream_options=alone))
    assert all(event["choices"] and event["usage"] for event in without)


async def test_request_id(server: Server, path: str) -> None:
    prefix = "chatcmpl" if path == CHAT else "cmpl"
    assert (await answer(server, path, request_id="mine-7"))["id"] == f"{prefix}-mine-7"
    events = chunks(await post(server, path, request_id="mine-7", stream=True))
    assert {event["id"] for event in events} == {f"{prefix}-mine-7"}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "SELECT " column\ncolumn ::= "a" | "b"'


@pytest.mark.parametrize(
    ("name", "value", "grammar"),
    [
        ("json", SCHEMA, Grammar("json_schema", orjson.dumps(SCHEMA).decode())),
        ("json", json.dumps(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA))),
        ("regex", "[ab]+", Grammar("regex", "[ab]+")),
        (
            "choice",
            ["a.b", 'é"\n', "a"],
            Grammar("lark", 'start: CHOICE\nCHOICE: "a.b" | "é\\"\\n" | "a"'),
        ),
        ("grammar", 'start: "a"', Grammar("lark", 'start: "a"')),
        ("grammar", GBNF, Grammar("gbnf", GBNF)),
        ("json_object", True, Grammar("json_schema", '{"type":"object"}')),
        ("json_object", False, None),
    ],
)
async def test_guides(
    server: Server, path: str, name: str, value: Any, grammar: Grammar | None
) -> None:
    if grammar is not None and path == CHAT:
        grammar = answer_grammar(detect_format(TEMPLATE), grammar)
    expected = "" if grammar is None else write(grammar)
    await answer(server, path, structured_outputs={name: value})
    assert asked(server).grammar == expected
    if name != "json_object":
        await answer(server, path, **{f"guided_{name}": value}, response_format={"type": "text"})
        both = {f"guided_{name}": value, "structured_outputs": {name: value}}
        await answer(server, path, **both)
        assert asked(server).grammar == expected


async def test_a_response_format_that_says_the_same(server: Server) -> None:
    schema = {"type": "object", "properties": {"said_twice": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    await answer(server, CHAT, response_format=shape)
    await answer(server, CHAT, structured_outputs={"json": schema}, response_format=shape)
    # The second one was compiled already.
    assert sum("said_twice" in grammar for grammar in server.shards.grammars) == 1


async def test_format_of_completions(server: Server) -> None:
    await answer(server, TEXT, response_format={"type": "json_object"})
    assert asked(server).grammar == write(Grammar("json_schema", '{"type":"object"}'))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "together with `guided_json`"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs", "toge"),
        ({"guided_regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs", "toge"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "`json`"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_", "`regex`"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "use `grammar`"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "whitespace", "not supported"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not be empty"),
        ({"guided_grammar": 'x ::= "a"'}, "", "No 'root' rule"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "together with `guided_regex`",
        ),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "can not be streamed"),
        ({"request_id": "x" * 200}, "request_id", "at most 128"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids", "`guided_choice`"),
        ({"priority": 2**31}, "priority", "less than"),
    ],
)
async def test_refused(server: Server, path: str, body: Json, param: str, words: str) -> None:
    response = await post(server, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert param in (error["param"] or "") and words in error["message"]


async def test_unsupported_fields_are_refused_by_name(server: Server, path: str) -> None:
    fields = (ChatRequest if path == CHAT else CompletionRequest).model_fields
    refused = [name for name, field in fields.items() if field.description == "Not supported."]
    assert len(refused) > 15
    for name in refused:
        error = (await post(server, path, **{name: {"odd": 1}})).json()["error"]
        assert error["param"] == name and error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"echo": True}, "it is in `messages`"),
        (CHAT, {"chat_template": "{{ messages }}"}, "--tokenizer-config-path"),
        (CHAT, {"return_prompt_text": True}, "/chat_tokenize"),
        (
            CHAT,
            {"add_generation_prompt": True, "continue_final_message": True},
            "must not be true together with `add_generation_prompt`",
        ),
    ],
)
async def test_refused_on_one_route(server: Server, path: str, body: Json, words: str) -> None:
    response = await post(server, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] in body and words in error["message"]


async def test_hints_are_told(server: Server, path: str) -> None:
    given: Json = {
        "guided_decoding_backend": "xgrammar",
        "spaces_between_special_tokens": False,
        "session_id": "s",
        "return_token_offsets": True,
        "return_mm_kwargs": False,
        "structured_outputs": {"regex": "a", "disable_fallback": True},
    }
    names = [name for name in given if name != "structured_outputs"]
    if path == CHAT:
        given |= {"media_io_kwargs": {"a": {}}, "mm_processor_kwargs": {"a": 1}}
        names += ["media_io_kwargs", "mm_processor_kwargs"]
    for is_stream in (False, True):
        response = await post(server, path, **given, stream=is_stream)
        assert response.status_code == 200, response.text
        assert all(name in response.headers["warning"] for name in names)
        assert "disable_fallback" not in response.headers["warning"]


async def test_null_and_defaults_are_accepted_without_a_warning(server: Server, path: str) -> None:
    """null everywhere, and vLLM's own defaults, as clients send them that send everything."""
    body = ChatRequest if path == CHAT else CompletionRequest
    needed = {"messages", "prompt", "max_tokens"}
    nothing = dict.fromkeys(set(body.model_fields) - needed)
    defaults: Json = {
        "use_beam_search": False,
        "min_p": 0.0,
        "length_penalty": 1.0,
        "early_stopping": False,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "add_special_tokens": path == TEXT,
        "bad_words": [],
        "priority": 0,
        "echo": False,
        "return_token_ids": False,
        "return_tokens_as_token_ids": False,
        "routed_experts_prompt_start": 0,
        "return_token_offsets": False,
        "return_mm_kwargs": True,
        "return_prompt_text": False,
    }
    for given in (nothing, defaults):
        response = await post(server, path, **given)
        assert response.status_code == 200, response.text
        assert "warning" not in response.headers
        assert text_of(response.json()["choices"][0]) == "héllo héll"


@pytest.mark.parametrize(
    ("role", "given", "prompt"),
    [
        ("user", {}, "<user>Hi<assistant>"),
        ("user", {"add_generation_prompt": False}, "<user>Hi"),
        ("user", {"continue_final_message": True}, "<user>Hi"),
        ("assistant", {}, "<assistant>Hi"),
        ("assistant", {"add_generation_prompt": True}, "<assistant>Hi<assistant>"),
        ("user", {"documents": [{"text": "D"}]}, "<user>Hi[D]<assistant>"),
    ],
)
async def test_templates(server: Server, role: str, given: Json, prompt: str) -> None:
    messages = [{"role": role, "content": "Hi"}]
    await answer(server, CHAT, messages=messages, **given)
    assert list(asked(server).input_ids) == script_of(prompt)
    body = {"messages": messages, **given}
    response = await server.client.post("/chat_tokenize", json=body)
    assert response.json()["templated_text"] == prompt


async def test_reasoning_is_left_out(server: Server) -> None:
    server.shards.script = [*script_of("<think>why</think>so"), EOS_ID]
    given = {"max_tokens": 60, "include_reasoning": False, "return_token_ids": True}
    choice = (await answer(server, CHAT, **given))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "so", "refusal": None}
    events = chunks(await post(server, CHAT, **given, stream=True))
    parts = [part for event in events for part in event["choices"]]
    assert "".join(map(new_text, parts)) == "so"
    assert all(part["delta"].keys() <= {"role", "content"} for part in parts)
    told = [token for part in parts for token in part.get("token_ids", ())]
    assert told == choice["token_ids"] == server.shards.script
