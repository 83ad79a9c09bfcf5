"""A server on a GPU answers what a server on the processor answers, and ends as that one does."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from integration_tests.conftest import Launch
from integration_tests.oracle import ragged_prompts
from integration_tests.questions import (
    MOST_PROMPT_TOKENS,
    PROMPT,
    QUESTIONS,
    WATERMARKED,
    Answer,
    ask,
    flat,
)
from integration_tests.server import LauncherHandle, running, wait_until
from integration_tests.together import serve_together

ROOT = Path(__file__).parents[1]
GPU = pytest.mark.gpu
# `stream`: a GPU's runner over the reference device, see `stream_device`.
DEVICES = ["stream", pytest.param("cuda", marks=GPU)]
# What /info says of them.
NAMES = {"stream": ("cpu", "torch"), "cuda": ("cuda", "triton")}
# What Python runs first in every process of such a server.
FIRST = """
import text_generation_shard.device
text_generation_shard.device.DEVICES["cuda"] = "shard.tests.stream_device"
"""
HAS_ALL_CACHES = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
LIMIT = ("--max-input-tokens", str(MOST_PROMPT_TOKENS))
DROPPED = 'tgi_request_failure{err="dropped"}'


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the server under test computes."""
    return str(request.param)


@pytest.fixture(scope="module")
def environment(device: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What makes this device the one that is called cuda."""
    if device == "cuda":
        return {}
    folder = tmp_path_factory.mktemp("first")
    (folder / "sitecustomize.py").write_text(FIRST)
    paths = str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def device_server(environment: dict[str, str], tiny_model_path: Path) -> Iterator[LauncherHandle]:
    """A server with the flags of the shared one, but for the device. Afterwards SIGTERM ends it in
    order."""
    flags = ("--device", "cuda", "--dtype", "float32", *LIMIT)
    with running(tiny_model_path, *flags, **environment) as handle:
        yield handle


@pytest.fixture
def tested(device_server: LauncherHandle) -> Iterator[LauncherHandle]:
    """The same; afterwards it must have got everything back."""
    yield device_server
    device_server.assert_idle()


def assert_alike(found: Answer, golden: Answer) -> None:
    """All numbers but log-probabilities are whole ones."""
    assert found.keys() == golden.keys()
    other = {
        place: (found[place], value)
        for place, value in golden.items()
        if found[place] != pytest.approx(value, abs=1e-3)
    }
    assert other == {}


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_it_answers_what_the_processor_answers(
    name: str, tested: LauncherHandle, server: LauncherHandle
) -> None:
    golden = ask(server.client, *QUESTIONS[name])
    assert_alike(ask(tested.client, *QUESTIONS[name]), golden)


async def test_sixteen_that_come_and_go(
    tested: LauncherHandle, server: LauncherHandle, tiny_model_path: Path
) -> None:
    prompts = ragged_prompts(tiny_model_path)
    golden = await serve_together(server, prompts)
    found = await serve_together(tested, prompts)
    for index in range(len(prompts)):
        assert_alike(flat(found[index]), flat(golden[index]))


def test_a_prompt_that_begins_like_another(tested: LauncherHandle, server: LauncherHandle) -> None:
    """What the first one left in the cache is used, and nothing is different."""
    beginning = "def add(first, second): return first + second; print(add(1, 2)); " * 2
    hits = "tgi_prefix_cache_hit_tokens"
    before = tested.metrics()[hits]
    for ending in ("the sun", "the sun", "what is there?"):
        asked = {"max_new_tokens": 12, "top_n_tokens": 2}
        golden = flat(server.generate(beginning + ending, **asked))
        assert_alike(flat(tested.generate(beginning + ending, **asked)), golden)
    assert tested.metrics()[hits] >= before + 64


def test_the_best_of_several(tested: LauncherHandle, server: LauncherHandle) -> None:
    """Each has a seed of its own, with which the processor draws the same."""
    drawn = {"do_sample": True, "temperature": 1.2, "ignore_eos_token": True, "max_new_tokens": 20}
    details = tested.generate(PROMPT, best_of=2, **drawn)["details"]
    sequences = [details, *details["best_of_sequences"]]
    assert len({sequence["seed"] for sequence in sequences}) == 2
    for sequence in sequences:
        golden = server.generate(PROMPT, seed=sequence["seed"], **drawn)["details"]
        assert_alike(flat(sequence["tokens"]), flat(golden["tokens"]))


def test_a_watermark(tested: LauncherHandle) -> None:
    """Which tokens are favoured depends on the device, but not on the server."""
    first, second = (ask(tested.client, "/generate", WATERMARKED) for _ in range(2))
    assert first == second


def test_a_client_leaves_a_stream(tested: LauncherHandle) -> None:
    before = tested.metrics()[DROPPED]
    parameters = {"max_new_tokens": 480, "ignore_eos_token": True}
    body = {"inputs": PROMPT, "parameters": parameters}
    with tested.client.stream("POST", "/generate_stream", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: tested.metrics()[DROPPED] == before + 1, 20, "it is counted as dropped")
    tested.assert_idle()


def test_what_it_says_of_itself(tested: LauncherHandle, device: str) -> None:
    info = tested.client.get("/info").json()
    assert (info["model_device_type"], info["attention_impl"]) == NAMES[device]
    assert info["model_dtype"] == "float32"
    assert info["max_input_tokens"] == MOST_PROMPT_TOKENS
    assert tested.client.get("/health").status_code == 200
    before = tested.metrics()
    tested.generate(PROMPT, max_new_tokens=7, ignore_eos_token=True)
    tested.assert_idle()
    grown = {name: value - before[name] for name, value in tested.metrics().items()}
    assert grown["tgi_request_count"] == grown["tgi_request_success"] == 1
    assert grown["tgi_request_generated_tokens_sum"] == 7
    assert grown['tgi_batch_inference_success{method="decode"}'] == 6
    assert 0 < grown['tgi_batch_forward_duration_sum{method="decode"}'] < 60
    assert before["tgi_kv_blocks_free"] == info["num_blocks"]


def assert_answers_everything(
    environment: dict[str, str], tiny_model_path: Path, *others: str
) -> None:
    """Other tokens than in float32, maybe: each answer has an ending, and its numbers."""
    flags = ("--device", "cuda", "--dtype", "bfloat16", *LIMIT, *others)
    with running(tiny_model_path, *flags, **environment) as handle:
        assert handle.client.get("/info").json()["model_dtype"] == "bfloat16"
        for path, body in (*QUESTIONS.values(), ("/generate", WATERMARKED)):
            assert ask(handle.client, path, body)
        prompts = ragged_prompts(tiny_model_path)
        streams = asyncio.run(serve_together(handle, prompts))
        assert all(events[-1]["details"]["finish_reason"] for events in streams.values())
        handle.assert_idle()


@pytest.mark.nightly
def test_bfloat16_answers_everything(environment: dict[str, str], tiny_model_path: Path) -> None:
    assert_answers_everything(environment, tiny_model_path)


@GPU
@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.skipif(not HAS_ALL_CACHES, reason="fp8_e4m3fn needs compute capability 8.9")
def test_a_cache_of_8_bits_answers_everything(name: str, tiny_model_path: Path) -> None:
    assert_answers_everything({}, tiny_model_path, "--kv-cache-dtype", name)


# What does not fit any device, and what is said of it.
NO_ROOM: dict[str, tuple[tuple[str, ...], str]] = {
    "cpu-total": (("--max-batch-total-tokens", "2000000000"), "--max-batch-total-tokens 2000"),
    "cuda-total": (("--max-batch-total-tokens", "2000000000"), "--max-batch-total-tokens 2000"),
    "cuda-prefill": (("--max-batch-prefill-tokens", "300000000"), "`--max-batch-prefill-tokens`"),
    "cuda-fraction": (("--cuda-memory-fraction", "0.0001"), "Not enough memory to handle"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=GPU if "cuda" in name else []) for name in NO_ROOM]
)
def test_what_does_not_fit_is_said_in_a_sentence(
    name: str, launch: Launch, tiny_model_path: Path
) -> None:
    flags, sentence = NO_ROOM[name]
    given = ("--device", name.partition("-")[0], "--dtype", "float32", *flags)
    handle = launch(tiny_model_path, *given)
    assert handle.wait_for_exit() == 1
    (error,) = [line for line in handle.log.splitlines() if " ERROR " in line]
    assert sentence in error
    assert "Traceback" not in handle.log
