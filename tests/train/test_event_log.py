"""--log tensorboard, with a stand-in for the package: what is written, when a run resumes too, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcil.cli import main
from dcil.train.event_log import event_log, numbers

ROW = {"epoch": 1, "phase": "train", "step": 23, "lr": 0.1, "top1": 90, "top1_super": None, "done": True}
ROW |= {"updates": [[16, 3, 40], [23, 5, 60]]}


class Writer:
    """Writes scalars as lines of JSON to a file that is named as TensorBoard names its own."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True, parents=True)
        free = next(i for i in range(99) if not (Path(folder) / f"events.out.tfevents.{i}").exists())
        self.file = (Path(folder) / f"events.out.tfevents.{free}").open("w")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.file.write(json.dumps([name, value, step]) + "\n")

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))


def events(folder: Path) -> list[list[Any]]:
    (file,) = (folder / "tensorboard").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_numbers_are_those_of_the_metrics() -> None:
    wanted = {"step": 23.0, "lr": 0.1, "top1": 90.0, "updates/revived": 8.0, "updates/dropped": 100.0}
    assert numbers(ROW) == wanted


def test_events_are_on_disk_after_every_epoch_and_progress_is_passed_on(tmp_path: Path) -> None:
    seen: list[tuple[int, float, Any]] = []
    with event_log(tmp_path, lambda *call: seen.append(call)) as report:
        report(0, 0.5, None)
        assert not (tmp_path / "tensorboard").exists()  # before the run has its folder for itself
        report(1, 0.0, ROW)
        assert ["lr", 0.1, 1] in events(tmp_path)
    assert seen == [(0, 0.5, None), (1, 0.0, ROW)]


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


def test_a_resumed_run_has_every_epoch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcil.train.trainer import Trainer

    out, epoch = tmp_path / "run", Trainer.epoch

    def stop(self: Trainer, number: int, *how: Any) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return epoch(self, number, *how)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "epoch", stop)
        patch.setattr("dcil.train.loop.SAVE_EVERY", 0.0)
        assert train(out) == 130
    assert {step for _, _, step in events(out)} == {1, 2}
    assert train(out, "--resume") == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    wanted = [[name, value, row["epoch"]] for row in rows for name, value in numbers(row).items()]
    assert events(out) == wanted and len(rows) == 3
    cost = json.loads((out / "summary.json").read_text())["cost"]
    assert 0 < cost["macs_kept"] < cost["macs"] and 0 < cost["bytes_kept"] < cost["bytes"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorboard", "tensorboard must be installed for this: pip install 'dcil[tensorboard]'"),
        ("tensorbord", "unknown log 'tensorbord': did you mean 'tensorboard'? allowed: tensorboard"),
    ],
)
def test_what_cannot_be_logged_is_refused_before_anything_is_written(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "--dataset", "digits", "--out", str(tmp_path / "run"), "--log", name]) == 2
    assert capsys.readouterr().err == f"dcil: {said}\n"
    assert not list(tmp_path.iterdir())
