"""Forked child processes that work through a list of jobs in parallel.

For jobs with lasting results: here, kernels in a cache. Children are forked, because they then
share all imported modules; importing takes longer than most jobs.
"""

import os
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType


class Children:
    """Owns the child processes. Each job is started once, in order.

    A child may be killed or hang; then its job is not done, and `wait` returns False. At the end of
    the block no child is left.
    """

    def __init__(self, jobs: Sequence[Callable[[], object]], count: int, patience_s: float) -> None:
        """At most 256 jobs for `count` processes. `wait` returns False if no job finishes within
        `patience_s`. Call it while no other thread of this process computes."""
        self._num_jobs, self._patience_s = len(jobs), patience_s
        self._done: set[int] = set()
        # Children read job numbers from one pipe, and write finished ones to another. That one
        # reaches its end when the last child exits, because only children hold its write end.
        todo, into_todo = os.pipe()
        self._reports, into_reports = os.pipe()
        os.write(into_todo, bytes(range(len(jobs))))
        os.close(into_todo)
        self._processes = []
        with suppress(OSError):
            # Too little memory or too many processes: fewer children do all jobs.
            for _ in range(count):
                self._processes.append(_fork(jobs, todo, into_reports))
        os.close(todo)
        os.close(into_reports)

    def __enter__(self) -> "Children":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            # If SIGCHLD is ignored, ended children are already reaped.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        self._processes.clear()
        os.close(self._reports)

    def wait(self) -> bool:
        """Wait until all jobs are done, or can no longer be; whether they are."""
        while len(self._done) < self._num_jobs:
            if not select.select([self._reports], [], [], self._patience_s)[0]:
                return False
            reports = os.read(self._reports, 256)
            if not reports:
                return False
            self._done.update(reports)
        return True


def _fork(jobs: Sequence[Callable[[], object]], todo: int, reports: int) -> int:
    with warnings.catch_warnings():
        # Python warns about forking with threads. See `Children`.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent, process = os.getpid(), os.fork()
    if process == 0:
        # Skip the parent's exit handlers in any case. An error is raised again when the parent does
        # the job.
        try:
            # End the child if the parent is killed.
            while os.getppid() == parent and (number := os.read(todo, 1)):
                jobs[number[0]]()
                os.write(reports, number)
        finally:
            os._exit(0)
    return process
