"""The progress of a run: counters, a bar for terminals and notebooks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn


@dataclass(slots=True)
class Tally:
    """Counters of one run. Its event loop changes them; any thread may read them."""

    total: int
    """Requests, including those of an earlier run."""
    done: int = 0
    """Requests that have ended, including failed ones and those of an earlier run."""
    failed: int = 0
    tokens: int = 0
    """Generated in this run."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def rate(self) -> str:
        """The speed over the whole run, and how many requests have failed."""
        elapsed_s = max(time.perf_counter() - self.started, 1e-9)
        failed = f", {self.failed:,} failed" if self.failed else ""
        return f"{self.tokens / elapsed_s:,.0f} tokens/s{failed}"


@contextmanager
def bar(tally: Tally, file: TextIO) -> Iterator[Callable[[], None] | None]:
    """A bar during the block, drawn by a call of what is yielded; None outside of terminals and
    notebooks."""
    console = Console(file=file)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("requests", total=tally.total, completed=tally.done, rate="")

        def draw() -> None:
            progress.update(task, completed=tally.done, rate=tally.rate)

        try:
            yield draw
        finally:
            draw()
