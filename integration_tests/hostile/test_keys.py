"""Keys: isolation between keys, access, and the limits of each key."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration_tests.hostile.contained import contained
from integration_tests.hostile.neighbours import neighbours
from integration_tests.server import LauncherHandle, wait_until

SECRET = "The password of the vault is swordfish, and nobody but the two of us must ever know it. "
WRONG = "The password of the vault is aardvark, and nobody but the two of us must ever know it. "
# A key that is removed from the file is refused after this time; the machine may be slow.
CUT_OFF_S = 1.0
BUSY_S = 4.0


@pytest.fixture(scope="module")
def server() -> Iterator[LauncherHandle]:
    with contained(None, API_KEY="alice,bob") as handle:
        yield handle


def ask(handle: LauncherHandle, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return handle.client.post(path, json=body, headers=headers, timeout=60)


def cached_tokens(handle: LauncherHandle, key: str, prompt: str, **more: Any) -> int:
    """The usage of the prompt in OpenAI's route."""
    body = {"model": "tgi", "prompt": prompt, "max_tokens": 1, **more}
    response = ask(handle, key, "/v1/completions", body)
    assert response.status_code == 200, response.text
    told = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(told, int)
    return told


def status(handle: LauncherHandle, key: str, path: str = "/info") -> int:
    """The status of the answer; an empty key sends none."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return handle.client.get(path, headers=headers).status_code


def test_a_guess_of_anothers_prompt_tells_nothing(server: LauncherHandle) -> None:
    assert cached_tokens(server, "alice", SECRET) == 0
    own = cached_tokens(server, "alice", SECRET)
    assert own >= 16
    assert cached_tokens(server, "bob", WRONG) == 0
    assert cached_tokens(server, "bob", SECRET) == 0, "right and wrong guesses look alike"
    assert cached_tokens(server, "bob", SECRET) == own, "each has what it asked itself"


def test_a_salt_keeps_two_users_of_one_key_apart(server: LauncherHandle) -> None:
    prompt = f"Salted. {SECRET}"
    assert cached_tokens(server, "alice", prompt, cache_salt="user 1") == 0
    own = cached_tokens(server, "alice", prompt, cache_salt="user 1")
    assert own >= 16
    for salt in ({"cache_salt": "user 2"}, {"cache_salt": "user"}, {}):
        assert cached_tokens(server, "alice", prompt, **salt) == 0
    assert cached_tokens(server, "bob", prompt, cache_salt="user 1") == 0
    messages = [{"role": "user", "content": SECRET}]
    told = [
        ask(
            server,
            "alice",
            "/v1/chat/completions",
            {"model": "tgi", "messages": messages, "max_tokens": 1, "cache_salt": salt},
        ).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("x", "y", "x")
    ]
    assert told[:2] == [0, 0] and told[2] >= 16


def test_sequences_of_a_salted_prompt_are_computed_once(server: LauncherHandle) -> None:
    before = server.metrics()["tgi_prefix_cache_hit_tokens"]
    body = {"model": "tgi", "prompt": f"Thrice. {SECRET}", "max_tokens": 1}
    response = ask(server, "bob", "/v1/completions", body | {"n": 3, "cache_salt": "x"})
    assert response.status_code == 200
    assert server.metrics()["tgi_prefix_cache_hit_tokens"] >= before + 2 * 16


def test_docs_ask_for_the_key(server: LauncherHandle) -> None:
    for path in ("/docs", "/docs/", "/api-doc/openapi.json", "/static-offline-docs/favicon.png"):
        response = server.client.get(path)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert status(server, "wrong", path) == 401
        assert status(server, "alice", path) in (200, 307)
    for path in ("/", "/health", "/ping", "/metrics"):
        assert server.client.get(path).status_code == 200


@pytest.mark.timed
def test_a_thousand_wrong_keys_leave_nothing_in_the_log(server: LauncherHandle) -> None:
    # Earlier errors of other clients are in the log by now.
    assert status(server, "wrong") == 401
    lines, before = len(server.log.splitlines()), server.metrics()["tgi_request_unauthorized"]
    keys = ["x" * (1 + number % 3000) for number in range(1000)]
    with neighbours(server, "alice") as seen, ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda key: status(server, key), keys)) == {401}
    seen.assert_unharmed()
    assert server.metrics()["tgi_request_unauthorized"] == before + 1000
    fresh = server.log.splitlines()[lines:]
    assert not [line for line in fresh if "xxx" in line or "key" in line.lower()]


def test_keys_are_nowhere_to_be_seen(server: LauncherHandle) -> None:
    assert "alice" not in server.log and "bob" not in server.log
    for process in server.family():
        assert not any("alice" in part for part in process.cmdline())


def swap(link: Path, content: str) -> None:
    """Puts a link to a new file in its place, in one step, as Kubernetes does."""
    target = link.with_name(f"keys-{time.monotonic_ns()}")
    target.write_text(content)
    target.chmod(0o600)
    fresh = link.with_name("fresh")
    fresh.symlink_to(target.name)
    os.replace(fresh, link)


@pytest.mark.timed
def test_the_key_file_is_read_again(tmp_path: Path) -> None:
    link = tmp_path / "keys"
    swap(link, "# the first\nalice\n\n")
    with contained(None, "--api-key-file", str(link), "--public-docs", API_KEY="given") as handle:
        assert [status(handle, key) for key in ("alice", "given", "bob", "")] == [
            200,
            200,
            401,
            401,
        ]
        assert handle.client.get("/docs").status_code == 200
        assert cached_tokens(handle, "alice", SECRET) == cached_tokens(handle, "given", SECRET) == 0
        swap(link, "bob\n")
        began = time.monotonic()
        wait_until(lambda: status(handle, "alice") == 401, BUSY_S, "alice is cut off")
        assert time.monotonic() - began < CUT_OFF_S
        assert [status(handle, key) for key in ("given", "bob")] == [200, 200]
        # Changed in place; an invalid file changes nothing.
        link.resolve().write_text("carol\n")
        wait_until(lambda: status(handle, "carol") == 200, BUSY_S, "carol is let in")
        assert status(handle, "bob") == 401
        for breaks in (lambda: link.resolve().write_text("# none\n"), link.unlink):
            breaks()
            until = time.monotonic() + CUT_OFF_S
            while time.monotonic() < until:
                assert [status(handle, key) for key in ("carol", "")] == [200, 401]
        wait_until(lambda: "No such file or directory" in handle.log, BUSY_S, "a line in the log")
        complaints = [line for line in handle.log.splitlines() if "read before stay valid" in line]
        assert len(complaints) == 2
        swap(link, "dave\n")
        wait_until(lambda: status(handle, "dave") == 200, BUSY_S, "dave is let in")
        assert status(handle, "carol") == 401
        assert not any(name in handle.log for name in ("alice", "bob", "carol", "dave"))


@pytest.mark.parametrize(
    ("content", "said"), [(None, "can not be read: No such file"), ("# none\n", "holds no key")]
)
def test_a_key_file_that_can_not_be_used_at_the_start(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    handle = LauncherHandle(None, "--api-key-file", str(file))
    try:
        assert handle.wait_for_exit() == 1
        assert f"--api-key-file {file} {said}" in handle.log
        assert "Traceback" not in handle.log
    finally:
        handle.kill()


@pytest.mark.timed
def test_limits_of_a_key_hurt_nobody_else() -> None:
    flags = ("--max-concurrent-requests-per-key", "2", "--max-tokens-per-minute-per-key", "300")
    long = {"inputs": "x", "parameters": {"max_new_tokens": 200, "ignore_eos_token": True}}
    short = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
    with contained(None, *flags, API_KEY="alice,bob") as handle, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(ask, handle, "alice", "/generate", long) for _ in range(2)]
        wait_until(lambda: handle.metrics()["tgi_batch_current_size"] == 2, 20, "two run")
        refused = ask(handle, "alice", "/generate", short)
        assert refused.status_code == 429 and refused.json()["error_type"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(handle, "bob", "/generate", short).status_code == 200
        assert {one.result().status_code for one in held} == {200}
        # That was more than 400, and about 5 per second have been refilled since.
        body = {"model": "tgi", "prompt": "x", "max_tokens": 1}
        response = ask(handle, "alice", "/v1/completions", body)
        assert response.status_code == 429
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        wait_s = int(response.headers["retry-after"])
        assert 1 <= wait_s <= 60
        assert ask(handle, "bob", "/generate", short).status_code == 200
        reasons = [f'tgi_request_key_limit{{reason="{name}"}}' for name in ("requests", "tokens")]
        assert [handle.metrics()[name] >= 1 for name in reasons] == [True, True]
        deadline = time.monotonic() + wait_s
        wait_until(
            lambda: ask(handle, "alice", "/v1/completions", body).status_code == 200,
            wait_s + BUSY_S,
            "it is let in again",
        )
        assert time.monotonic() < deadline + BUSY_S
