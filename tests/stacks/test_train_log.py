"""dcil train --log tensorboard, against the real package: its events are the numbers of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dcil.cli import main
from dcil.train.event_log import numbers
from dcil.train.trainer import Trainer


def train(out: Path, *more: str) -> int:
    words = [
        "train",
        "--dataset",
        "digits",
        "--device",
        "cpu",
        "--epochs",
        "3",
        "--batch",
        "512",
        "--log",
        "tensorboard",
    ]
    return main([*words, "--out", str(out), *more])


def test_events_are_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, epoch = tmp_path / "run", Trainer.epoch

    def stop(self: Trainer, number: int, *how: Any) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return epoch(self, number, *how)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "epoch", stop)
        patch.setattr("dcil.train.loop.SAVE_EVERY", 0.0)
        assert train(out) == 130
    assert train(out, "--resume") == 0
    found = EventAccumulator(str(out / "tensorboard")).Reload()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert set(found.Tags()["scalars"]) == set(numbers(rows[0]))
    for name in numbers(rows[0]):
        logged = [(event.step, event.value) for event in found.Scalars(name)]
        assert logged == [(row["epoch"], pytest.approx(numbers(row)[name], rel=1e-6)) for row in rows]
