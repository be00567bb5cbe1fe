"""What a run costs: estimates from records, runs at once by measurement, and no evaluation that no number needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dcil.report import run_report
from dcil.reproduce import records
from dcil.reproduce.cells import Cell
from dcil.reproduce.estimate import GUESSED, TWO_PATHS, Estimate
from dcil.reproduce.needed_epochs import needed_epochs
from dcil.reproduce.records import Record
from dcil.reproduce.session import CellRun, RunOptions, resume_run
from dcil.runs.progress import describe
from dcil.runs.read import read_run
from dcil.runs.summary import best_epoch, summarise
from dcil.train.parallel import BEST_AT_ONCE, GPU_RUNS, runs_at_once

ROOT = Path(__file__).parents[2]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def record(cell, seconds, at_once=1, gpu="GPU A", steps=391):
    """A record with one session, every epoch of which took ``seconds``."""
    session = {"after": 0, "environment": {"gpu": gpu}, "at_once": at_once}
    config = {"method": {"epoch_steps": steps}}
    return Record(Path(), cell, 0, {"sessions": [session], "config": config, "epochs": {"seconds": [seconds] * 5}})


def run(method, model="resnet20", dataset="cifar10", sparsity=0.9):
    return CellRun(Cell(dataset, model, method, sparsity if method != "dense" else 0.0), 0, Path("nowhere"))


# -- estimates -------------------------------------------------------------------------------------------------------


def test_an_estimate_is_the_share_of_the_device():
    """Two runs that take turns take twice as long each; what was measured beside as many others counts most."""
    found = [record("cifar10/resnet20/dpf-0.9", 1.0), record("cifar10/resnet20/dpf-0.95", 3.0, at_once=4)]
    for at_once, want in ((1, 1.0), (2, 2.0), (3, 2.25), (8, 6.0)):
        assert Estimate(found, at_once).seconds_per_epoch(run("dpf")) == pytest.approx(want)
    assert Estimate([], 4).seconds_per_epoch(run("dpf")) == 4 * Estimate([]).seconds_per_epoch(run("dpf"))


def test_an_estimate_rests_on_the_records_of_the_network_that_say_most():
    found = [
        record("cifar10/resnet20/dpf-0.9", 2.0),
        record("cifar10/resnet20/dpf-0.9", 8.0, gpu="GPU B"),
        record("cifar100/resnet20/dense", 4.0),
        record("cifar10/resnet32/dcil-0.9", 9.0),
        record("cifar10/resnet20/of-somebody", 99.0),
    ]
    for wanted, hardware, seconds, basis in (
        (run("dpf"), "GPU A", 2.0, "as dpf of resnet20 on GPU A, 1 at once"),
        (run("dpf"), "GPU B", 8.0, "as dpf of resnet20 on GPU B, 1 at once"),
        (run("dpf", dataset="cifar100"), "GPU A", 2.0, "as dpf of resnet20 (cifar10) on GPU A, 1 at once"),
        (run("dense"), "GPU A", 4.0, "as dense of resnet20 (cifar100) on GPU A, 1 at once"),
        (run("sm"), "GPU A", 2.0, "as dpf of resnet20 on GPU A, 1 at once"),  # one path, the same data set
        (run("dcil"), "GPU B", 8.0 * TWO_PATHS, "as dpf of resnet20 on GPU B, 1 at once"),
        (run("dpf", "resnet32"), "GPU A", 9.0 / TWO_PATHS, "as dcil of resnet32 on GPU A, 1 at once"),
        (run("dpf", "wrn-28-2"), "GPU A", 391 * 1.9e-3, GUESSED),
    ):
        estimate = Estimate(found, hardware=hardware)
        assert estimate.pace(wanted).seconds == pytest.approx(seconds)
        assert estimate.pace(wanted).basis == basis
        assert estimate.basis == ("" if basis != GUESSED else f", as on {GUESSED}")
    elsewhere = Estimate(found, hardware="a CPU")
    assert elsewhere.seconds_left(run("dcil", "resnet32")) == pytest.approx(300 * 9.0)
    assert elsewhere.basis == ", as on GPU A"


# -- runs at once ----------------------------------------------------------------------------------------------------


def test_the_number_of_runs_at_once_was_measured():
    """benchmarks/h200.json has ms per run and step of DCIL by the number of runs at once, of the first network."""
    measured = json.loads((ROOT / "benchmarks" / "h200.json").read_text())
    best = min(measured["parallel"], key=measured["parallel"].get)
    assert measured["rows"][0]["model"] == "resnet20" and BEST_AT_ONCE["resnet20"].runs == int(best)
    assert all(f"{ms:.2f}" in BEST_AT_ONCE["resnet20"].source for ms in measured["parallel"].values())
    assert all((ROOT / entry.source.partition(":")[0]).exists() for entry in BEST_AT_ONCE.values())


def test_runs_at_once_of_several_networks(monkeypatch):
    monkeypatch.setitem(BEST_AT_ONCE, "wrn-28-8", BEST_AT_ONCE["resnet20"]._replace(runs=1))
    assert runs_at_once(None, CUDA, ["resnet20", "wrn-28-8"]) == 1
    assert runs_at_once(None, CUDA, ["resnet20", "resnet50"]) == 4
    assert runs_at_once(None, CUDA, ["resnet50"]) == runs_at_once(None, CUDA) == GPU_RUNS
    assert runs_at_once(3, CUDA, ["wrn-28-8"]) == 3 and runs_at_once(None, CPU, ["resnet20"]) == 1


# -- evaluation ------------------------------------------------------------------------------------------------------


def of_cell(cell):
    config = cell.config(0)
    return needed_epochs(config.build_method(391), config.total_epochs)


def test_the_epochs_that_the_tables_need():
    """95 % are within a point at epoch 176 of 300: s (1 - e/225)^3 <= 0.01."""
    found = of_cell(Cell("cifar10", "resnet20", "dcil", 0.95))
    assert set(range(175, 300)) < found and 174 in found and not found & {170, 171, 172, 173}
    assert {epoch for epoch in found if epoch < 174} == set(range(4, 174, 5))
    for cell in (Cell("cifar10", "resnet20", "dense"), Cell("cifar10", "resnet20", "sm", 0.9)):
        assert of_cell(cell) == frozenset(range(300))
    assert len(of_cell(Cell("cifar10", "wrn-28-2", "sfp", 0.4, "filter"))) < 200


def test_the_recorded_runs_would_have_the_same_numbers():
    """Last, best and the spread of every record are those of the epochs that are evaluated now."""
    for found in records.read_all(ROOT / "results"):
        dataset, model, name = found.cell.split("/")
        config = found.raw["config"]
        cell = Cell(dataset, model, config["method"]["name"], config["sparsity"], kl="nokl" not in name)
        needed, top1, sparsity = of_cell(cell), found.column("top1"), found.column("sparsity")
        kept = [value if epoch in needed else None for epoch, value in enumerate(top1)]
        assert best_epoch(kept, sparsity) == best_epoch(top1, sparsity), found.cell
        assert summarise(kept)["last"] == summarise(top1)["last"] and summarise(kept)["std"] == summarise(top1)["std"]


def test_epochs_that_were_not_evaluated_are_read_everywhere(tmp_path):
    cell, told = Cell("digits", "resnet8-digits", "dcil", 0.9), []
    trial = CellRun(cell, 0, tmp_path, 7)
    resume_run(trial, RunOptions(Path("nowhere"), CPU), lambda epoch, part, row: told.append(row))
    found = records.read(trial.record)
    assert [value is None for value in found.column("top1")] == [True] * 3 + [False] * 4
    assert found.column("top5")[0] is found.column("top1_super")[1] is None and found.column("sparsity")[1] > 0
    assert found.last == found.column("top1")[-1] and found.best >= found.last
    folder = read_run(trial.folder.path)
    assert [epoch.top1 is None for epoch in folder.epochs] == [True] * 3 + [False] * 4
    assert "top-1" not in describe(next(row for row in told if row))
    (trial.folder.path / "summary.json").unlink()  # as unfinished
    assert read_run(trial.folder.path).summary["last"] == pytest.approx(found.last, abs=1e-3)


def test_a_run_without_any_accuracy_yet(tmp_path):
    trial = CellRun(Cell("digits", "resnet8-digits", "dcil", 0.9), 0, tmp_path, 7)
    resume_run(trial, RunOptions(Path("nowhere"), CPU), lambda epoch, part, row: None, until=2)
    begun = read_run(trial.folder.path)
    assert begun.summary is None and len(begun.epochs) == 2 and begun.sparsity > 0
    run_report.write([begun], tmp_path / "report.html")


def test_accuracies_that_are_missing_do_not_count():
    assert summarise([50.0, None, 60.0, None]) == {"last": 60.0, "best": 60.0, "best_epoch": 3, "std": 0.0}
    assert best_epoch([99.0, 60.0, None, 50.0], [0.5, 0.895, 0.9, 0.9]) == 1
