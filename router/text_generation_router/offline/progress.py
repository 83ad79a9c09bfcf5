"""The progress of a run: counters, a bar for terminals and notebooks."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, RenderableType
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


class _Bar(Progress):
    """Shows a tally whenever its own thread draws."""

    def __init__(self, tally: Tally, console: Console) -> None:
        self._tally = tally
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        rate = TextColumn("{task.fields[tally].rate}")
        is_drawn = console.is_terminal or console.is_jupyter
        super().__init__(*columns, rate, console=console, disable=not is_drawn)
        self.add_task("requests", total=tally.total, tally=tally)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar with the present counts."""
        for task in self.task_ids:
            self.update(task, completed=self._tally.done)
        return super().get_renderables()


@contextmanager
def bar(tally: Tally, file: TextIO) -> Iterator[bool]:
    """A bar during the block, on terminals and in notebooks; yields whether there is one."""
    with _Bar(tally, Console(file=file)) as progress:
        yield not progress.disable
