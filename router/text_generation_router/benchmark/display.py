"""Shows the figures during a run: as a live table, or as a line for each row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from text_generation_router.benchmark.report import Figures, Spread

Row = TypeVar("Row")
Shown = TypeVar("Shown", contravariant=True)


@dataclass(frozen=True, slots=True)
class Layout(Generic[Row]):
    """The columns of the table and the cells of a row."""

    columns: Sequence[str]
    cells: Callable[[Row], list[str]]
    unit: str = "runs"
    refresh_per_second: float = 8


class Display(Protocol[Shown]):
    """Shows the figures of a run in progress."""

    def show(self, figures: Shown, runs_done: int, is_last: bool) -> None:
        """Called after each run, warm-ups included; `is_last`: the row is complete."""
        ...


class _Table(Generic[Row]):
    """A table of all rows and a progress bar, redrawn after each run."""

    def __init__(
        self, live: Live, all_figures: Sequence[Row], num_runs: int, layout: Layout[Row]
    ) -> None:
        self._live = live
        self._all_figures = all_figures
        self._layout = layout
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(layout.unit, total=num_runs)

    def show(self, figures: Row | None, runs_done: int, is_last: bool) -> None:
        self._progress.update(self._task, completed=runs_done)
        table = Table(*self._layout.columns)
        for one in self._all_figures:
            style = "bold" if one is figures else ""
            table.add_row(*self._layout.cells(one), style=style)
        self._live.update(Group(table, self._progress))


class _Lines(Generic[Row]):
    """A line for each complete row."""

    def __init__(self, console: Console, layout: Layout[Row]) -> None:
        self._console = console
        self._layout = layout

    def show(self, figures: Row, runs_done: int, is_last: bool) -> None:
        if is_last:
            parts = zip(self._layout.columns, self._layout.cells(figures), strict=True)
            self._console.print(", ".join(f"{name} {cell}" for name, cell in parts), soft_wrap=True)


@contextmanager
def display(
    console: Console, all_figures: Sequence[Row], num_runs: int, layout: Layout[Row]
) -> Iterator[Display[Row]]:
    """A live table on a terminal, else lines."""
    if not console.is_terminal:
        yield _Lines(console, layout)
        return
    # Transient, because the report follows.
    with Live(
        console=console, transient=True, refresh_per_second=layout.refresh_per_second
    ) as live:
        table = _Table(live, all_figures, num_runs, layout)
        table.show(None, 0, False)
        yield table


def _cells(figures: Figures) -> list[str]:
    """The cells of one batch: medians, empty before the first run."""
    cells = [str(figures.shape.batch_size), str(figures.shape.sequence_length)]
    for step in ("prefill", "decode_token"):
        for values in (figures.latencies_ms(step), figures.tokens_per_s(step)):
            cells.append(f"{Spread.of(values).p50:,.1f}" if values else "")
    return [*cells, str(len(figures.runs))]


_COLUMNS = "batch size,sequence length,prefill ms,prompt tokens/s,decode ms/step,tokens/s,runs"
BATCHES = Layout(_COLUMNS.split(","), _cells)
