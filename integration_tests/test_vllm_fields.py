"""vLLM's fields on OpenAI's routes of a real server, which also drafts tokens ahead."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from integration_tests.server import LauncherHandle, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "def add(first, second):"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[LauncherHandle]:
    with running(None, "--speculate", "3") as handle:
        yield handle
        handle.assert_idle()


@pytest.fixture(params=[CHAT, TEXT])
def path(request: pytest.FixtureRequest) -> str:
    route: str = request.param
    return route


def answer(server: LauncherHandle, path: str, **body: Any) -> Json:
    prompt: Json = {"prompt": PROMPT}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    response = server.client.post(path, json=prompt | {"max_tokens": 20} | body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def text_of(found: Json) -> str:
    choice = found["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def length_of(found: Json) -> int:
    count: int = found["usage"]["completion_tokens"]
    return count


def end_id(server: LauncherHandle) -> int:
    """The token that ends an answer."""
    found = answer(
        server,
        CHAT,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=200,
        temperature=0,
        return_token_ids=True,
    )
    assert found["choices"][0]["finish_reason"] == "stop"
    token: int = found["choices"][0]["token_ids"][-1]
    return token


def towards(**tokens: float) -> Json:
    return {"logit_bias": {name.removeprefix("t"): bias for name, bias in tokens.items()}}


def test_ignore_eos_gives_all_tokens(server: LauncherHandle, path: str) -> None:
    bias = towards(**{f"t{end_id(server)}": 100.0})
    assert length_of(answer(server, path, **bias, max_tokens=100)) == 1
    found = answer(server, path, **bias, max_tokens=100, ignore_eos=True)
    assert length_of(found) == 100 and found["choices"][0]["finish_reason"] == "length"
    for seed in range(5):
        drawn = {"ignore_eos": True, "seed": seed, "temperature": 1.5, "n": 3}
        assert length_of(answer(server, path, max_tokens=100, **drawn)) == 300


def test_streams_of_ignored_ends(server: LauncherHandle, path: str) -> None:
    """What a load generator counts: a chunk's usage, and the ids of the chunks."""
    body: Json = {
        **({"prompt": PROMPT} if path == TEXT else {}),
        **({"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {}),
        **towards(**{f"t{end_id(server)}": 100.0}),
        **{"max_tokens": 64, "ignore_eos": True, "stream": True, "return_token_ids": True},
        "skip_special_tokens": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    with server.client.stream("POST", path, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 64
    parts = [part for event in events for part in event["choices"]]
    assert sum(len(part.get("token_ids", ())) for part in parts) == 64


def test_min_tokens_and_stop_tokens(server: LauncherHandle, path: str) -> None:
    end = end_id(server)
    (stop,) = answer(server, path, max_tokens=1, return_token_ids=True, temperature=0)["choices"][
        0
    ]["token_ids"]
    given = {**towards(**{f"t{stop}": 90.0, f"t{end}": 60.0}), "return_token_ids": True}
    found = answer(server, path, **given, stop_token_ids=[stop])["choices"][0]
    assert found["token_ids"] == [stop]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert text_of({"choices": [found]}) == ""
    shown = answer(server, path, **given, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert text_of(shown) != ""
    # Neither of both comes early.
    late = answer(server, path, **given, stop_token_ids=[stop], min_tokens=9)["choices"][0]
    assert len(late["token_ids"]) == 10 and late["stop_reason"] == stop
    assert not {stop, end} & set(late["token_ids"][:9])
    # Without stop tokens this one goes on and on, or an end token is the second.
    assert length_of(answer(server, path, **given)) == 20
    given |= towards(**{f"t{end}": 90.0})
    ended = answer(server, path, **given, min_tokens=9, stop_token_ids=[stop])["choices"][0]
    assert len(ended["token_ids"]) == 10 and ended["token_ids"][-1] == end
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)


def test_min_p(server: LauncherHandle, path: str) -> None:
    greedy = text_of(answer(server, path, temperature=0))
    hot = {"temperature": 5.0, "seed": 1}
    assert text_of(answer(server, path, **hot, min_p=1.0)) == greedy
    assert text_of(answer(server, path, **hot)) != greedy
    assert text_of(answer(server, path, **hot, min_p=0)) == text_of(answer(server, path, **hot))
    wanted = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 5}

    def least(**given: Any) -> float:
        """The smallest share of the best one's probability that a drawn token has."""
        found = answer(server, path, temperature=1.5, max_tokens=60, **wanted, **given)
        logprobs = found["choices"][0]["logprobs"]
        if path == CHAT:
            places = logprobs["content"]
            pairs = [(one["logprob"], one["top_logprobs"][0]["logprob"]) for one in places]
        else:
            tops = logprobs["top_logprobs"]
            pairs = [
                (own, max(top.values()))
                for own, top in zip(logprobs["token_logprobs"], tops, strict=True)
            ]
        assert len(pairs) > 20
        return min(math.exp(own - best) for own, best in pairs)

    for seed in range(3):
        given = {"seed": seed, "ignore_eos": True}
        assert least(**given, min_p=0.3) >= 0.299
        assert least(**given) < 0.1


GUIDES: list[tuple[str, Any, str]] = [
    ("regex", r"[a-c]{3}-\d{2}", r"[a-c]{3}-\d{2}"),
    ("choice", ["yes", "yes, but", "no. (never)"], r"yes|yes, but|no\. \(never\)"),
    ("grammar", 'start: "a" B+\nB: /[0-9]/ "!"', r"a([0-9]!)+"),
    ("grammar", 'root ::= "SELECT " c ("," c)*\nc ::= [x-z]', r"SELECT [x-z](,[x-z])*"),
    ("json", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, ""),
]


@pytest.mark.parametrize(("name", "value", "pattern"), GUIDES)
def test_guides(server: LauncherHandle, path: str, name: str, value: Any, pattern: str) -> None:
    for place, given in enumerate(
        ({f"guided_{name}": value}, {"structured_outputs": {name: value}})
    ):
        for seed in range(3):
            text = text_of(answer(server, path, **given, seed=seed + place, max_tokens=40))
            if name == "json":
                assert json.loads(text)["a"] in (1, 2)
            else:
                assert re.fullmatch(pattern, text), text
    # A grammar ends by itself, also where end tokens are ignored; a stop token ends it before.
    both = answer(server, path, **{f"guided_{name}": value}, ignore_eos=True, max_tokens=40)
    assert length_of(both) <= 40


def test_a_stop_token_ends_a_grammar(server: LauncherHandle, path: str) -> None:
    given = {"guided_regex": "a{40}", "temperature": 0, "return_token_ids": True, "max_tokens": 41}
    ids = answer(server, path, **given)["choices"][0]["token_ids"]
    found = answer(server, path, **given, stop_token_ids=[ids[0]])["choices"][0]
    assert found["token_ids"] == ids[:1] and found["stop_reason"] == ids[0]
    late = answer(server, path, **given, stop_token_ids=[ids[0]], min_tokens=1)["choices"][0]
    assert len(late["token_ids"]) > 1


def test_prompt_logprobs(server: LauncherHandle, path: str) -> None:
    found = answer(server, path, prompt_logprobs=3, temperature=0, return_token_ids=True)
    carrier = found if path == CHAT else found["choices"][0]
    ids, told = carrier["prompt_token_ids"], carrier["prompt_logprobs"]
    assert len(told) == len(ids) == found["usage"]["prompt_tokens"] and told[0] is None
    for token, place in zip(ids[1:], told[1:], strict=True):
        own = place[str(token)]
        best = sorted(place.values(), key=lambda one: one["rank"])
        assert [one["rank"] for one in best[:3]] == [1, 2, 3]
        assert [one["logprob"] for one in best] == sorted(
            (o["logprob"] for o in best), reverse=True
        )
        assert (own["rank"] <= 3) == (len(place) == 3)
    # The same as what the prompt's echo says.
    echo = server.client.post(
        TEXT, json={"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    ).json()["choices"][0]["logprobs"]
    own = [place[str(token)]["logprob"] for token, place in zip(ids[1:], told[1:], strict=True)]
    assert echo["token_logprobs"][1:] == pytest.approx(own, abs=1e-3)
    # And the token of rank 1 after the prompt's part is the one that follows.
    part = {"prompt": ids[:-1], "temperature": 0, "max_tokens": 1, "return_token_ids": True}
    (follows,) = server.client.post(TEXT, json=part).json()["choices"][0]["token_ids"]
    assert told[-1][str(follows)]["rank"] == 1
