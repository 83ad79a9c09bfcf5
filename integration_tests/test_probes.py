"""The probes of a real server that starts, and of one whose shard is stopped."""

import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numba
import pytest
from text_generation_launcher.router_link import TOLD
from text_generation_shard.device.cpu.kernels.cache import choose_directory

from integration_tests.conftest import Launch
from integration_tests.server import LauncherHandle, wait_until

PROBES = ("/livez", "/readyz", "/startupz")
READY = (200, 200, 200)
COMPILING = "shard 0: compiling the kernels for this processor (first start only)"


def codes(handle: LauncherHandle) -> tuple[int, ...]:
    """Of the three, in their order."""
    return tuple(handle.client.get(path).status_code for path in PROBES)


def copy_kernels(folder: Path) -> None:
    """The compiled kernels of this machine, which look as if not all were compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR", ""))
        choose_directory()
        compiled = Path(numba.config.CACHE_DIR)
    unfinished = shutil.ignore_patterns("filled-*", "lock")
    shutil.copytree(compiled, folder / compiled.name, ignore=unfinished)


def test_a_start_is_told_in_phases(
    server: LauncherHandle, launch: Launch, tiny_model_path: Path, tmp_path: Path
) -> None:
    """One connection, kept from the first answer on, sees the whole start. `server` has compiled
    the kernels."""
    copy_kernels(tmp_path)
    handle = launch(tiny_model_path, "--dtype", "float32", NUMBA_CACHE_DIR=str(tmp_path))
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
    assert codes(handle) == READY
    assert handle.client.get("/health").content == b""
    handle.stop()


def test_no_probe_asks_the_shards(server: LauncherHandle) -> None:
    """Probes call no shard: they answer immediately while the shard is stopped."""
    shard = server.child("text-generation-server")
    shard.suspend()
    try:
        began = time.monotonic()
        assert codes(server) == READY
        assert time.monotonic() - began < 1
    finally:
        shard.resume()
