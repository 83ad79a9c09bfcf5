"""The probes of a real server, from its start to its end."""

import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from text_generation_launcher.progress import TOLD

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, wait_until

PROBES = ("/livez", "/readyz", "/startupz")
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos_token": True}
READY = (200, 200, 200)
COMPILING = "shard 0: compiling the kernels for this processor (first start only)"


def codes(handle: LauncherHandle) -> tuple[int, ...]:
    """Of the three, in their order."""
    return tuple(handle.client.get(path).status_code for path in PROBES)


def test_a_start_is_told_in_phases(launch: Launch, tiny_model_path: Path, tmp_path: Path) -> None:
    """One connection, kept from the first answer on, sees the whole start. Kernels are compiled,
    which takes seconds."""
    handle = launch(tiny_model_path, NUMBA_CACHE_DIR=str(tmp_path))
    told: list[dict[str, Any]] = []
    refused: Counter[int] = Counter()

    def has_started() -> bool:
        with suppress(httpx.TransportError):
            answer = handle.client.get("/startupz")
            told.append(answer.json())
            if answer.status_code == 200:
                return True
            assert answer.status_code == 503
            # A moment later it may have started.
            assert handle.client.get("/livez").status_code == 200
            for path in ("/generate", "/v1/chat/completions", "/v1/messages"):
                refusal = handle.client.post(path, json={})
                refused[refusal.status_code] += 1
                if refusal.status_code == 503:
                    assert int(refusal.headers["retry-after"]) >= 1
                    assert "is starting" in refusal.text
            assert handle.client.get("/health").status_code in (200, 503)
        return False

    wait_until(has_started, 90, "it has started")
    assert refused[503] > 3
    phases = list(dict.fromkeys(one["phase"] for one in told))
    assert phases[0] == "loading the model" and phases[-1] == "serving", phases
    assert {one["state"] for one in told} == {"starting", "ready"}
    progress = [one["progress"] for one in told if "progress" in one]
    assert COMPILING in progress
    assert str(tiny_model_path) not in str(progress), "any client may read it"
    assert "progress" not in told[-1]
    # The other message that is told, which is too short to be seen here.
    assert all(f"text_generation_shard: {words}" in handle.log for words in TOLD)
    # A shard that is replaced tells the same, here without its kernels.
    for entry in tmp_path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    handle.child("text-generation-server").kill()
    wait_until(
        lambda: handle.client.get("/readyz").json().get("progress") == COMPILING, 30, "it compiles"
    )
    assert handle.client.get("/readyz").json()["state"] == "degraded"
    wait_until(lambda: codes(handle) == READY, 60, "it serves again")
    assert codes(handle) == READY
    assert handle.client.get("/health").content == b""
    handle.stop()


def test_the_end_is_told(launch: Launch, tiny_model_path: Path) -> None:
    handle = launch(tiny_model_path)
    handle.wait_until_ready()
    shard = handle.child("text-generation-server")
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(handle.stream, "the cat sat on ", **LONG)
        wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 1, 20, "it runs")
        shard.send_signal(signal.SIGSTOP)  # so that it goes on running
        try:
            handle.process.send_signal(signal.SIGTERM)
            wait_until(lambda: codes(handle) == (200, 503, 200), 5, "it drains")
            told = handle.client.get("/readyz").json()
            assert told["state"] == "draining"
            assert handle.client.get("/health").status_code == 503
        finally:
            shard.send_signal(signal.SIGCONT)
        assert len(stream.result(60)) == LONG["max_new_tokens"]
    assert handle.wait_for_exit() == 0


def test_no_probe_asks_the_shards(launch: Launch, tiny_model_path: Path) -> None:
    """Probes call no shard: they answer immediately while the shard is stopped."""
    handle = launch(tiny_model_path)
    handle.wait_until_ready()
    shard = handle.child("text-generation-server")
    shard.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert codes(handle) == READY
        assert time.monotonic() - began < 1
    finally:
        with suppress(psutil.NoSuchProcess):
            shard.send_signal(signal.SIGCONT)
    handle.assert_idle()
    handle.stop()
