"""What a person sees while runs are going: bars in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

#: Called with (epochs done, fraction of the current epoch, the newest metrics or None).
Progress = Callable[[int, float, "dict[str, Any] | None"], None]


@contextmanager
def showing(console: Console, label: str, epochs: int) -> Iterator[Progress]:
    """A progress callback for ``train`` that lives as long as the context."""
    with showing_many(console, [(label, epochs)]) as (report,):
        yield report


@contextmanager
def showing_many(console: Console, runs: Sequence[tuple[str, int]]) -> Iterator[list[Progress]]:
    """A callback for each of several runs (label, epochs) in one display; they may come from different threads."""
    if not console.is_terminal:
        yield [lines(console, label, epochs) for label, epochs in runs]
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bars(*columns, console=console) as bar:
        yield [moving(bar, bar.add_task(label, total=epochs, news="")) for label, epochs in runs]


def moving(bar: Bars, task: TaskID) -> Progress:
    """Moves one bar, by hundredths of an epoch: the steps come too fast for a display."""
    shown = -1.0

    def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        nonlocal shown
        if (now := round(epoch + part, 2)) != shown:
            shown = now
            bar.update(task, completed=now)
        if row is not None:
            bar.update(task, news=news(row))

    return report


def lines(console: Console, label: str, epochs: int) -> Progress:
    """For logs: a line about ten times in a run."""
    every = max(1, epochs // 10)

    def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        if row is not None and (epoch % every == 0 or epoch == epochs):
            console.print(f"{label}: epoch {epoch} of {epochs}: {news(row)}", highlight=False)

    return report


def news(row: dict[str, Any]) -> str:
    return f"loss {row['train_loss']:.3f}  top-1 {row['top1']:.2f} %  sparsity {row['sparsity']:.4f}"
