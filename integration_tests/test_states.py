"""Models with a state per row, through the real launcher: cached prefixes and lost shards change no
token."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration_tests.marks import at_night
from integration_tests.server import LauncherHandle, running, wait_until
from shard.tests.models.architectures import write_architecture

ROOT = Path(__file__).parents[1]
# What Python runs first in every process of the server; only a shard imports the registry.
FIRST = """
import sys

if any("text-generation-server" in part for part in sys.orig_argv):
    from shard.tests.running_hash import RunningHash
    from text_generation_shard import server

    load_model = server.load_model

    def load(*given):
        model, nbytes = load_model(*given)
        return RunningHash(model), nbytes

    server.load_model = load
"""
FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-input-tokens", "300", "--speculate", "3")
CRAMPED = (
    *("--max-total-tokens", "330", "--max-batch-total-tokens", "512"),
    *("--max-batch-prefill-tokens", "64"),
)
SYSTEM = "".join(chr(97 + 7 * n % 26) for n in range(100))
HIT = "tgi_prefix_cache_hit_tokens"


HYBRIDS = ["qwen3_5_text", "lfm2", "granitemoehybrid"]


@pytest.fixture(
    scope="module",
    params=["hash", HYBRIDS[0], *at_night(*HYBRIDS[1:])],
)
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LauncherHandle]:
    """Of a Llama with a state that shows every wrong token, and of hybrids."""
    environment, folder = {}, tmp_path_factory.mktemp("states")
    if request.param == "hash":
        path = checkpoint("llama3")
        (folder / "sitecustomize.py").write_text(FIRST)
        paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    else:
        path = write_architecture(request.param, folder)
    with running(path, *FLAGS, *CRAMPED, **environment) as handle:
        yield handle


# Nothing is taken from the cache.
ALL_COMPUTED = {"decoder_input_details": True}


def ask(server: LauncherHandle, prompt: str, **parameters: Any) -> list[int]:
    """The ids of an answer."""
    answer = server.generate(prompt, **{"max_new_tokens": 12, **parameters})
    return [token["id"] for token in answer["details"]["tokens"]]


def hits(server: LauncherHandle) -> float:
    return server.metrics()[HIT]


def test_a_prefix_is_used_up_to_a_snapshot(server: LauncherHandle) -> None:
    """The first that branches off stores what is common."""
    wanted = [ask(server, SYSTEM + end, **ALL_COMPUTED) for end in "abc"]
    before = hits(server)
    assert [ask(server, SYSTEM + end) for end in "abc"] == wanted
    again = hits(server)
    assert again - before >= 2 * 96
    for end in "abc":
        assert ask(server, SYSTEM + end) == wanted["abc".index(end)]
    assert hits(server) - again == 3 * 96


def test_it_says_what_it_can_not_do(server: LauncherHandle) -> None:
    features = server.client.get("/info").json()["features"]
    assert features["speculation"].startswith("off: this model keeps a state")
    assert features["prefix_caching"].startswith("on: behind one of ")
    assert server.log.count("--speculate 3 has no effect: this model keeps a state") == 1
    assert "memory: states" in server.log


def test_all_get_their_own_tokens_while_a_shard_is_lost(server: LauncherHandle) -> None:
    """Some are preempted, too: the cache has room for 512 tokens."""
    prompts = [SYSTEM + 5 * chr(97 + n) for n in range(6)]
    long = {"max_new_tokens": 200, "ignore_eos_token": True}
    wanted = [ask(server, prompt, **long, **ALL_COMPUTED) for prompt in prompts]
    said = "text_generation_launcher: Ready again after"
    before = server.metrics()["tgi_request_generated_tokens_count"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, server, prompt, **long) for prompt in prompts]
        wait_until(lambda: server.metrics()["tgi_batch_current_size"] > 1, 20, "some run")
        server.child("text-generation-server").kill()
        assert [each.result() for each in asked] == wanted
    assert server.metrics()["tgi_request_generated_tokens_count"] == before + len(prompts)
    assert server.log.count(said) == 1
    assert server.metrics()["tgi_request_preempted"] > 0
    server.assert_idle()
