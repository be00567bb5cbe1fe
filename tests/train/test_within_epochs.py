"""Checkpoints within epochs: a run that goes on from any batch is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_optimization import SMALL, write_text
from test_train import dcil, metrics, same_result

from dcil import METHODS, Weight, data
from dcil.cli import main
from dcil.engine import Diverged, EngineSettings
from dcil.errors import UserError
from dcil.reproduce.probe import MaskProbe
from dcil.runs.position import START, Position
from dcil.runs.read import read_run
from dcil.train import Config, RunFolder, Trainer, train
from dcil.train.restore import load_net

CPU = torch.device("cpu")
DATA = Path("data")
#: Six steps in an epoch, mask updates within epochs and not at their ends.
SHORT = Config(epochs=2, target_epoch=2, milestones=(1,), batch=256)
#: Methods of different kinds: views, drop and grow, trained buffers.
QUICK = ("dcil", "rigl", "autoprune")
ALWAYS = 1e-9  # minutes: a checkpoint after every batch


class Stop(Exception):
    pass


def stopping(*places: tuple[int, int]) -> Callable[..., None]:
    """Progress that stops a run after the batches at ``places`` (epoch, batch), and says which batches there were."""
    left, steps = list(places), 6

    def progress(epoch, part, row):
        if row is None and (epoch, round(part * steps)) == (left or [None])[0]:
            raise Stop(left.pop(0))

    return progress


def broken(config: Config, folder: RunFolder, *places: tuple[int, int], data_dir: Path = DATA, **options) -> None:
    """Train a run that is stopped at each of the places, beginning with its last checkpoint every time."""
    progress = stopping(*places)
    for _ in places:
        with pytest.raises(Stop):
            train(config, folder, data_dir, CPU, progress, checkpoint_minutes=ALWAYS, **options)
        assert folder.summary() is None
    train(config, folder, data_dir, CPU, progress, checkpoint_minutes=ALWAYS, **options)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_resumed_within_epochs_the_run_is_the_same(tmp_path, method):
    settings = {"every": 2} if "every" in METHODS[method].__dataclass_fields__ else {}
    granularity = "weight" if Weight in METHODS[method].granularities else "filter"
    config = replace(SHORT, method=method, granularity=granularity, settings=settings, sparsity=0.5)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    train(config, whole, DATA, CPU)
    broken(config, parts, (0, 2), (0, 4), (1, 6))
    same_result(whole.path, parts.path)
    assert not [row for row in metrics(parts.path) if row["step"] != 6 * row["epoch"]]


def test_the_recorded_step_goes_on_within_an_epoch(tmp_path):
    graph = {"settings": EngineSettings(engine="graph", executor="plain")}
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    train(SHORT, whole, DATA, CPU, **graph)
    broken(SHORT, parts, (0, 3), (1, 5), **graph)
    same_result(whole.path, parts.path)


def test_dropout_moments_and_sequences_go_on_within_an_epoch(tmp_path):
    config = replace(SMALL, epochs=2, target_epoch=2, dropout=0.2)
    text = write_text(tmp_path)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    train(config, whole, text, CPU)
    steps = metrics(whole.path)[0]["step"]

    def progress(epoch, part, row):
        if row is None and epoch == 1 and round(part * steps) == steps - 1:
            raise Stop

    with pytest.raises(Stop):
        train(config, parts, text, CPU, progress, checkpoint_minutes=ALWAYS)
    assert json.loads((parts.path / "checkpoint.json").read_text())["batch"] == str(steps - 2)
    train(config, parts, text, CPU)
    same_result(whole.path, parts.path)


def stopped(folder: Path, place: tuple[int, int] = (1, 4), **options) -> RunFolder:
    with pytest.raises(Stop):
        train(SHORT, RunFolder(folder), DATA, CPU, stopping(place), checkpoint_minutes=ALWAYS, **options)
    return RunFolder(folder)


def test_the_checkpoint_says_where_it_is(tmp_path):
    folder = stopped(tmp_path / "run")
    shown = json.loads((folder.path / "checkpoint.json").read_text())
    assert (shown["format"], shown["epoch"], shown["batch"], shown["step"]) == ("dcil checkpoint 3", "1", "3", "9")
    with safe_open(folder.path / "checkpoint.safetensors", "pt") as opened:
        position = Position.from_notes(opened.metadata())
    assert (position.epoch, position.batch, position.sums[2]) == (1, 3, 3 * 256)
    assert 0 < position.seconds < 60
    run = read_run(folder.path)
    assert (run.status, len(run.epochs)) == ("unfinished: epoch 1 of 2", 1)
    assert load_net(folder).steps_done == 9
    # At the end of an epoch it is what earlier versions read.
    train(SHORT, folder, DATA, CPU)
    shown = json.loads((folder.path / "checkpoint.json").read_text())
    assert (shown["format"], shown["epoch"], shown.get("batch")) == ("dcil checkpoint 2", "2", None)


def test_seconds_within_an_epoch_are_those_of_all_its_parts(tmp_path):
    folder = stopped(tmp_path / "run")
    with safe_open(folder.path / "checkpoint.safetensors", "pt") as opened:
        before = Position.from_notes(opened.metadata()).seconds
    time.sleep(0.5)
    begun = time.perf_counter()
    train(SHORT, folder, DATA, CPU)
    second = folder.metrics()[1]["seconds"]
    assert before < second < before + time.perf_counter() - begun


def test_without_minutes_there_are_none_within_epochs(tmp_path):
    with pytest.raises(Stop):
        train(SHORT, RunFolder(tmp_path / "run"), DATA, CPU, stopping((0, 5)))
    assert not RunFolder(tmp_path / "run").has_checkpoint


def test_minutes_are_minutes(tmp_path, monkeypatch):
    """With a clock that advances a minute per batch, every third batch has a checkpoint."""
    now = [0.0]
    monkeypatch.setattr("dcil.train.loop.time.monotonic", lambda: now[0])
    saved: list[tuple[int, int]] = []
    monkeypatch.setattr(RunFolder, "save", lambda self, *state: saved.append((state[-1].epoch, state[-1].batch)))

    def progress(epoch, part, row):
        now[0] += 60 * (row is None)

    train(SHORT, RunFolder(tmp_path / "run"), DATA, CPU, progress, checkpoint_minutes=3)
    assert saved == [(0, 3), (1, 0), (1, 3), (2, 0)]


def test_a_run_that_fails_in_its_first_epoch_keeps_its_checkpoint(tmp_path):
    def progress(epoch, part, row):
        if part > 0.5:
            raise Diverged("the loss must be finite")

    for minutes, left in ((0.0, False), (ALWAYS, True)):
        folder = RunFolder(tmp_path / str(left))
        with pytest.raises(Diverged):
            train(SHORT, folder, DATA, CPU, progress, checkpoint_minutes=minutes)
        assert folder.started == folder.has_checkpoint == folder.path.exists() == left
    train(SHORT, folder, DATA, CPU)


@pytest.mark.parametrize(
    ("step", "position"),
    [
        (9, Position(1, 2)),
        (8, Position(1, 3)),
        (12, Position(1, 6)),
        (9, Position(1)),
        (0, START),
        (-1, Position(0, -1)),
    ],
)
def test_positions_that_do_not_fit_are_refused(step, position):
    with pytest.raises(ValueError, match="do not fit its 9 steps"):
        position.check(step, 9, 6)
    Position(1, 3).check(9, 9, 6)


@pytest.mark.parametrize("change", [{"batch": 0}, {"sums": [1.0, 2.0]}, {"sums": ["a"] * 3}, {"updates": [[1, 2]]}])
def test_notes_that_make_no_position_are_refused(change):
    there = Position(1, 3, (1.0, 2.0, 3.0), ((8, 1, 1),), 0.5)
    notes = there.notes()
    assert Position.from_notes(notes) == there and Position.from_notes(Position(2).notes()) == Position(2)
    with pytest.raises(ValueError):
        Position.from_notes(notes | {"within": json.dumps(json.loads(notes["within"]) | change)})


def test_a_checkpoint_of_another_batch_is_noticed(tmp_path):
    """The metrics so far are part of what its checksum is of."""
    folder = stopped(tmp_path / "run")
    file = folder.path / "checkpoint.safetensors"
    content = file.read_bytes()
    assert content.count(b'\\"batch\\": 3') == 1
    file.write_bytes(content.replace(b'\\"batch\\": 3', b'\\"batch\\": 4'))
    with pytest.raises(UserError, match="its checksum is wrong"):
        load_net(folder)


def test_a_probe_knows_that_it_missed_a_part_of_an_epoch(tmp_path):
    trainer = Trainer.build(SHORT, data.load("digits", DATA), CPU)
    for position, complete in ((START, True), (Position(0, 3), False)):
        probe = MaskProbe(trainer.net, trainer.loader, trainer.engine.settings)
        probe.restore(tmp_path, position)
        assert probe.complete == complete


WORDS = ["--epochs", "3", "--batch", "50", "--method", "dcil", "--checkpoint-minutes", "0.0001", "--out"]


@pytest.mark.slow
def test_killed_within_epochs_and_resumed(tmp_path):
    """SIGKILL at any time, the run of the command line."""
    whole = dcil("train", *WORDS, tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    killed, file, within = tmp_path / "killed", tmp_path / "killed" / "checkpoint.json", 0
    for wait in (0.1, 0.5, 0.3):
        run = dcil("train", *WORDS, killed, "--resume")
        before = file.read_text() if file.exists() else ""
        while run.poll() is None and (file.read_text() if file.exists() else "") == before:
            time.sleep(0.005)
        time.sleep(wait)
        run.send_signal(signal.SIGKILL)
        run.wait()
        within += "batch" in json.loads(file.read_text())
    last = dcil("train", *WORDS, killed, "--resume")
    assert last.wait() == 0, last.stderr.read()
    assert within >= 2
    same_result(tmp_path / "whole", killed)


@pytest.mark.parametrize("minutes", ["-1", "nan", "x", "1e9"])
def test_minutes_that_are_none_are_refused(minutes, tmp_path, capsys):
    assert main(["train", "--checkpoint-minutes", minutes, "--out", str(tmp_path / "run")]) == 2
    assert "--checkpoint-minutes" in capsys.readouterr().err and not os.path.lexists(tmp_path / "run")
