"""/score and /rerank on top of shards that are played: the prompt, each form, each refusal."""

import math
from typing import Any

import pytest
from text_generation_router.reading import Reranker

from router.tests.serving import Server, serve, shared_server

QUERY, DOCUMENTS = "where is the cat", ["a longer text about dogs", "the cat"]
# Where a test asks for one document by itself.
FORMS = ("/v1/rerank", "/v2/rerank", "/rerank")


running, server = shared_server(serve, "hello ", reranker=True, max_input_tokens=400)


async def post(server: Server, path: str, **body: Any) -> Any:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def expected(server: Server, document: str, is_raw: bool = False) -> float:
    """The score that the shards of these tests give, by the tokens of its prompt."""
    assert isinstance(server.services.reranker, Reranker)
    text = server.services.reranker.prompt(QUERY, document, None)
    tokens = await server.services.tokenizer.token_ids(text, False)
    yes = -0.01 * len(tokens)
    return yes + 1 if is_raw else math.exp(yes) / (math.exp(yes) + math.exp(-1))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("queries", "documents")])
async def test_scores_come_in_the_order_of_the_pairs(
    server: Server, path: str, first: str, second: str
) -> None:
    answer = await post(server, path, **{first: QUERY, second: DOCUMENTS})
    assert answer["object"] == "list" and answer["id"].startswith("score-")
    wanted = [await expected(server, text) for text in DOCUMENTS]
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(0, "score"), (1, "score")]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 500
    several = await post(server, path, **{first: [QUERY, QUERY], second: DOCUMENTS})
    assert several["data"] == answer["data"]
    one = await post(server, path, **{first: QUERY, second: DOCUMENTS[0]})
    assert one["data"] == answer["data"][:1]
    raw = await post(server, path, **{first: QUERY, second: DOCUMENTS}, use_activation=False)
    found = [one["score"] for one in raw["data"]]
    assert found == pytest.approx([await expected(server, text, True) for text in DOCUMENTS])


@pytest.mark.parametrize("path", FORMS)
async def test_the_best_comes_first(server: Server, path: str) -> None:
    answer = await post(server, path, query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}])
    assert answer["id"].startswith("rerank-")
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert [one["document"]["text"] for one in answer["results"]] == DOCUMENTS[::-1]
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == pytest.approx([await expected(server, text) for text in DOCUMENTS[::-1]])
    assert set(answer["usage"]) == {"prompt_tokens", "total_tokens"}
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    short = await post(server, path, **body)
    assert [set(one) for one in short["results"]] == [{"index", "relevance_score"}]


async def test_a_long_text_is_cut_on_request(server: Server) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": ["a" * 1000]}
    response = await server.client.post("/rerank", json=body)
    assert response.status_code == 422 and "must have less than 400 tokens" in response.text
    for most, kept in ((-1, 400), (390, 390)):
        answer = await post(server, "/rerank", **body, truncate_prompt_tokens=most)
        assert answer["usage"]["prompt_tokens"] == kept
    body |= {"query": "q" * 300, "truncate_prompt_tokens": -1}
    response = await server.client.post("/rerank", json=body)
    assert response.status_code == 422 and "must leave room for a document" in response.text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/score", {"text_1": "a"}, "`text_2`: Field required"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 and 1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "must be 1 to 2048 texts, 0 are given"),
        ("/v1/rerank", {"query": "a", "texts": ["b"]}, "`documents`: Field required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "must be 1 to 2048 texts, 0 are given"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "2049 are given"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_chunks_per_doc": 2},
            "not supported",
        ),
    ],
)
async def test_a_bad_body_is_refused(
    server: Server, path: str, body: dict[str, Any], words: str
) -> None:
    response = await server.client.post(path, json=body)
    assert response.status_code == 400 and words in response.json()["error"]["message"]
