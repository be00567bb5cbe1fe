"""Grids on a real Ray cluster: a lost node, Ctrl-C, budgets; the results are those of runs trained alone."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import WorkerCrashedError
from rich.console import Console
from safetensors.torch import load_file

from dcil.cli import main, on_ray
from dcil.engine import EngineSettings
from dcil.errors import UserError
from dcil.integrations import ray as ray_grid
from dcil.integrations import ray_cluster, ray_search
from dcil.integrations.ray_search import Search, Watcher
from dcil.integrations.ray_worker import Terms
from dcil.reproduce.cells import Cell
from dcil.reproduce.session import CellRun, RunOptions
from dcil.runs.folder import RunFolder
from dcil.runs.progress import Board
from dcil.train.budget import Budget
from dcil.train.remote_runs import Place
from dcil.train.search_record import COMPLETE, STOPPED, UNFINISHED, SearchRecord, read

TREE = Path(__file__).parents[2]
RUN = ["--batch", "300", "--device", "cpu", "--checkpoint-minutes", "0.01"]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    """A cluster of two nodes with one CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    yield cluster
    cluster.shutdown()


def command(*words: str | Path) -> subprocess.Popen[str]:
    """Start the command as a shell does, in a process group of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "dcil", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TREE, env=environment, start_new_session=True,
    )  # fmt: skip


def wait_for(files: int, pattern: str, folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < files:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"no {files} files {pattern}"
        time.sleep(0.05)


def results(folder: Path) -> dict[str, object]:
    """What must be equal, to the last bit: all tensors, and all metrics but the time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "rows": [{name: value for name, value in row.items() if name != "seconds"} for row in rows],
        **{key: value.tolist() for key, value in load_file(folder / "checkpoint.safetensors").items()},
        **{f"model.{key}": value.tolist() for key, value in load_file(folder / "model.safetensors").items()},
    }


def trained_alone(tmp_path: Path, seed: int, epochs: int, method: str = "dcil") -> dict[str, object]:
    torch.set_num_threads(1)
    out = tmp_path / f"alone-{method}-{seed}"
    words = ["--seed", str(seed), "--epochs", str(epochs), "--method", method, "--out", str(out)]
    assert main(["train", *RUN, *words]) == 0
    return results(out)


def test_runs_of_a_lost_node_are_taken_up_elsewhere_and_equal_runs_trained_alone(nodes, tmp_path):
    out, seeds, epochs = tmp_path / "runs", range(3), 16
    words = ["--epochs", str(epochs), "--seeds", ",".join(map(str, seeds)), "--out", out]
    process = command("sweep", "--on", f"ray:{nodes.address}", *RUN, *words)
    wait_for(2, "*/checkpoint.json", out, process)  # a run on each node
    assert len(list(out.glob("*/.lock"))) == 2
    done = {file: file.read_bytes() for file in out.glob("*/metrics.jsonl")}
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "its worker is lost" in said and "3 of 3 runs are complete" in said
    for file, lines in done.items():  # none is trained again: their seconds are what they were
        assert file.read_bytes().startswith(lines)
    for seed in seeds:
        (folder,) = out.glob(f"*seed{seed}")
        assert results(folder) == trained_alone(tmp_path, seed, epochs)
    assert not list(out.glob(".ray*"))


def test_ctrl_c_stops_cleanly_and_the_command_goes_on_without_ray(tmp_path):
    out, epochs = tmp_path / "runs", 16
    words = ["sweep", *RUN, "--epochs", str(epochs), "--seeds", "0,1", "--out", str(out)]
    process = command(*words, "--on", "ray", "--parallel", "2")
    wait_for(2, "*/checkpoint.json", out, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command again" in said and "Traceback" not in said
    assert not list(out.glob("*/.lock")) and not list(out.glob("*/*.part")) and not list(out.glob(".ray*"))
    assert len(list(out.glob("*/summary.json"))) < 2
    torch.set_num_threads(1)
    assert main(words) == 0
    (folder,) = out.glob("*seed1")
    assert results(folder) == trained_alone(tmp_path, 1, epochs)


def test_the_budget_ends_a_grid_that_the_same_command_resumes(tmp_path, capfd):
    words = ["sweep", *RUN, "--epochs", "3000", "--seeds", "0,1,2", "--out", str(tmp_path), "--on", "ray"]
    begun = time.monotonic()
    assert main([*words, "--parallel", "1", "--budget", "15s"]) == 0
    assert time.monotonic() - begun < 100
    assert "0 of 3 runs are complete; the same command resumes" in capfd.readouterr().out


def test_cells_are_recorded_and_tidied_up(tmp_path, monkeypatch):
    runs = [CellRun(Cell("digits", "resnet8-digits", method, 0.9), 0, tmp_path, 2) for method in ("dpf", "gmp")]
    with ray_cluster.connected("", 1):
        options, share = RunOptions(tmp_path, torch.device("cpu")), ray_cluster.Share()
        args = (Console(quiet=True), runs, tmp_path, options, share, Budget())
        assert on_ray.reproduce(*args, tidy=True) == {}
        assert all(run.done for run in runs) and not list(tmp_path.rglob("checkpoint*"))
        assert on_ray.reproduce(*args, tidy=True) == {}  # as when another command has recorded them
        monkeypatch.setattr(ray_grid, "Terms", partial(Terms, version="0.0"))
        with pytest.raises(UserError, match="as the command has, has"):  # no run is worth a try there
            on_ray.reproduce(*args, tidy=True)
    record = json.loads(runs[0].record.read_text())
    assert record["cell"] == runs[0].cell.id and len(record["epochs"]["top1"]) == 2


def test_failures_are_lines_and_the_other_runs_go_on(tmp_path, capfd):
    file = tmp_path / "list.json"
    file.write_text(json.dumps([{"name": "wild", "lr": 1e30}, {"name": "tame"}]))
    words = ["--list", str(file), "--on", "ray", "--parallel", "1", "--epochs", "1", "--out", str(tmp_path / "runs")]
    assert main(["sweep", *RUN, *words]) == 1
    assert (tmp_path / "runs" / "tame" / "summary.json").exists()
    assert "wild failed" in (err := capfd.readouterr().err) and "must be finite" in err and "Traceback" not in err


def test_a_search_stops_the_worst_and_goes_on_where_it_was_stopped(tmp_path, capfd):
    words = ["sweep", *RUN, "--on", "ray", "--parallel", "2", "--epochs", "4", "--out", str(tmp_path), "--grace", "1"]
    words += ["--search", "lr=0.0001..0.3:log", "--search", "method=dpf,gmp", "--search", "target_epoch=1,2"]
    assert main([*words, "--trials", "4"]) == 0
    assert "4 trials: " in capfd.readouterr().out
    record = read(tmp_path)
    assert record is not None and {trial.ended for trial in record.trials} == {COMPLETE, STOPPED}
    before = {trial.name: json.loads((tmp_path / trial.name / "config.json").read_text()) for trial in record.trials}
    for trial in record.trials:
        folder = RunFolder(tmp_path / trial.name)
        assert len(folder.metrics()) >= trial.epochs
        assert (folder.summary() is not None) == (trial.ended == COMPLETE)
        assert not [file for file in folder.leftovers() if file.name != ".lock"]  # Tune may kill whom it has stopped
        assert before[trial.name]["lr"] == trial.values["lr"]
    assert main([*words, "--trials", "6"]) == 0
    assert "6 trials: " in capfd.readouterr().out
    after = read(tmp_path)
    assert after is not None and [t.values for t in after.trials[:4]] == [t.values for t in record.trials]
    assert len(list(tmp_path.glob("trial-*"))) == len(after.trials) == 6
    page = (tmp_path / "report.html").read_text()
    assert "The search" in page and "Which settings matter" in page
    assert main([*words, "--search", "momentum=0..0.9"]) == 2
    assert "is of a search with space" in capfd.readouterr().err


def test_ctrl_c_ends_a_search(tmp_path):
    words = ["--search", "lr=0.01..0.1", "--grace", "300", "--epochs", "300", "--trials", "3", "--out", tmp_path]
    process = command("sweep", *RUN, "--on", "ray", "--parallel", "2", *words)
    wait_for(2, "*/checkpoint.json", tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command again" in said and "Traceback" not in said
    assert read(tmp_path) is not None and not list(tmp_path.glob(".ray*"))


def test_a_run_is_given_up_when_it_loses_its_worker_again_and_again_at_the_same_place(tmp_path):
    run = CellRun(Cell("digits", "resnet8-digits", "dpf", 0.9), 0, tmp_path)
    losses = ray_grid.Losses(ray_grid.Job("a", run.folder, 1, print, ""))
    error = WorkerCrashedError()
    assert [losses.another(error) for _ in range(2)] == ["", ""]
    run.folder.path.mkdir(parents=True)
    (run.folder.path / "checkpoint.json").write_text("further")
    assert [losses.another(error) for _ in range(2)] == ["", ""]
    assert losses.another(error) == (
        "its worker was lost 3 times without a checkpoint in between, last by worker crashed"
    )


def watcher_of(out: Path) -> tuple[Watcher, SimpleNamespace, SearchRecord]:
    """A watcher with bars, a trial, and the record of both."""
    record, place = SearchRecord({"lr": "0.1,0.2"}, {}, "top1", 1), Place(out, "cpu", EngineSettings())
    console = Console(file=io.StringIO(), force_terminal=True)
    watcher = Watcher(Search(out, (), record, 2, 9, 0, place, 0.0), Board(console, 2).__enter__())
    return watcher, SimpleNamespace(config={"lr": 0.1}), record


def test_values_that_are_drawn_twice_are_one_trial_that_stays_complete(tmp_path):
    watcher, trial, record = watcher_of(tmp_path)
    row = {"epoch": 9, "train_loss": 1.0, "top1": 50.0, "val_loss": 1.0, "sparsity": 0.9}
    watcher.on_trial_start(0, [], trial)
    watcher.on_trial_start(0, [], trial)  # both at once
    watcher.on_trial_result(0, [], trial, row | {"complete": True})
    watcher.on_trial_complete(0, [], trial)
    watcher.on_trial_result(0, [], trial, row | {"epoch": 3})
    watcher.stopped(trial)
    watcher.on_trial_result(0, [], trial, {"score": -1e9, "epoch": 0, "failure": "the folder is locked"})
    watcher.on_trial_complete(0, [], trial)
    watcher.on_trial_start(0, [], trial)  # and later again
    watcher.on_trial_result(0, [], trial, row)
    watcher.on_trial_complete(0, [], trial)
    assert [(each.ended, each.epochs, each.reason) for each in record.trials] == [(COMPLETE, 9, "")]
    watcher.board.__exit__()


def test_an_error_of_a_trial_is_told_at_once_and_as_it_is(tmp_path, monkeypatch):
    def fail(terms):
        raise RuntimeError("no kernel image")

    told: list[dict[str, object]] = []
    monkeypatch.setattr(ray_search, "why_unfit", fail)
    monkeypatch.setattr(ray_search.tune, "report", told.append)
    watcher, trial, _ = watcher_of(tmp_path)
    ray_search.train_trial(trial.config, ray_search.text_of(watcher.search, tmp_path / "witness", ray_cluster.Share()))
    assert [each["failure"] for each in told] == ["RuntimeError: no kernel image"]
    watcher.board.__exit__()


def test_a_node_that_cannot_train_ends_the_search_in_one_line(tmp_path, monkeypatch, capfd):
    words = ["sweep", *RUN, "--on", "ray", "--parallel", "1", "--epochs", "2", "--trials", "3", "--out", str(tmp_path)]
    words += ["--search", "lr=0.01..0.1"]
    with monkeypatch.context() as patch:
        patch.setattr(ray_search, "Terms", partial(Terms, version="0.0"))
        assert main(words) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "must have dcil 0.0 as the command has" in said[0]
    record = read(tmp_path)
    assert record is not None and {trial.ended for trial in record.trials} == {UNFINISHED} and len(record.trials) == 1
    assert not list(tmp_path.glob(".ray*"))
    assert main(words) == 0  # once all nodes have the version
    assert "3 trials: " in capfd.readouterr().out


def test_a_worker_with_a_broken_accelerator_is_replaced_and_others_are_reused(tmp_path):
    """The first run fails as an illegal memory access does: every later call of CUDA in its process fails as well."""

    def train(text: str, progress: object) -> None:  # here, so that Ray sends it as it is
        name, marks = json.loads(text)
        if name == "first":

            def broken() -> None:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

            torch.cuda.is_initialized, torch.cuda.synchronize, torch.cuda.empty_cache = lambda: True, broken, broken
            Path(marks, "broken").write_text(str(os.getpid()))
            broken()
        Path(marks, name).write_text(str(os.getpid()))

    names = ["first", *map(str, range(4))]
    text = {name: json.dumps([name, str(tmp_path)]) for name in names}
    jobs = [ray_grid.Job(name, RunFolder(tmp_path / "runs" / name), 1, train, text[name]) for name in names]
    said = Console(file=io.StringIO())
    with ray_cluster.connected("", 1):
        failures = ray_grid.run_on_ray(jobs, tmp_path / "runs", ray_cluster.Share(), Budget(), said)
    assert failures == {"first": "AcceleratorError: CUDA error: an illegal memory access was encountered"}
    workers = {(tmp_path / name).read_text() for name in names[1:]}
    assert len(workers) == 1 and (tmp_path / "broken").read_text() not in workers
    assert "is lost" not in said.file.getvalue()


def test_an_address_without_a_cluster_is_one_line(tmp_path, capfd):
    for address in ("127.0.0.1:1", "nonsense"):
        assert main(["sweep", *RUN, "--on", f"ray:{address}", "--out", str(tmp_path / "runs")]) == 2
        assert "must name a Ray cluster that can be reached" in capfd.readouterr().err
    assert main(["sweep", *RUN, "--on", "ray:ray://127.0.0.1:1", "--out", str(tmp_path / "runs")]) == 2
    assert "--on ray:auto" in capfd.readouterr().err
