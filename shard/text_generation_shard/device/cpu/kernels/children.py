"""Short-lived copies of this process that work off a list of jobs, one core each.

For what lasts beyond a process: here, kernels in a cache. Copies, because they begin with all that
is imported, which takes longer than most jobs.
"""

import os
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType


class Children:
    """Owns the processes that do the jobs, each of them once, in order.

    Promises nothing but what `wait` says: a child may be killed or hang, and its job is left to
    whoever needs it done. At the end of the block no child is left.
    """

    def __init__(self, jobs: Sequence[Callable[[], object]], count: int, patience_s: float) -> None:
        """At most 256 jobs for `count` processes. If none of them finishes a job in `patience_s`,
        all are given up. Call it while no other thread of this process computes."""
        self._num_jobs, self._patience_s = len(jobs), patience_s
        self._done: set[int] = set()
        # Children take the numbers of their jobs from a pipe and put them into another one. Its end
        # is that of the last child, since nobody else holds it open.
        todo, into_todo = os.pipe()
        self._reports, into_reports = os.pipe()
        os.write(into_todo, bytes(range(len(jobs))))
        os.close(into_todo)
        self._processes = []
        with suppress(OSError):
            # No memory or no process left: those that were started do more.
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
            # Where SIGCHLD is ignored, those that have ended are gone already.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        self._processes.clear()
        os.close(self._reports)

    def wait(self) -> bool:
        """Until all is done, which it says, or will not be."""
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
        # Python warns of locks that other threads hold at this moment. See `Children`.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent, process = os.getpid(), os.fork()
    if process == 0:
        # Whatever happens, nothing of what the parent would do at its end is done here. What fails
        # says so when the parent does it.
        try:
            # Nobody else would end it if the parent is killed.
            while os.getppid() == parent and (number := os.read(todo, 1)):
                jobs[number[0]]()
                os.write(reports, number)
        finally:
            os._exit(0)
    return process
