"""What a person sees while a run is going: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dcil.train.loop import Progress as Report


@contextmanager
def showing(console: Console, label: str, epochs: int) -> Iterator[Report]:
    """A progress callback for ``train`` that lives as long as the context."""
    if not console.is_terminal:
        yield lines(console, label, epochs)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=epochs, news="")

        def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
            bar.update(task, completed=round(epoch + part, 2))
            if row is not None:
                bar.update(task, news=news(row))

        yield report


def lines(console: Console, label: str, epochs: int) -> Report:
    """For logs: a line about ten times in a run."""
    every = max(1, epochs // 10)

    def report(epoch: int, part: float, row: dict[str, Any] | None) -> None:
        if row is not None and (epoch % every == 0 or epoch == epochs):
            console.print(f"{label}: epoch {epoch} of {epochs}: {news(row)}", highlight=False)

    return report


def news(row: dict[str, Any]) -> str:
    return f"loss {row['train_loss']:.3f}  top-1 {row['top1']:.2f} %  sparsity {row['sparsity']:.4f}"
