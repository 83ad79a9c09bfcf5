"""Random bodies, heads and grammars: no 5xx, no gap, no growth.

800 cases with a fixed seed, or 2,000 at night. `FUZZ_SECONDS=3600` continues for an hour with other
cases, round after round; `FUZZ_SEED=5` sets the first seed. A failure names its seed, and with
`FUZZ_SHRINK=1` the smallest case that fails in the same way.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from integration_tests.hostile.contained import contained, family_bytes
from integration_tests.hostile.neighbours import neighbours
from integration_tests.hostile.strategies import Body, Message, bodies, grammars, heads
from integration_tests.server import LauncherHandle

pytestmark = pytest.mark.timed

NUM_CASES = {"bodies": 1250, "heads": 600, "grammars": 150}
FEW = 0.4
"""The share of them that is tried unless the profile of hypothesis is `nightly`."""
GROWTH_BYTES = 300_000_000
"""The allowed growth of the processes from the first cases to the end of a round: caches that fill
once, and memory that allocators keep."""
ANSWER_S = 30.0
PAYLOAD_LIMIT = 2_000_000
# A request is answered within this time after the client's half-close.
CLOSE_S = 15.0
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "17"))
SHRINKS = os.environ.get("FUZZ_SHRINK", "") == "1"
_STATUS = re.compile(rb"\AHTTP/1\.[01] (\d{3}) ")
# A grammar that has no continuation or becomes too large during generation: the request's own
# error, a 424 in TGI and a 500 in OpenAI's routes.
_OWN_FAILURE = b"Request failed during generation: "
_BUGS = (b"internal error", b"Server error", b"The server failed on this request", b"Traceback")


@pytest.fixture(scope="module")
def server() -> Iterator[LauncherHandle]:
    """A server whose answers are short even without limits in the request."""
    with contained(None, "--max-total-tokens", "600", "--max-input-tokens", "500") as handle:
        yield handle
        handle.assert_idle()


def exchange(port: int, message: bytes, timeout_s: float, is_whole: bool) -> bytes:
    """The answer until the connection closes. Not `is_whole`: the client half-closes the connection
    before the request is complete."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        answer = b""
        try:
            connection.sendall(message)
            if not is_whole:
                connection.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + timeout_s
            while data := connection.recv(1 << 16):
                answer += data
                assert time.monotonic() < deadline, f"no end after {timeout_s} s"
        except (ConnectionResetError, BrokenPipeError):
            pass  # refused before all of it was read
        return answer


def check(answer: bytes, message: bytes, is_grammar: bool) -> None:
    """Asserts that the answer shows no bug."""
    match = _STATUS.match(answer)
    assert match is not None, answer[:200]
    status = int(match[1])
    if is_grammar and status in (424, 500):
        assert _OWN_FAILURE in answer, answer[:500]
    elif status == 503:
        assert b"retry-after" in answer.lower(), answer[:500]
    else:
        assert status < 500 and status != 424, answer[:500]
    assert not any(bug in answer and bug not in message for bug in _BUGS), answer[:500]


class Fuzzer:
    """Sends cases to one server."""

    def __init__(self, handle: LauncherHandle) -> None:
        self._handle = handle

    def body(self, case: Body) -> None:
        """Every body gets an answer."""
        answer = exchange(self._handle.port, case.message, ANSWER_S, is_whole=True)
        if not answer and len(case.data) > PAYLOAD_LIMIT:
            return  # a client that keeps sending may lose the answer, a 413
        check(answer, case.message, b"grammar" in case.data or b"format" in case.data)

    def grammar(self, case: Body) -> None:
        """Every grammar gets an answer."""
        check(exchange(self._handle.port, case.message, ANSWER_S, True), case.message, True)

    def head(self, case: Message) -> None:
        """Every head gets an answer, or the connection is closed."""
        answer = exchange(self._handle.port, case.data, CLOSE_S, is_whole=False)
        if answer:
            check(answer, case.data, is_grammar=False)

    def round(self, seed: int) -> None:
        """All cases of one seed, or the first of them."""
        share = FEW if settings().max_examples < max(NUM_CASES.values()) else 1
        kinds: dict[str, tuple[Any, Callable[..., None]]] = {
            "bodies": (bodies(), self.body),
            "heads": (heads(), self.head),
            "grammars": (grammars(), self.grammar),
        }
        for name, (strategy, send) in kinds.items():
            with neighbours(self._handle) as seen:
                self.run(strategy, send, int(share * NUM_CASES[name]), seed)
            print(seen)
            seen.assert_unharmed()

    def run(self, strategy: Any, send: Callable[..., None], count: int, seed: int) -> None:
        """`count` cases of one kind."""
        phases = (Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,)
        began = time.monotonic()
        slowest: list[tuple[float, Message]] = []

        @hypothesis.seed(seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )
        @given(strategy)
        def cases(case: Any) -> None:
            assert self._handle.process.poll() is None, "the server is gone"
            start = time.monotonic()
            send(case)
            slowest.append((time.monotonic() - start, case))
            slowest.sort(key=lambda item: -item[0])
            del slowest[3:]

        cases()
        print(f"{count} {send.__name__} cases of seed {seed}: {time.monotonic() - began:.1f} s")
        for duration, case in slowest:
            print(f"  {duration:.2f} s: {case!r}"[:400])


def test_nothing_that_is_sent_hurts(server: LauncherHandle) -> None:
    fuzzer, began, seed = Fuzzer(server), time.monotonic(), SEED
    fuzzer.run(bodies(), fuzzer.body, 30, 1)
    server.generate("Write it: ", max_new_tokens=9, grammar={"type": "regex", "value": "[a-z]{3}"})
    before = family_bytes(server)
    while True:
        print(f"FUZZ_SEED={seed}")
        fuzzer.round(seed)
        grown = family_bytes(server) - before
        print(f"{grown / 1e6:.0f} MB more")
        assert grown < GROWTH_BYTES
        failures = server.metrics()
        assert not any(
            value for name, value in failures.items() if name.startswith("tgi_batch_inference_fail")
        )
        assert "Traceback" not in server.log
        server.assert_idle()
        seed += 1
        if time.monotonic() - began >= SECONDS:
            break
