"""Show the progress of runs: bars in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

#: Called with (epochs done, fraction of the current epoch, the newest metrics or None).
Progress = Callable[[int, float, "dict[str, Any] | None"], None]


@contextmanager
def progress_bar(console: Console, label: str, epochs: int) -> Iterator[Progress]:
    """Yield a progress callback for ``train``; the display ends with the context."""
    with progress_bars(console, [(label, epochs)]) as (report,):
        yield report


@contextmanager
def progress_bars(console: Console, runs: Sequence[tuple[str, int]]) -> Iterator[list[Progress]]:
    """Yield a callback for each of several runs (label, epochs) in one display; threads may call them."""
    if not console.is_terminal:
        yield [progress_lines(console, label, epochs) for label, epochs in runs]
        return
    with bars_on(console) as bars:
        yield [_bar(bars, bars.add_task(label, total=epochs, newest="")) for label, epochs in runs]


def bars_on(console: Console) -> Bars:
    """Return the display of bars, a context."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[newest]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    return Bars(*columns, console=console)


class Board:
    """The progress of many runs in one display: a bar for those that have ended and one for each that is trained."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console, self.runs = console, runs
        self.bars = bars_on(console) if console.is_terminal else None
        self.shown: dict[str, TaskID] = {}

    def __enter__(self) -> Board:
        if self.bars is not None:
            self.bars.start()
            self.all = self.bars.add_task("runs", total=self.runs, newest="")
        return self

    def __exit__(self, *error: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def begin(self, label: str, epochs: int) -> Progress:
        """Show a run; return its progress callback."""
        if self.bars is None:
            return progress_lines(self.console, label, epochs)
        self.shown[label] = self.bars.add_task(label, total=epochs, newest="")
        return _bar(self.bars, self.shown[label])

    def end(self, label: str) -> None:
        """Count a run as ended and remove its bar."""
        if self.bars is not None:
            self.bars.advance(self.all)
            if label in self.shown:
                self.bars.remove_task(self.shown.pop(label))


def _bar(bars: Bars, task: TaskID) -> Progress:
    """Return a callback that moves one bar by hundredths of an epoch: steps come too fast for a display."""
    shown = -1.0

    def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        nonlocal shown
        if (now := round(epoch + part, 2)) != shown:
            shown = now
            bars.update(task, completed=now)
        if row is not None:
            bars.update(task, newest=describe(row))

    return report


def progress_lines(console: Console, label: str, epochs: int) -> Progress:
    """Return a callback that prints a line about ten times in a run, for logs."""
    every = max(1, epochs // 10)

    def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        if row is not None and (epoch % every == 0 or epoch == epochs):
            line = f"{label}: epoch {epoch} of {epochs}: {describe(row)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return report


def describe(row: dict[str, Any]) -> str:
    """Return losses, accuracy and sparsity of one epoch's metrics as text."""
    loss = "" if row.get("val_loss") is None else f"  val {row['val_loss']:.3f}"
    top1 = "" if row["top1"] is None else f"  top-1 {row['top1']:.2f} %"
    return f"loss {row['train_loss']:.3f}{loss}{top1}  sparsity {row['sparsity']:.4f}"
