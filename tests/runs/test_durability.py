"""What is on disk after a kill or a power cut: synchronised before it has its name, in an order that can be resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcil.errors import UserError
from dcil.runs.atomic import write_text
from dcil.runs.folder import RunFolder
from dcil.train import Config, train

CONFIG = Config(epochs=3, target_epoch=2, batch=480, milestones=(2,), sparsity=0.8)


@pytest.fixture
def events(monkeypatch):
    """The names of calls that matter, in order; a synchronised file with its name."""
    seen: list[str] = []

    def watch(place, name, shown):
        real = getattr(place, name)

        def watched(*args, **kwargs):
            seen.append(shown(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, watched)

    watch(os, "fsync", lambda file: f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
    watch(os, "replace", lambda draft, path: f"replace {Path(draft).name} {Path(path).name}")
    watch(RunFolder, "append", lambda folder, row: f"append {row['epoch']}")
    watch(RunFolder, "save", lambda *args: "save")
    return seen


def trained(path: Path, until: int = 10**9) -> RunFolder:
    train(CONFIG, RunFolder(path), path, torch.device("cpu"), until=until)
    return RunFolder(path)


def figures(run: RunFolder) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.metrics()]


def test_a_file_is_synchronised_before_it_gets_its_name_and_then_the_name(tmp_path, events):
    write_text(tmp_path / "file", "text")
    (renamed,) = [event for event in events if event.startswith("replace")]
    draft, name = renamed.split()[1:]
    assert name == "file" and f"fsync {draft}" in events[: events.index(renamed)]
    assert f"fsync {tmp_path.name}" in events[events.index(renamed) :]  # so that the name is on disk too


def test_a_file_is_replaced_and_never_written_into(tmp_path):
    file = tmp_path / "file"
    write_text(file, "old")
    os.link(file, tmp_path / "as a reader has it open")
    write_text(file, "new")
    assert (tmp_path / "as a reader has it open").read_text() == "old" and file.read_text() == "new"


def test_metrics_are_synchronised(tmp_path, events):
    RunFolder(tmp_path).append({"epoch": 1})
    assert events[:2] == ["append 1", "fsync metrics.jsonl"]


def test_only_one_is_inside_the_lock(tmp_path):
    with RunFolder(tmp_path).locked(), pytest.raises(UserError, match="one process"), RunFolder(tmp_path).locked():
        raise AssertionError("both are inside")
    with RunFolder(tmp_path).locked():
        pass


def test_metrics_of_an_epoch_are_there_before_its_checkpoint(tmp_path, events, monkeypatch):
    monkeypatch.setattr("dcil.train.loop.SAVE_EVERY", 0.0)
    trained(tmp_path / "run", until=2)
    order = [event for event in events if event.startswith(("append", "save"))]
    assert order == ["append 1", "save", "append 2", "save"]


def test_a_resumed_run_is_the_same_run(tmp_path):
    whole, halves = trained(tmp_path / "whole"), trained(tmp_path / "halves", until=2)
    halves.append({**halves.metrics()[-1], "epoch": 3})  # killed after the metrics and before the checkpoint
    trained(tmp_path / "halves")
    assert figures(whole) == figures(halves)
    for name in ("model.safetensors", "checkpoint.safetensors"):
        want, found = (load_file(run.path / name) for run in (whole, halves))
        assert want.keys() == found.keys() and all(torch.equal(want[key], found[key]) for key in want)
