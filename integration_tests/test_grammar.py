"""Structured output from a real server: what comes out follows the grammar, or a typed error says
why it can not."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
import regex
from hypothesis import settings

from integration_tests.marks import at_night
from integration_tests.schemas import SCHEMAS, Schema, check, closed
from integration_tests.server import (
    LauncherHandle,
    assert_ended,
    token_ids,
    wait_until,
)

PERSON = closed(name={"type": "string"}, age={"type": "integer", "minimum": 0})
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 1.0}
CLIENTS = 16
# Schemas that need more do not fit the few tokens they are given here.
MAX_NEW_TOKENS = 45


@pytest.fixture(params=["embedded", "random weights"])
def either_server(request: pytest.FixtureRequest) -> LauncherHandle:
    """A model that has learnt something, and one that knows nothing."""
    name = "embedded" if request.param == "embedded" else "server"
    handle: LauncherHandle = request.getfixturevalue(name)
    return handle


async def _ask(client: httpx.AsyncClient, schema: Schema, **parameters: Any) -> httpx.Response:
    grammar = {"type": "json", "value": schema}
    body = {"inputs": "An example:", "parameters": {"grammar": grammar, **DRAWN, **parameters}}
    async with asyncio.timeout(60):
        while True:
            response = await client.post("/generate", json=body)
            # What takes long beside other tests is compiled one at a time.
            if response.status_code == 200 or response.json()["error_type"] != "overloaded":
                return response
            await asyncio.sleep(float(response.headers["retry-after"]))


@pytest.mark.examples
async def test_two_hundred_schemas(either_server: LauncherHandle) -> None:
    gate = asyncio.Semaphore(CLIENTS)

    async def prove(client: httpx.AsyncClient, number: int, schema: Schema) -> int:
        """The fewest tokens there are, then some more: 1 where the text follows the schema."""
        async with gate:
            response = await _ask(client, schema, max_new_tokens=1)
            least = 1
            if response.status_code != 200:
                needed = re.search(r"must be >= (\d+), the tokens", response.json()["error"])
                assert needed is not None, response.text
                least = int(needed[1])
            for room in (least, least + number % 7, max(least, MAX_NEW_TOKENS)):
                response = await _ask(client, schema, max_new_tokens=room, seed=number)
                assert response.status_code == 200, f"{schema}: {response.text}"
                check(response.json()["generated_text"], schema)
            return 1

    assert len(SCHEMAS) == 200
    every = 1 if settings().max_examples > len(SCHEMAS) else 3
    async with either_server.async_client() as client:
        asked = list(enumerate(SCHEMAS))[::every]
        done = await asyncio.gather(*(prove(client, *item) for item in asked))
    assert sum(done) == len(asked)


def test_every_spelling(server: LauncherHandle) -> None:
    spellings: list[dict[str, Any]] = [
        {"type": "json", "value": PERSON},
        {"type": "json_object", "value": json.dumps(PERSON)},
        {"type": "json_schema", "value": {"schema": PERSON, "name": "person"}},
        {"type": "json_schema", "json_schema": {"schema": PERSON, "strict": True}},
    ]
    texts = {
        server.generate("x", grammar=g, max_new_tokens=40)["generated_text"] for g in spellings
    }
    assert len(texts) == 1
    check(texts.pop(), PERSON)
    answer = server.generate(
        "x", grammar={"type": "regex", "value": "[0-4]{3}/[a-c]+x"}, max_new_tokens=12
    )
    assert re.fullmatch("[0-4]{3}/[a-c]+x", answer["generated_text"])
    lark = 'start: pair ("," pair)* ";"\npair: /[a-z]{2}/ "=" /[0-9]/'
    answer = server.generate("x", grammar={"type": "lark", "value": lark}, max_new_tokens=24)
    assert re.fullmatch("[a-z]{2}=[0-9](,[a-z]{2}=[0-9])*;", answer["generated_text"])


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.py",
        r"[\w.]+@[\w.]+\.com",
        "[a-z]+bc",
        ".+@.+",
        r"(.|\n)*END",
    ],
)
def test_a_repetition_that_overlaps_what_follows(server: LauncherHandle, pattern: str) -> None:
    for room in (10, 20, 40):
        grammar = {"type": "regex", "value": pattern}
        text = server.generate("x", grammar=grammar, max_new_tokens=room)["generated_text"]
        # Its \w has all that is part of a word, as in Rust; Python's has no accents by themselves.
        assert regex.fullmatch(pattern, text)
    schema = closed(host={"type": "string", "pattern": "^[a-z0-9.-]+\\.com$"})
    answer = server.generate("x", grammar={"type": "json", "value": schema}, max_new_tokens=20)
    check(answer["generated_text"], schema)


def test_an_end_token_needs_no_room(server: LauncherHandle) -> None:
    letter = {"type": "regex", "value": "[A-D]"}
    for room, reason in ((1, "length"), (3, "eos_token")):
        answer = server.generate("x", grammar=letter, max_new_tokens=room, details=True)
        assert re.fullmatch("[A-D]", answer["generated_text"])
        assert answer["details"]["finish_reason"] == reason


def test_neighbours_write_what_they_write_alone(server: LauncherHandle) -> None:
    free = {"max_new_tokens": 30, "ignore_eos_token": True}
    alone = token_ids(server.generate("the cat", **free))

    async def together() -> list[httpx.Response]:
        async with server.async_client() as client:
            body = {"inputs": "the cat", "parameters": {**free, "details": True}}
            return await asyncio.gather(
                *(client.post("/generate", json=body) for _ in range(4)),
                *(_ask(client, schema, max_new_tokens=200, seed=1) for schema in SCHEMAS[:8]),
            )

    answers = asyncio.run(together())
    assert [token_ids(answer.json()) for answer in answers[:4]] == [alone] * 4
    for answer, schema in zip(answers[4:], SCHEMAS, strict=False):
        check(answer.json()["generated_text"], schema)


def test_a_preempted_text_is_the_same(server: LauncherHandle, cramped: LauncherHandle) -> None:
    schema: Schema = {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 3}
    seeds = range(6)

    async def all_of(server: LauncherHandle) -> list[str]:
        async with server.async_client() as client:
            asked = (_ask(client, schema, max_new_tokens=100, seed=seed) for seed in seeds)
            return [answer.json()["generated_text"] for answer in await asyncio.gather(*asked)]

    wanted = asyncio.run(all_of(server))
    assert asyncio.run(all_of(cramped)) == wanted


FORMATS = closed(
    id={"type": "string", "format": "uuid"},
    mail={"type": "string", "format": "email"},
    ip={"anyOf": [{"type": "string", "format": "ipv6"}, {"type": "null"}]},
)


def kill_worker(server: LauncherHandle) -> None:
    """Kills the processes that try grammars."""
    name = "text_generation_shard.grammars.grammar"
    found = [each for each in server.family() if name in each.cmdline()]
    assert found
    for each in found:
        each.kill()
    assert_ended(found)


def test_the_process_that_tries_grammars_may_die(server: LauncherHandle) -> None:
    """Texts that are being written are the same, and new ones need not notice."""

    async def all_of(is_killed: bool) -> list[str]:
        async with server.async_client() as client:
            asked = [
                asyncio.create_task(_ask(client, FORMATS, max_new_tokens=400, seed=seed))
                for seed in range(6)
            ]
            if is_killed:
                taken = "tgi_batch_current_size"
                await asyncio.to_thread(
                    wait_until, lambda: server.metrics()[taken] == len(asked), 20, "all are written"
                )
                await asyncio.to_thread(kill_worker, server)
                schema = closed(a={"type": "integer"})
                assert (await _ask(client, schema, max_new_tokens=40)).status_code == 200
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers]
            return [answer.json()["generated_text"] for answer in answers]

    wanted = asyncio.run(all_of(is_killed=False))
    for text in wanted:
        check(text, FORMATS)
    assert asyncio.run(all_of(is_killed=True)) == wanted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "json", "value": "{"}, "grammar is not valid: "),
    ({"type": "json", "value": "[]"}, "grammar is not valid: a JSON schema must be an object"),
    ({"type": "json", "value": {"no": 1}}, "Grammar must have a 'properties' field"),
    ({"type": "json", "value": {"type": "array", "uniqueItems": True}}, '"uniqueItems"'),
    ({"type": "json", "value": {"$ref": "http://x.org/y"}}, "cannot compile regex from schema: "),
    ({"type": "json", "value": closed(a={"type": "string", "format": "phone"})}, "Unknown format"),
    ({"type": "json", "value": {"type": "array", "items": [{}]}}, "use `prefixItems`"),
    ({"type": "json", "value": {"enum": ["x" * 70_000]}}, "at most 65536 bytes"),
    ({"type": "json", "value": closed(a={}, b={"minItems": 10**6, "type": "array"})}, "smaller"),
    ({"type": "regex", "value": "("}, "grammar is not valid: "),
    ({"type": "regex", "value": "a(?=b)"}, "look-around"),
]


@pytest.mark.parametrize(("grammar", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_a_grammar_that_can_not_be_done_is_said(
    server: LauncherHandle, grammar: dict[str, Any], sentence: str
) -> None:
    body = {"inputs": "x", "parameters": {"grammar": grammar, "max_new_tokens": 200}}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == "validation"
    assert sentence in response.json()["error"]


def _of(part: Any, **more: Any) -> Schema:
    return {"type": "object", "properties": {"a": part, "n": {"type": "null"}}, **more}


LOOK_AHEAD = r"^(?!\.)(?!.*\.\.)[A-Za-z0-9.]*[A-Za-z0-9]@[a-z]+$"
# What people and programs write, and what attackers could.
ODD: list[Schema] = [
    _of({"type": "string", "format": "email", "pattern": LOOK_AHEAD}),
    _of({"type": "string", "pattern": r"^(a)\1$"}),
    _of({"type": "string", "pattern": "("}),
    _of({"type": "string", "pattern": "a{1000000}"}, required=["a"]),
    _of({"type": "string"}, required=None),
    _of({"type": "string"}, required="a"),
    _of({"type": "string"}, required=["b"], additionalProperties=False),
    _of({"type": "date"}),
    _of({"type": None}),
    _of({"type": "integer", "minimum": 5, "maximum": 1}, required=["a"]),
    _of({"type": "integer", "minimum": "5"}),
    _of({"type": "number", "multipleOf": 0}),
    _of({"enum": []}, required=["a"]),
    _of({"enum": None}),
    _of({"$ref": "#/$defs/no"}),
    _of({"$ref": "https://example.com/a.json"}),
    _of({"$ref": "#/properties/a"}, required=["a"]),
    _of({"$ref": "#"}, required=["a"]),
    _of({"anyOf": []}, required=["a"]),
    _of({"allOf": [{"type": "string"}, {"type": "null"}]}, required=["a"]),
    _of({"type": "array", "items": [{"type": "string"}]}),
    _of({"type": "array", "minItems": 10**9}, required=["a"]),
    _of(None),
    _of(False, required=["a"]),
    _of({}, patternProperties={"^a$": {"type": "integer", "minimum": 3}}, required=["a"]),
    _of({}, patternProperties={"^[a-n]$": {"type": "null"}}, additionalProperties=False),
    _of({}, patternProperties={"^[a-n]$": {"type": "null"}, "a": {"type": "string"}}),
    _of({"type": "string"}, **{"$id": "no uri", "$schema": "draft 7"}),
    _of({"not": {"type": "string"}}, **{"if": {}, "then": False}),
    {"type": "object", "properties": []},
    {"type": "object", "properties": None, "additionalProperties": None},
    {"type": "object", "minProperties": 9},
    {"type": ["object", "null"], "propertyNames": {"pattern": "^b"}},
]


def test_a_pattern_for_the_name_of_a_property(embedded: LauncherHandle) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer"}},
        "patternProperties": {"^score$": {"minimum": 3}},
        "additionalProperties": False,
    }
    for seed in range(20):
        check(_text(embedded, schema, 60, seed=seed), schema)


def test_formats_are_ended_in_time(embedded: LauncherHandle) -> None:
    """A hot answer runs on until it must end; later requests with its schema are served."""
    formats = {"id": "uuid", "mail": "email", "ip": "ipv6"}
    schema = closed(**{name: {"type": "string", "format": kind} for name, kind in formats.items()})
    for seed in (3, 4, 3):
        found = json.loads(_text(embedded, schema, 900, seed=seed, temperature=0.8))
        assert list(found) == list(formats)


def _text(server: LauncherHandle, schema: Schema, max_new_tokens: int, **parameters: Any) -> str:
    """The text of an answer that follows the schema."""
    given = {"grammar": {"type": "json", "value": schema}, **DRAWN, **parameters}
    body = {"inputs": "An example:", "parameters": {**given, "max_new_tokens": max_new_tokens}}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["generated_text"]
    return text


@pytest.mark.parametrize("is_strict", [True, *at_night(False)])
def test_an_odd_schema_never_gives_a_5xx(embedded: LauncherHandle, is_strict: bool) -> None:
    """A text that follows it, or the reason; a tool that is not strict loses the odd part only."""
    message = {"messages": [{"role": "user", "content": "call it"}], "max_tokens": 60}
    client = embedded.client

    def ask(tool: Schema, choice: str, seed: int) -> httpx.Response:
        functions = [{"name": "plain", "parameters": _of({"type": "null"})}]
        functions.append({"name": "odd", "parameters": tool, "strict": is_strict})
        tools = [{"type": "function", "function": each} for each in functions]
        body = {**message, "tools": tools, "tool_choice": choice, "seed": seed}
        return client.post("/v1/chat/completions", json=body)

    for number, schema in enumerate(ODD):
        answers = [ask(schema, choice, number) for choice in ("auto", "required")]
        statuses = {answer.status_code for answer in answers}
        assert statuses == {200} or (is_strict and statuses == {400}), (schema, answers[0].text)
        for answer in answers:
            assert answer.status_code == 200 or "tool odd can not be" in answer.text, answer.text
        if not is_strict:
            continue
        parameters = {"grammar": {"type": "json", "value": schema}, "seed": number, **DRAWN}
        body = {"inputs": "x", "parameters": {**parameters, "max_new_tokens": 60}}
        answer = client.post("/generate", json=body)
        assert answer.status_code in (200, 422), (schema, answer.text)
        if answer.status_code == 200:
            check(answer.json()["generated_text"], schema)
