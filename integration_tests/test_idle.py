"""A server without requests uses almost no processor time."""

import time

import psutil

from integration_tests.server import LauncherHandle

# Measured: 0.25 % of a core before the first request and after. It is processor time, so that what
# else runs on these cores does not count.
MAX_SHARE = 0.01
WATCHED_S = 5.0


def test_launcher_shard_and_router_are_idle(server: LauncherHandle) -> None:
    server.generate("x", max_new_tokens=8)
    # The aftermath of a request (garbage, threads that spin briefly) does not count.
    time.sleep(1.0)
    processes = [psutil.Process(server.process.pid), *server.family()]
    # Launcher, router, shard, what renders chats and what tries grammars (which keeps some).
    assert len(processes) >= 5

    def used() -> float:
        times = [process.cpu_times() for process in processes]
        return sum(time.user + time.system for time in times)

    before, start = used(), time.monotonic()
    time.sleep(WATCHED_S)
    share = (used() - before) / (time.monotonic() - start)
    print(f"idle: {share:.2%} of a core")
    assert share < MAX_SHARE
