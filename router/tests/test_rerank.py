"""/score and /rerank on top of shards that are played: the prompt, each form, each refusal."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from text_generation_router.reranker import Reranker, find_reranker, score
from text_generation_router.tokenizer import Tokenizer

from router.tests.serving import Server, serve, write_tokenizer

QUERY, DOCUMENTS = "where is the cat", ["a longer text about dogs", "the cat"]
# Where a test asks for one document by itself.
FORMS = ("/v1/rerank", "/v2/rerank", "/rerank")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serve(tmp_path, reranker=True, max_input_tokens=400) as server:
        yield server


async def post(server: Server, path: str, **body: Any) -> Any:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def expected(server: Server, document: str, is_raw: bool = False) -> float:
    """The score that the shards of these tests give, by the tokens of its prompt."""
    assert isinstance(server.services.reranker, Reranker)
    text = server.services.reranker.prompt(QUERY, document, None)
    tokens = await server.services.tokenizer.token_ids(text, False)
    yes = -0.01 * tokens.count
    return yes + 1 if is_raw else math.exp(yes) / (math.exp(yes) + math.exp(-1))


def test_the_prompt_is_the_models() -> None:
    assert Reranker(1, 2).prompt("Q", "D", None) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: Q\n<Document>: D<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\n"
    )


@pytest.mark.parametrize(("yes", "no"), [(-0.1, -3.0), (-900.0, -901.0), (-700.0, -2.0)])
def test_the_score_is_a_probability(yes: float, no: float) -> None:
    assert score((yes, no), is_raw=True) == yes - no
    assert score((yes, no), is_raw=False) == pytest.approx(1 / (1 + math.exp(no - yes)))


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


async def test_texts_are_answered_as_tei_does(server: Server) -> None:
    answer = await post(server, "/rerank", query=QUERY, texts=DOCUMENTS)
    wanted = [await expected(server, text) for text in DOCUMENTS[::-1]]
    assert [one["index"] for one in answer] == [1, 0]
    assert [one["score"] for one in answer] == pytest.approx(wanted)
    assert set(answer[0]) == {"index", "score"}
    raw = await post(
        server, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True
    )
    assert [one["text"] for one in raw] == DOCUMENTS[::-1]
    assert raw[0]["score"] == pytest.approx(await expected(server, DOCUMENTS[1], True))


async def test_what_is_too_long_is_cut_if_that_is_asked_for(server: Server) -> None:
    long = "a" * 1000
    response = await server.client.post("/rerank", json={"query": QUERY, "texts": [long]})
    assert response.status_code == 422 and "must have less than 400 tokens" in response.text
    [cut] = await post(server, "/rerank", query=QUERY, texts=[long], truncate=True)
    whole = math.exp(-4.0)
    assert cut["score"] == pytest.approx(whole / (whole + math.exp(-1)))
    answer = await post(
        server, "/v1/rerank", query=QUERY, documents=[long], truncate_prompt_tokens=390
    )
    assert answer["usage"]["prompt_tokens"] == 390
    body = {"query": "q" * 300, "texts": ["a"], "truncate": True}
    response = await server.client.post("/rerank", json=body)
    assert response.status_code == 422 and "must leave room for a document" in response.text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/score", {"text_1": "a"}, "`text_2`: Field required"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 and 1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "must be 1 to 2048 texts, 0 are given"),
        ("/v1/rerank", {"query": "a"}, "either `documents` or `texts`"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "and not both"),
        ("/v1/rerank", {"query": "a", "documents": []}, "must be 1 to 2048 texts, 0 are given"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "2049 are given"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_chunks_per_doc": 2},
            "not supported",
        ),
        (
            "/v1/rerank",
            {"query": "a", "texts": ["b"], "truncation_direction": "Left"},
            "only `right` is supported",
        ),
    ],
)
async def test_what_is_wrong_is_said(
    server: Server, path: str, body: dict[str, Any], words: str
) -> None:
    response = await server.client.post(path, json=body)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


async def test_other_models_say_what_is_missing(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        body = {"query": "a", "documents": ["b"]}
        for path in ("/v1/rerank", "/rerank"):
            response = await server.client.post(path, json=body)
            assert response.status_code == 404 and "start with --reranker" in response.text
        response = await server.client.post("/score", json={"text_1": "a", "text_2": "b"})
        assert response.status_code == 404 and response.json()["error_type"] == "not_found"
        response = await server.client.post("/v1/embeddings", json={"input": "a"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("config", "name", "is_one"),
    [
        ({}, "some/model", False),
        ({}, "Qwen/Qwen3-Reranker-0.6B", True),
        ({}, "jinaai/jina-reranker-v3", False),
        ({"_name_or_path": "/models/qwen3-reranker-mine"}, "mine", True),
        ({"classifier_from_token": ["no", "yes"]}, "mine", True),
        ({"classifier_from_token": ["0", "1"]}, "mine", False),
        ({"is_original_qwen3_reranker": True}, "mine", True),
    ],
)
def test_which_models_are_rerankers(
    config: dict[str, Any], name: str, is_one: bool, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, ("yes", "no"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    found = find_reranker(tmp_path, name, tokenizer, False)
    assert isinstance(found, Reranker) == is_one
    asked = find_reranker(tmp_path, name, tokenizer, True)
    assert asked == Reranker(258, 259)
    tokenizer.close()


def test_a_reranker_needs_its_words(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    found = find_reranker(tmp_path, "Qwen3-Reranker", tokenizer, False)
    assert isinstance(found, str) and "no tokens `yes` and `no`" in found
    with pytest.raises(ValueError, match="--reranker is not possible"):
        find_reranker(tmp_path, "any", tokenizer, True)
    tokenizer.close()
