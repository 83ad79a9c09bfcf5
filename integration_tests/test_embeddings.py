"""Embeddings and scores of a whole server equal those of transformers, also during generation."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from integration_tests.checkpoints import FAMILIES, write_checkpoint
from integration_tests.conftest import Launch
from integration_tests.oracle import Oracle, ragged_prompts
from integration_tests.server import LauncherHandle, running, token_ids

NUMBERS = 0, 1, 2, 3


def unit(vector: torch.Tensor) -> list[float]:
    found: list[float] = torch.nn.functional.normalize(vector, dim=0).tolist()
    return found


def expected(oracle: Oracle, text: str, pooling: str) -> torch.Tensor:
    """The hidden state of a text by transformers, not normalised."""
    with torch.no_grad():
        model: Any = oracle._fresh()
        hidden = model.model(torch.tensor([oracle.encode(text)])).last_hidden_state[0]
    found: torch.Tensor = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return found


def embed(handle: LauncherHandle, given: Any, **body: Any) -> list[Any]:
    response = handle.client.post("/v1/embeddings", json={"model": "x", "input": given, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    assert answer["model"] == handle.client.get("/v1/models").json()["data"][0]["id"]
    return [one["embedding"] for one in answer["data"]]


@pytest.mark.parametrize(
    ("family", "pooling"), [("llama2", "last"), ("qwen3", "mean"), ("granite", "last")]
)
def test_equals_transformers(family: str, pooling: str, checkpoint: Callable[[str], Path]) -> None:
    """Prompts of 1 to 150 tokens in parts of 32, in one request, and again with a prefix cache that
    has them."""
    path = checkpoint(family)
    oracle, texts = Oracle(path, family), ragged_prompts(path)
    flags = ("--dtype", "float32", "--max-batch-prefill-tokens", "32", "--pooling", pooling)
    with running(path, *flags, *FAMILIES[family].flags) as handle:
        wanted = [expected(oracle, text, pooling) for text in texts]
        for _ in range(2):
            for found, whole in zip(embed(handle, texts), wanted, strict=True):
                assert found == pytest.approx(unit(whole), abs=1e-4)
        [cut] = embed(handle, texts[-1], dimensions=16)
        assert cut == pytest.approx(unit(wanted[-1][:16]), abs=1e-4)
        # As OpenAI's client asks, and what it makes of the answer.
        packed = embed(handle, texts, encoding_format="base64")
        for spelled, whole in zip(packed, wanted, strict=True):
            numbers = struct.unpack(f"<{len(whole)}f", base64.b64decode(spelled))
            assert numbers == pytest.approx(unit(whole), abs=1e-4)
        ids = [oracle.encode(text) for text in texts]
        assert embed(handle, ids) == embed(handle, texts)
        handle.assert_idle()


def test_two_shards_answer_as_one(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("qwen3")
    oracle, texts = Oracle(path, "qwen3"), ragged_prompts(path)
    flags = ("--device", "cpu", "--dtype", "float32", "--num-shard", "2", "--pooling", "mean")
    with running(path, *flags) as handle:
        for found, text in zip(embed(handle, texts), texts, strict=True):
            assert found == pytest.approx(unit(expected(oracle, text, "mean")), abs=1e-4)
        handle.assert_idle()


def test_little_memory(cramped: LauncherHandle, tiny_model_path: Path) -> None:
    """Preempted rows restart, also those with means."""
    oracle, texts = Oracle(tiny_model_path, "llama3"), ragged_prompts(tiny_model_path)
    preempted = cramped.metrics()["tgi_request_preempted"]

    def generate(number: int) -> Any:
        return cramped.generate(f"{number} 1 2 3", max_new_tokens=150, ignore_eos_token=True)

    with ThreadPoolExecutor(10) as pool:
        crowd = [pool.submit(generate, number) for number in range(8)]
        asked = [pool.submit(embed, cramped, texts) for _ in range(2)]
        for found in asked:
            for vector, text in zip(found.result(), texts, strict=True):
                assert vector == pytest.approx(unit(expected(oracle, text, "mean")), abs=1e-4)
        for one in crowd:
            assert len(token_ids(one.result())) == 150
    assert cramped.metrics()["tgi_request_preempted"] > preempted


async def test_generation_goes_on_beside(server: LauncherHandle, tiny_model_path: Path) -> None:
    """The same tokens, and the same vectors, as each by itself."""
    oracle, texts = Oracle(tiny_model_path, "llama3"), ragged_prompts(tiny_model_path)
    alone = server.generate("the cat sat on ", max_new_tokens=60, ignore_eos_token=True)

    async def generate(client: httpx.AsyncClient) -> Any:
        parameters = {"max_new_tokens": 60, "ignore_eos_token": True, "details": True}
        body = {"inputs": "the cat sat on ", "parameters": parameters}
        return (await client.post("/generate", json=body)).json()

    async def ask(client: httpx.AsyncClient) -> Any:
        return (await client.post("/v1/embeddings", json={"input": texts})).json()

    async with server.async_client() as client:
        works = [generate(client) for _ in NUMBERS] + [ask(client) for _ in NUMBERS]
        found = await asyncio.gather(*works)
    for answer in found[: len(NUMBERS)]:
        assert answer["generated_text"] == alone["generated_text"]
    wanted = [unit(expected(oracle, text, "last")) for text in texts]
    for answer in found[len(NUMBERS) :]:
        for one, vector in zip(answer["data"], wanted, strict=True):
            assert one["embedding"] == pytest.approx(vector, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "`input` cannot be empty"),
        ({"input": "cat " * 400}, "maximum context length is 300 tokens"),
        ({"input": "a", "dimensions": 65}, "`dimensions` must be <= 64"),
        ({"input": [300]}, "below 300"),
    ],
)
def test_faults_of_a_request_are_said(
    server: LauncherHandle, body: Mapping[str, Any], words: str
) -> None:
    response = server.client.post("/v1/embeddings", json=body)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_the_models_folder_says_how_it_is_pooled(launch: Launch, tmp_path: Path) -> None:
    path = write_checkpoint("llama3", tmp_path / "model")
    (path / "1_Pooling").mkdir()
    settings = path / "1_Pooling" / "config.json"
    settings.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with running(path, "--dtype", "float32") as handle:
        [found] = embed(handle, "the cat sat on the mat")
    oracle = Oracle(path, "llama3")
    wanted = expected(oracle, "the cat sat on the mat", "mean")
    assert found == pytest.approx(unit(wanted), abs=1e-4)
    settings.write_text(json.dumps({"pooling_mode_cls_token": True}))
    refused = launch(path)
    assert refused.wait_for_exit() == 1
    assert "choose one with --pooling last or --pooling mean" in refused.log


QUERY = "where is the cat?"
DOCUMENTS = ("the cat sat on the mat", "it rained", "add(1, 2) is three; and the dog ran " * 4)


def write_reranker(directory: Path) -> Path:
    """Of Qwen3-Reranker's form: a Qwen3 whose tokenizer has `yes` and `no`."""
    write_checkpoint("qwen3", directory, vocab_size=304)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def probabilities(path: Path, documents: Sequence[str]) -> list[float]:
    """As Qwen3-Reranker's own page computes them: three parts, each tokenized by itself."""
    oracle = Oracle(path, "qwen3")
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    behind = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    answers = [oracle.tokenizer.token_to_id(word) for word in ("no", "yes")]
    found = []
    for document in documents:
        question = f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = [i for part in (before, question, behind) for i in oracle.encode(part)]
        with torch.no_grad():
            logits = oracle._fresh()(torch.tensor([ids])).logits[0, -1]
        found.append(logits[answers].softmax(0)[1].item())
    return found


def test_a_reranker_scores_as_transformers_does(tmp_path: Path) -> None:
    path = write_reranker(tmp_path / "Tiny-Qwen3-Reranker")
    wanted = probabilities(path, DOCUMENTS)
    order = sorted(range(len(wanted)), key=lambda place: -wanted[place])
    with running(path, "--dtype", "float32") as handle:

        def post(route: str, **body: Any) -> Any:
            response = handle.client.post(route, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        answer = post("/v1/score", model="x", text_1=QUERY, text_2=list(DOCUMENTS))
        assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-4)
        answer = post("/rerank", model="x", query=QUERY, documents=list(DOCUMENTS))
        assert [one["index"] for one in answer["results"]] == order
        found = [one["relevance_score"] for one in answer["results"]]
        assert found == pytest.approx([wanted[place] for place in order], abs=1e-4)
        raw = post("/rerank", query=QUERY, documents=list(DOCUMENTS), use_activation=False)
        for one in raw["results"]:
            assert 1 / (1 + math.exp(-one["relevance_score"])) == pytest.approx(
                wanted[one["index"]], abs=1e-4
            )
        handle.assert_idle()


def test_another_model_is_no_reranker(server: LauncherHandle) -> None:
    for path, body in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        response = server.client.post(path, json=body)
        assert response.status_code == 404 and "start with --reranker" in response.text
