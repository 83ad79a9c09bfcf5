"""The progress of a run: counters, a bar for terminals and notebooks, a line for logs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclass(slots=True)
class Tally:
    """Counters of one run. Its event loop changes them; any thread may read them."""

    total: int
    """Requests, including those of an earlier run."""
    done: int = 0
    """Requests that have ended, including failed ones."""
    failed: int = 0
    tokens: int = 0
    """Generated in this run."""
    first: int = 0
    """Requests that ended in an earlier run."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run."""
        return self.tokens / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float | None:
        """The remaining time at the average speed; None before the first end."""
        done = self.done - self.first
        return None if done == 0 else self.elapsed_s / done * (self.total - self.done)

    def line(self) -> str:
        """The counters in one line."""
        parts = [f"{self.done:,} of {self.total:,} requests"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.left_s is not None and self.done < self.total:
            parts.append(f"{duration(self.left_s)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """`48 s`, `12 min 05 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class Bar:
    """A progress bar that shows a `Tally`; see `bar`."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def show(self, tally: Tally) -> None:
        """Draws the counters."""
        rate = f"{tally.tokens_per_s:,.0f} tokens/s"
        if tally.failed:
            rate += f", {tally.failed:,} failed"
        self._progress.update(self._task, completed=tally.done, rate=rate)


@contextmanager
def bar(tally: Tally, file: TextIO) -> Iterator[Bar | None]:
    """A bar during the block; None outside of terminals and notebooks."""
    console = Console(file=file)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        task = progress.add_task("requests", total=tally.total, completed=tally.first, rate="")
        drawn = Bar(progress, task)
        try:
            yield drawn
        finally:
            drawn.show(tally)
