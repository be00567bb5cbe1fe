"""Grids on Ray, as far as that goes without Ray: options, refusals, budgets, what a worker checks."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dcil.integrations
from dcil.cli import main
from dcil.engine import EngineSettings
from dcil.integrations.ray_worker import BROKEN, FAILED, UNFIT, Terms, stopped_by_interrupt, terms_text, why_unfit, work
from dcil.runs.file_lock import LockHeld, exclusive, is_held
from dcil.runs.folder import RunFolder
from dcil.runs.progress import Board, Progress
from dcil.train.parallel import Stopped
from dcil.train.plan import PlannedRun, new_config
from dcil.train.recipes import RECIPES
from dcil.train.remote_runs import Place, config_record, from_record, to_text, train_text

QUICK = ["--epochs", "1", "--batch", "300", "--device", "cpu"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", "--out", "x"], "must be ray or ray:ADDRESS, got 'slurm'"),
        (["--on", "ray:", "--out", "x"], "must be ray or ray:ADDRESS"),
        (["--on", "ray", "--out", "s3://bucket/runs"], "must be a path, got 's3://bucket/runs'"),
        (["--out", "gs://bucket/runs"], "must be a path, got 'gs://bucket/runs'"),
        (["--budget", "1w", "--out", "x"], "'1w' is not a time"),
        (["--cpus", "2", "--out", "x"], "--cpus is for --on"),
        (
            ["--on", "ray", "--device", "cuda:1", "--out", "x"],
            "--device must be auto, cpu or cuda with --on, got cuda:1",
        ),
    ],
)
def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *QUICK, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "meant"), [([], None), (["auto"], None), (["cuda"], "cuda"), (["cpu"], "cpu")])
def test_with_on_the_device_is_one_of_the_cluster(monkeypatch, given, meant):
    seen = []
    monkeypatch.setattr("dcil.cli.sweep.plan_sweep", lambda *given: [])
    monkeypatch.setattr("dcil.cli.sweep.train_all", lambda console, runs, args, budget: seen.append(args.device) or {})
    words = ["sweep", "--out", "x", "--on", "ray", *(f"--device={name}" for name in given)]
    assert main(words) == 0 and seen == [torch.device(meant) if meant else None]


def test_without_on_the_device_is_one_of_this_machine(capsys):
    assert main(["sweep", "--out", "x", "--device", "gpu"]) == 2
    err = capsys.readouterr().err
    assert "--device must be a device of this machine, got gpu" in err and err.count("\n") == 1


def test_without_ray_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray", "ray_cluster", "ray_search"):
        monkeypatch.delitem(sys.modules, f"dcil.integrations.{name}", raising=False)
        monkeypatch.delattr(dcil.integrations, name, raising=False)
    sweep = ["sweep", *QUICK, "--out", str(tmp_path / "a")]
    for words in (sweep, [*sweep, "--search", "lr=0.1..1"], ["reproduce", "beyond", "--out", str(tmp_path)]):
        assert main([*words, "--on", "ray"]) == 2
        assert capsys.readouterr().err == "dcil: ray must be installed for this: pip install 'dcil[ray]'\n"
    assert not list(tmp_path.iterdir())


def test_a_budget_ends_a_sweep_that_the_same_command_resumes(tmp_path, capsys):
    words = ["sweep", *QUICK, "--seeds", "0,1", "--out", str(tmp_path)]
    assert main([*words, "--budget", "0s"]) == 0
    assert "0 of 2 runs are complete; the same command resumes" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main([*words, "--budget", "1h"]) == 0
    assert "2 of 2 runs are complete\n" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_config_as_text_is_the_same_config(recipe):
    for method in ("dcil", "dpf", "rigl", "dense"):
        config = RECIPES[recipe](method=method)
        assert from_record(json.loads(json.dumps(config_record(config)))) == config


def test_a_run_as_text_is_trained(tmp_path):
    config = new_config("gmp", {"epochs": 1, "batch": 300, "settings": {"scope": "erk"}}, None)
    place = Place(tmp_path, "cpu", EngineSettings(low_memory=True))
    run = PlannedRun("a", RunFolder(tmp_path / "a"), config)
    epochs = []
    train_text(to_text(run, place, 10.0), lambda epoch, part, row: epochs.append(epoch))
    summary = run.folder.summary()
    assert summary is not None and summary["environment"]["low_memory"] == "true" and epochs[-1] == 1


def terms(folder: Path, **changes: object) -> str:
    return terms_text(Terms(**{"witness": str(folder / ".witness"), "threads": torch.get_num_threads()} | changes))


def test_a_worker_refuses_storage_of_its_own_locks_that_do_not_hold_and_another_version(tmp_path):
    kind, line = work(None, "", terms(tmp_path), 0)
    assert kind == UNFIT and "does not see" in line
    (tmp_path / ".witness").touch()
    assert "whose locks hold on all nodes" in work(None, "", terms(tmp_path), 0)[1]
    assert "must have dcil 0.0 as the command has" in work(None, "", terms(tmp_path, version="0.0"), 0)[1]
    with exclusive(tmp_path / ".witness", ""):
        assert why_unfit(Terms(str(tmp_path / ".witness"), 1)) == ""


def test_a_worker_whose_accelerator_is_broken_trains_no_other_run(tmp_path, monkeypatch):
    def broken(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with")

    def fails(text: str, progress: Progress) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", broken)
        monkeypatch.setattr(torch.cuda, "empty_cache", broken)
        broken()

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code) or sys.exit(code))
    with exclusive(tmp_path / ".witness", ""):
        kind, line = work(fails, "", terms(tmp_path), 0)
        assert kind == BROKEN and line.startswith("AcceleratorError: CUDA error: an illegal memory access")
        with pytest.raises(SystemExit):
            work(fails, "", terms(tmp_path), 0)
    assert ended == [1]


def test_a_worker_frees_the_memory_of_a_run_that_failed_by_itself(tmp_path, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    with exclusive(tmp_path / ".witness", ""):
        assert work(lambda text, progress: 1 / 0, "", terms(tmp_path), 0)[0] == FAILED
    assert done == ["freed"]


def test_a_worker_returns_failures_as_lines_and_stops_at_the_deadline(tmp_path):
    def fails(text: str, progress: Progress) -> None:
        raise ZeroDivisionError("by\nzero")

    def stops(text: str, progress: Progress) -> None:
        progress(0, 0.5, None)
        raise AssertionError("the deadline is over")

    with exclusive(tmp_path / ".witness", ""):
        assert work(fails, "", terms(tmp_path), 0) == (FAILED, "ZeroDivisionError: by zero")
        assert work(stops, "", terms(tmp_path, deadline=time.time() - 1), 0) == ("", "")


def test_a_worker_waits_for_the_lock_of_one_that_is_gone(tmp_path):
    tries = []

    def locked(text: str, progress: Progress) -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise LockHeld("one process at a time")

    with exclusive(tmp_path / ".witness", ""):
        assert work(locked, "", terms(tmp_path), 0) == (FAILED, "one process at a time")
        assert work(locked, "", terms(tmp_path), 60) == ("", "") and len(tries) == 3


def test_an_interrupt_lets_a_task_end_between_two_steps():
    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_interrupt(stop):
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_lock_is_seen_as_held_and_looking_takes_it_from_nobody(tmp_path):
    file = tmp_path / "lock"
    assert not is_held(file) and not file.exists()
    with exclusive(file, ""):
        assert is_held(file) and is_held(file)
    file.touch()
    assert not is_held(file)


def test_the_display_has_a_bar_for_all_runs_and_one_for_each_that_is_trained():
    with Board(Console(force_terminal=True, file=io.StringIO(), width=100), 3) as board:
        show = board.begin("[a]", 4)
        show(1, 0.5, None)
        assert board.bars is not None
        everything, one = board.bars.tasks
        assert (everything.total, one.completed, one.description) == (3, 1.5, "[a]")
        board.end("[a]")
        board.end("never shown")
        assert [(task.description, task.completed) for task in board.bars.tasks] == [("runs", 2)]


def test_stopped_is_no_failure(tmp_path):
    def stopped(text: str, progress: Progress) -> None:
        raise Stopped

    with exclusive(tmp_path / ".witness", ""):
        assert work(stopped, "", terms(tmp_path), 0) == ("", "")
