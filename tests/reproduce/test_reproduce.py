"""The paper's tables: what is trained for them, what is kept, and what the page says; on the digits, in seconds."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

import dcil
from dcil import data
from dcil.cli.reproduce import main, run_options, seconds
from dcil.engine import EngineSettings
from dcil.errors import UserError
from dcil.report.formatting import spread
from dcil.reproduce import iterations, mask_age, paper, records, report, tables
from dcil.reproduce.cells import Cell, cell_for
from dcil.reproduce.comparison import Measurements, comparison_rows
from dcil.reproduce.paper import PrintedNumber
from dcil.reproduce.pool import Pool
from dcil.reproduce.probe import NEVER, MaskProbe
from dcil.reproduce.session import CellRun, RunOptions, resume_run
from dcil.runs.seal import sealed
from dcil.train import RECIPES, RunFolder, train
from dcil.train.budget import Budget
from dcil.train.recipes import scaled_epochs

SHARED = Path(__file__).parents[3] / "shared" / "paper" / "paper.json"
DIGITS = Cell("digits", "resnet8-digits", "dcil", 0.9)
DPF = replace(DIGITS, method="dpf")
CPU = RunOptions(Path("nowhere"), torch.device("cpu"))
EPOCHS = 3


def tiny(method, sparsity, metric, mean, std=None, **more):
    return PrintedNumber("tiny", "digits", method, "weight", sparsity, metric, "resnet8-digits", mean, std, **more)


TINY = (
    tiny("dense", 0.0, "top1", 50.0, 50.0),
    tiny("dpf-rerun", 0.9, "top1_last", 99.99, 0.001),
    tiny("dpf-rerun", 0.9, "top1_best", 1.0, 0.1),
    tiny("dcil", 0.9, "top1_last", 90.0),
    tiny("dcil", 0.5, "top1_last", 90.0, 1.0, note="a printed remark"),
)


@pytest.fixture
def tiny_table(monkeypatch):
    monkeypatch.setattr(paper, "numbers", lambda: TINY)
    monkeypatch.setattr(tables, "FURTHER", dict.fromkeys(tables.FURTHER, ()))


def silent(epoch, part, row):
    """Shows nothing."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three cells, one of them with two seeds, trained and recorded without interruption."""
    out = tmp_path_factory.mktemp("results")
    for cell, seed in ((DIGITS, 0), (DPF, 0), (DPF, 1), (DIGITS.dense, 0)):
        resume_run(CellRun(cell, seed, out, EPOCHS), CPU, silent, snapshots=[1])
    return out


def columns(path):
    """What two records of the same run share: all of it but times and places."""
    found = json.loads(path.read_text())
    found["epochs"].pop("seconds")
    found["summary"].pop("seconds")
    return {key: found[key] for key in ("cell", "config", "epochs", "summary", "layers", "around_changes", "stays")}


# -- tables and cells ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.exists(), reason="the source of the package data is not here")
def test_the_package_data_is_the_papers():
    original = json.loads(SHARED.read_text())
    assert len(original) == len(paper.numbers())
    for row, want in zip(paper.numbers(), original, strict=True):
        for name, value in asdict(row).items():
            assert value == (
                want.get(name) if want.get(name) is not None else PrintedNumber.__dataclass_fields__[name].default
            )


def test_cells_per_table():
    counts = {name: len(tables.cells_of(name)) for name in tables.names()}
    assert counts == {
        "cifar10-unstructured": 40,  # 4 dense + 9 sparsities x (sm, dsr, dpf, dcil)
        "cifar100-unstructured": 22,  # 4 dense + 9 x (dpf, dcil)
        "cifar10-structured": 28,  # 4 dense + 8 x (sfp, dpf, dcil)
        "stability-cifar10": 22,
        "diff-cifar10-unstructured": 40,
        "diff-cifar10-structured": 28,
        "cifar100-structured": 7,  # dcil at two sparsities, sfp, fpgm, mil, and dense of both networks
        "warmup-cifar10": 14,  # 2 x 6 warm-ups + 2 dense
        "warmup-imagenet": 4,
        "imagenet": 18,
        "fast-convergence": 18,  # 2 x (6 targets + dpf + dpf fine-tuned) + 2 dense
        "beyond": 58,  # dense + 3 x (17 methods + dcil without KL) + 3 shares of the batch
        "transformers": 58,  # 2 x (dense + 16 + 6 private) + an untied head: dense + 2 x 2 + a small one: 4 + 3 private
    }


def test_every_row_has_its_cell_and_every_cell_its_recipe():
    for row in paper.numbers():
        models = tables.SHARED_MODELS if row.model is None else (row.model,)
        assert all(cell_for(row, model) in tables.cells_of(row.table) for model in models)
    assert all(cell.recipe in RECIPES and cell.method in dcil.METHODS for cell in tables.all_cells().values())


def test_names_of_the_paper_become_ours():
    known = tables.all_cells()
    assert "cifar10/resnet56-bottleneck/dpf-0.9" in known and "cifar10/resnet56/dpf-0.9" not in known
    assert {"cifar100/resnet56/sfp-filter0.5", "cifar100/resnet56/mil", "cifar100/resnet56/dense"} <= set(known)
    assert known["cifar10/resnet20/dcil-nokl-0.95"].config(1).settings["kl"] == 0
    warm = known["cifar10/resnet20/dcil-0.95-warmup30"].config(0)
    assert warm.settings["warmup"] == pytest.approx(30 / 300) and warm.seed == 0
    assert known["cifar10/resnet20/dcil-0.95-target100"].config(0).epochs == 125
    assert known["cifar10/resnet20/dpf-0.95-finetune60"].config(0).total_epochs == 360
    assert known["imagenet/resnet18/dcil-0.8"].config(0).dataset == "imagefolder"


def test_a_shortened_run_keeps_its_shape():
    config = RECIPES["cifar10-resnet20"]()
    config = replace(config, **scaled_epochs(config, 30))
    assert (config.epochs, config.target_epoch, config.milestones) == (30, 22, (15, 22))


def test_beyond_has_every_method_of_weights_with_one_seed_and_the_shares_with_three():
    cells = {cell.name: cell for cell in tables.cells_of("beyond")}
    weights = {name for name, kind in dcil.METHODS.items() if kind.prunes and dcil.Weight in kind.granularities}
    assert {f"{name}-{s}" for name in weights for s in (0.9, 0.95, 0.98)} <= set(cells)
    assert cells["dcil-0.95-share0.125"].config(0).settings["super_share"] == 0.125
    seeds = {name: tables.seeds_of(cell, ["beyond"]) for name, cell in cells.items()}
    assert (seeds["feather-0.95"], seeds["sm-0.95"], seeds["dcil-0.95-share0.5"], seeds["dense"]) == (1, 1, 3, 3)
    assert tables.seeds_of(cells["sm-0.95"], ["beyond", "cifar10-unstructured"]) == 3


def test_filter():
    ids = [cell.id for cell in tables.cells_of_all(["cifar10-unstructured"], "resnet20/dcil-0.9,wrn-28-2/dpf-0.99")]
    assert ids == ["cifar10/resnet20/dcil-0.9", "cifar10/wrn-28-2/dpf-0.99"]
    assert len(tables.cells_of_all(["cifar10-unstructured"], "*/resnet20/*")) == 9
    with pytest.raises(UserError, match="must match a cell"):
        tables.cells_of_all(["imagenet"], "resnet20")


def test_cells_are_trained_in_the_order_in_which_they_are_named(capsys, tmp_path):
    """The cheapest first of those that one part of the filter names."""
    labels = []
    for named in ("resnet32/dcil-0.95,wrn-28-2/dcil,dpf", "dpf,dcil"):
        command = ["cifar100-unstructured", "--seeds", "1", "--dry-run", "--cells", named]
        assert main([*command, "--out", str(tmp_path), "--data-dir", str(tmp_path), "--device", "cpu"]) == 0
        labels.append([line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]])
    assert labels[0][:4] == ["cifar100/resnet32/dcil-0.95-seed0",
                             *(f"cifar100/wrn-28-2/dcil-{s}-seed0" for s in (0.9, 0.95, 0.99))]  # fmt: skip
    assert all("dpf" in label for label in labels[0][4:]) and "dpf" in labels[1][0] and "dcil" in labels[1][-1]


def test_table_names():
    assert tables.parse_names("warmup") == ["warmup-cifar10", "warmup-imagenet"]
    assert tables.parse_names("imagenet,beyond") == ["imagenet", "beyond"]
    with pytest.raises(UserError, match="fast-convergence"):
        tables.parse_names("fast-convergense")


def test_dry_run_and_list(tiny_table, tmp_path, monkeypatch, capsys):
    assert main(["--list"]) == 0
    assert main(["tiny", "--dry-run", "--seeds", "2", "--out", str(tmp_path / "none")]) == 0
    text = capsys.readouterr().out
    assert "0 of 8 runs" in text and text.index("dense-seed1") < text.index("dcil-0.9-seed0")
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr("dcil.cli.on_ray.cluster", None)  # none is started for a list
    assert main(["tiny", "--dry-run", "--on", "ray", "--out", str(tmp_path / "none")]) == 0
    assert "dcil-0.9-seed0" in (text := capsys.readouterr().out) and "0 of 12 runs" in text
    assert seconds("25m") == 1500 and seconds("90") == 90
    with pytest.raises(UserError, match="TABLE must be given"):
        main([])


# -- runs that are stopped and go on ---------------------------------------------------------------------------------


def test_budget_stops_between_epochs_and_another_folder_goes_on(trained, tmp_path, monkeypatch):
    run = CellRun(DPF, 0, tmp_path / "here", EPOCHS)
    now = [0.0]

    def a_second_per_epoch(*_):
        return lambda epoch, part, row: now.append(now[-1] + (row is not None))

    monkeypatch.setattr("dcil.reproduce.pool.progress_lines", a_second_per_epoch)
    pool = Pool(CPU, Budget.of(2, lambda: now[-1]), Console(quiet=True))
    assert pool.run([run], lambda run: 0.1) == {}
    done = len(run.folder.metrics())
    assert 1 <= done < EPOCHS and not run.done
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    again = replace(run, out=tmp_path / "there")
    assert Pool(CPU, Budget.of(None), Console(quiet=True), tidy=True).run([again], lambda run: 0.1) == {}
    assert columns(again.record) == columns(trained / run.record.relative_to(tmp_path / "here"))
    assert [s["after"] for s in records.read(again.record).raw["sessions"]] == [0, done]
    assert not again.folder.path.exists()


def test_a_spent_budget_starts_nothing(tmp_path):
    run = CellRun(DPF, 0, tmp_path, EPOCHS)
    assert Pool(CPU, Budget.of(0), Console(quiet=True)).run([run], lambda run: 1.0) == {}
    assert not run.folder.started


def test_a_budget_stops_an_epoch_that_takes_longer_than_was_thought(tmp_path, monkeypatch):
    now = [0.0]

    def a_second_per_step(*_):
        return lambda epoch, part, row: now.append(now[-1] + 1)

    monkeypatch.setattr("dcil.reproduce.pool.progress_lines", a_second_per_step)
    run = CellRun(DPF, 0, tmp_path, EPOCHS)
    assert Pool(CPU, Budget.of(10, lambda: now[-1]), Console(quiet=True)).run([run], lambda run: 0.1) == {}
    assert run.folder.started and not run.folder.metrics() and now[-1] < 12


def test_a_run_that_another_process_recorded_is_not_trained_again(trained, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(trained, out)
    run = CellRun(DPF, 0, out, EPOCHS)
    before = run.record.read_bytes()
    shutil.rmtree(run.folder.path)  # as --tidy does
    resume_run(run, CPU, silent)
    assert not run.folder.path.exists() and run.record.read_bytes() == before


def test_two_processes_with_tidy_train_a_run_once(tmp_path, monkeypatch):
    """The one trains, records and tidies between the other's look for the record and its look for the folder."""
    trained = []

    def counted(config, folder, *rest, **more):
        trained.append(folder.started)
        return train(config, folder, *rest, **more)

    def other() -> dict[str, str]:
        return Pool(CPU, Budget.of(None), Console(quiet=True), tidy=True).run([run], lambda run: 0.1)

    class Slow(CellRun):
        @property
        def done(self) -> bool:
            found = super().done
            if not trained:
                refused.update(other())
            return found

    monkeypatch.setattr("dcil.reproduce.session.train", counted)
    refused: dict[str, str] = {}
    run = CellRun(DPF, 0, tmp_path, 1)
    slow = Slow(DPF, 0, tmp_path, 1)
    assert Pool(CPU, Budget.of(None), Console(quiet=True), tidy=True).run([slow], lambda run: 0.1) == {}
    assert trained == [False] and run.done
    assert "one process at a time may train digits/resnet8-digits/dpf-0.9-seed0" in refused[run.label]
    assert other() == {} and trained == [False]  # nor later, with its folder gone
    assert not list((tmp_path / "runs").rglob("*.safetensors")) and not list((tmp_path / "runs").rglob(".*"))


def test_a_run_resumes_without_the_state_of_the_probe(trained, tmp_path):
    """A folder that was copied in part: the run is the same, only the stays are not known any more."""
    run = CellRun(DPF, 0, tmp_path, EPOCHS)
    resume_run(run, CPU, silent, until=2)
    (run.folder.path / "watch-2.safetensors").unlink()
    (run.folder.path / "watch-9.safetensors").write_bytes(b"of a session that went further and was lost")
    with (run.folder.path / "sessions.jsonl").open("a") as file:
        file.write('{"after": 2, "co')  # cut short by a kill
    resume_run(run, CPU, silent)
    found, whole = records.read(run.record), records.read(CellRun(DPF, 0, trained, EPOCHS).record)
    assert found.raw["stays"] is None and found.column("top1") == whole.column("top1")
    assert [session["after"] for session in found.raw["sessions"]] == [0, 2]
    assert not (run.folder.path / "watch-9.safetensors").exists()


KILLED = """
import torch
from pathlib import Path
from dcil.reproduce.cells import Cell
from dcil.reproduce.session import CellRun, RunOptions, resume_run
from dcil.train import loop
loop.SAVE_EVERY = 0
torch.set_num_threads({threads})
run = CellRun(Cell("digits", "resnet8-digits", "dcil", 0.9), 0, Path({out!r}), {epochs})
resume_run(run, RunOptions(Path("nowhere"), torch.device("cpu")), lambda *news: None)
"""


def test_a_killed_run_goes_on_elsewhere_and_ends_in_one_record(trained, tmp_path):
    run = CellRun(DIGITS, 0, tmp_path / "here", EPOCHS)
    script = KILLED.format(out=str(run.out), epochs=EPOCHS, threads=torch.get_num_threads())
    env = os.environ | {"PYTHONPATH": str(Path(dcil.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script], env=env) as process:
        deadline = time.monotonic() + 120
        while not run.folder.metrics() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert run.folder.metrics() and not run.done
    shutil.copytree(run.out, tmp_path / "there")
    again = replace(run, out=tmp_path / "there")
    resume_run(again, CPU, silent)
    assert columns(again.record) == columns(trained / run.record.relative_to(run.out))
    assert len(list((tmp_path / "there").glob("digits/**/*.json"))) == 1


def test_the_probe_does_not_change_the_training(trained, tmp_path):
    run = CellRun(DIGITS, 0, trained, EPOCHS)
    folder = RunFolder(tmp_path / "plain")
    train(run.config(), folder, Path("nowhere"), torch.device("cpu"))
    assert (folder.path / "model.safetensors").read_bytes() == (run.folder.path / "model.safetensors").read_bytes()


def test_other_settings_are_not_mixed_into_a_run(tmp_path):
    run = CellRun(DIGITS, 0, tmp_path, 2)
    train(replace(run.config(), lr=0.5, epochs=1, target_epoch=1, milestones=()), run.folder, tmp_path, CPU.device)
    (run.folder.path / "summary.json").unlink()
    with pytest.raises(UserError, match="other settings"):
        resume_run(run, CPU, silent)


def test_parallel_runs_set_shared_gpu():
    """The engine takes another route then: less work in all instead of less time for one."""
    args = Namespace(parallel=None, device=torch.device("cuda"), data_dir=Path(), engine="auto", precision="auto")
    args.low_memory = False
    assert run_options(args, [DIGITS]).settings.shared_gpu and run_options(args, [DIGITS]).at_once == 4
    args.parallel = 1
    assert not run_options(args, [DIGITS]).settings.shared_gpu


# -- what is watched -------------------------------------------------------------------------------------------------


def test_lifetimes_equal_a_plain_count():
    torch.manual_seed(0)
    net = dcil.SparseNet(
        torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)), dcil.DPF(sparsity=0.5, steps=10)
    )
    probe = MaskProbe(net, data.load("digits", Path()).loader(64, torch.device("cpu"), 0), EngineSettings())
    born, ended = {}, []
    old = torch.ones(36, dtype=torch.bool)
    for step in range(4, 400, 4):
        new = torch.rand(36) < 0.5
        probe.count(old, new, step)
        for i in range(36):
            if new[i] and not old[i]:
                born[i] = step
            elif old[i] and not new[i] and i in born:
                ended.append(step - born.pop(i))
        old = new
    found = probe.observations()["stays"]
    assert sum(found["ended"]) == len(ended) and found["steps_stayed"] == sum(ended)
    for low, count in zip(found["at_least"], found["ended"], strict=True):
        assert count == sum(low <= stay < 2 * low for stay in ended)
    assert found["still_there"] == len(born) == int((probe.revived_at != NEVER).sum())


def test_accuracy_is_measured_around_a_mask_update(monkeypatch, tmp_path):
    monkeypatch.setattr("dcil.reproduce.probe.EVERY", 1)
    run = CellRun(DPF, 0, tmp_path, 4)
    resume_run(run, CPU, silent)
    found = records.read(run.record).raw
    assert [look[0] for look in found["around_changes"]] == [1, 2, 3, 4]
    assert all(0 <= value <= 100 for look in found["around_changes"] for value in look[2:])
    updates = zip(found["epochs"]["updates"], found["epochs"]["revived"], strict=True)
    revived = round(sum(n * mean for n, mean in updates))  # each of them left again or is still there
    assert sum(found["stays"]["ended"]) + found["stays"]["still_there"] == revived > 0


def test_bad_requests_for_iterations(tmp_path, capsys):
    start = ["iterations", "--out", str(tmp_path)]
    for words, message in (
        (["--at", "0"], "epochs 1 to 300"),
        (["--at", "301"], "epochs 1 to 300"),
        (["--epochs", "6", "--at", "7"], "epochs 1 to 6"),
        (["--cells", "typo"], "must match a cell"),
    ):
        with pytest.raises(UserError, match=message):
            main([*start, *words])
    with pytest.raises(UserError, match="must be given alone"):
        main(["iterations,stability"])
    assert main([*start, "--budget", "0s"]) == 0 and "budget is spent" in capsys.readouterr().out
    assert main([*start, "--dry-run"]) == 0 and "up to 119 epochs of training" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_unusable_folder_or_missing_data_is_reported_once(tmp_path, capsys, tiny_table, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        main(["tiny", "--out", str(tmp_path / "file"), "--epochs", "1"])

    def gone(name, where):
        raise UserError(f"{name} is not there")

    monkeypatch.setattr("dcil.cli.reproduce.data.load", gone)
    with pytest.raises(UserError, match="digits is not there"):
        main(["tiny", "--out", str(tmp_path / "out"), "--epochs", "1"])
    assert not list((tmp_path / "out").rglob("*.json"))
    with pytest.raises(UserError, match="not a folder"):
        main(["--report", "--out", str(tmp_path / "typo"), "--docs", str(tmp_path / "docs")])
    assert not (tmp_path / "docs").exists()


def test_a_trace_of_a_run_that_was_stopped_at_its_epoch(trained, tmp_path):
    run = CellRun(DPF, 0, tmp_path, EPOCHS)
    resume_run(run, CPU, silent, until=1)
    assert not run.done and not list(run.folder.path.glob("at*"))
    iterations.record_trace(iterations.IterationTrace(run, 2), CPU, Budget.of(None), silent)
    (look,) = iterations.read_all(tmp_path)
    kept = records.read(CellRun(DPF, 0, trained, EPOCHS).record).column("top1")
    assert look["top1"][-1] == pytest.approx(kept[1], abs=1e-3) and (run.folder.path / "at1.safetensors").exists()


def test_traces_are_taken_from_the_seed_that_costs_least(trained, tmp_path):
    """Of the seeds of a cell: the one that was looked at, one that left a snapshot, the first."""
    out = tmp_path / "copy"
    shutil.copytree(trained, out)
    chosen = lambda: [look.run.seed for look in iterations.choose_traces(out, [DPF], [2, 3], EPOCHS)]  # noqa: E731
    assert chosen() == [0, 0]
    (CellRun(DPF, 0, out).folder.path / "at1.safetensors").unlink()
    assert chosen() == [1, 0]
    (out / "iterations").mkdir()
    (out / "iterations" / "digits-resnet8-digits-dpf-0.9-seed2-epoch2.json").write_text("{}")
    assert chosen() == [2, 0]


def test_accuracy_after_every_iteration(trained, tmp_path, tiny_table):
    out = tmp_path / "copy"
    shutil.copytree(trained, out)
    for epoch in (2, 3, 1):  # one from a snapshot, one by training anew, since the run went past it, one without either
        (look,) = iterations.choose_traces(out, [DPF], [epoch], EPOCHS)
        iterations.record_trace(look, CPU, Budget.of(None), silent)
    looks = iterations.read_all(out)
    assert [look["epoch"] for look in looks] == [1, 2, 3] and len(looks[0]["top1"]) == 23
    kept = records.read(CellRun(DPF, 0, out, EPOCHS).record).column("top1")
    assert kept[0] is None  # an epoch that no number needs
    assert [look["top1"][-1] for look in looks[1:]] == pytest.approx(kept[1:], abs=1e-3)
    report.build(out, tmp_path / "docs", EPOCHS)
    assert "results-iterations-epoch2.svg" in (tmp_path / "docs" / "results.md").read_text()


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_best_epoch_is_as_sparse_as_the_result(trained):
    found = records.read(CellRun(DPF, 0, trained, EPOCHS).record)
    raw = found.raw | {"epochs": found.raw["epochs"] | {"top1": [99.0, 60.0, 50.0], "sparsity": [0.5, 0.895, 0.9]}}
    assert replace(found, raw=raw).best == 60.0


def paths(value, here=()):
    """Where everything in a record is."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from paths(inner, (*here, key))


@pytest.fixture
def sketched(monkeypatch):
    """Figures are drawn, which reads the records, but not laid out and written, which takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: file.write("<svg></svg>"))


def test_an_altered_record_is_named(trained, tmp_path, tiny_table, sketched):
    """Whatever is missing from it: one line with its name, or a page; never a traceback."""
    out, docs = tmp_path / "copy", tmp_path / "docs"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("runs"))
    file = CellRun(DPF, 0, out).record
    whole = json.loads(file.read_text())
    named = 0
    for path in paths(whole):
        if path[0] == "layers":
            continue
        raw = json.loads(json.dumps(whole))
        inner = raw
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        file.write_text(json.dumps(sealed(raw)))
        try:
            report.build(out, docs, EPOCHS)
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            named += 1
    assert named > 20


STRANGE = [
    None,
    True,
    -1,
    2.5,
    1e308,
    math.nan,
    10**18,
    "x",
    "<img src=x>[a](b)|`_",
    "\\ud800",
    [],
    [[1]],
    {},
    {"a": []},
]


@pytest.mark.slow
def test_a_record_of_strange_values_is_named_or_shown_as_text(trained, tmp_path, tiny_table, sketched):
    """Whatever stands in one of its fields: one line with its name, or a page without markup; never a traceback."""
    out, docs = tmp_path / "copy", tmp_path / "docs"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("runs"))
    file = CellRun(DPF, 0, out).record
    whole = json.loads(file.read_text())
    every = [path for path in paths(whole) if path[0] != "layers"]
    for path, value in zip(every, itertools.cycle(STRANGE), strict=False):
        raw = json.loads(json.dumps(whole))
        inner = raw
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        file.write_text(json.dumps(sealed(raw)).replace("\\\\ud800", "\\ud800"))
        try:
            records.read(file)
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            continue
        report.build(out, docs, EPOCHS)
        assert "<img" not in (docs / "results.md").read_text() + (docs / "results.html").read_text()


def test_notes_and_hardware_of_a_record_are_no_markup(trained, tmp_path, tiny_table):
    out = tmp_path / "copy"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("runs"))
    file = CellRun(DPF, 0, out).record
    raw = json.loads(file.read_text())
    raw["summary"]["notes"] = ["<script>x</script> ![i](j) a|b `c` **d**\n# e"]
    raw["sessions"][0]["environment"]["cpu"] = "<b>fast</b>"
    file.write_text(json.dumps(sealed(raw)))
    report.build(out, tmp_path, EPOCHS)
    text = (tmp_path / "results.md").read_text()
    assert "Ours: &lt;script&gt;x&lt;/script&gt; !\\[i\\](j) a\\|b \\`c\\` \\*\\*d\\*\\* # e." in text
    assert "&lt;b&gt;fast&lt;/b&gt;" in text
    assert "<b>fast" not in (tmp_path / "results.html").read_text()


def test_a_copy_or_other_settings_do_not_count(trained, tmp_path, tiny_table):
    out, docs = tmp_path / "copy", tmp_path / "docs"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("runs"))
    file = CellRun(DPF, 0, out).record
    copy = file.with_name("dpf-0.9-seed0 (copy).json")
    shutil.copyfile(file, copy)
    with pytest.raises(UserError, match=r"it holds digits/resnet8-digits/dpf-0\.9-seed0"):
        report.build(out, docs, EPOCHS)
    copy.unlink()
    raw = json.loads(file.read_text())
    raw["config"]["method"]["every"] = 1000
    file.write_text(json.dumps(sealed(raw)))
    report.build(out, docs, EPOCHS)
    assert "dpf-0.9-seed0" in (docs / "results.md").read_text().partition("## Records left out")[2]


def test_the_record_is_small_and_complete(trained):
    path = CellRun(DIGITS, 0, trained).record
    found = records.read(path)
    assert path.stat().st_size < 20_000
    assert found.raw["config"]["method"]["kl"] == 1.0 and found.trial_epochs == EPOCHS
    assert {"dcil", "source"} <= found.raw["sessions"][0]["code"].keys()
    assert found.raw["layers"] and found.raw["environment"]["torch"] and len(found.column("revived")) == EPOCHS


def test_the_page_is_the_same_every_time(trained, tiny_table, tmp_path):
    for docs in ("a", "b"):
        report.build(trained, tmp_path / docs, EPOCHS)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"results.md", "results.html"} < set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_measurements_stand_beside_the_papers_numbers(trained, tiny_table, tmp_path):
    found = {
        (line.method, line.sparsity): line for line in comparison_rows("tiny", Measurements(records.read_all(trained)))
    }
    dpf = found["dpf-rerun", 0.9]
    assert (dpf.runs, dpf.verdict("last"), dpf.verdict("best")) == (2, "below", "above")
    assert (found["dense", 0.0].verdict("last"), found["dcil", 0.9].verdict("last")) == ("within", "")
    last = [records.read(CellRun(DPF, seed, trained).record).last for seed in (0, 1)]
    report.build(trained, tmp_path, EPOCHS)
    row = next(line for line in (tmp_path / "results.md").read_text().splitlines() if "| dpf-rerun |" in line)
    assert (
        f"{sum(last) / 2:.2f} ±" in row
        and "99.99 ± 0.00" in row
        and re.search(r"last below \(.* beyond\), best above \(.* beyond\)", row)
    )
    missing = next(line for line in (tmp_path / "results.md").read_text().splitlines() if "| dcil | 50 %" in line)
    assert "not run" in missing and "a printed remark" in missing
    page = (tmp_path / "results.md").read_text()
    shown, folded = page.split("<details>", 1)
    assert missing in folded and missing not in shown and row in shown
    assert re.search(r"<summary>The rest of this table: 1 cell not run, about .* of one GPU</summary>", folded)


def test_the_page_begins_with_what_came_out(trained, tiny_table, tmp_path):
    report.build(trained, tmp_path, EPOCHS)
    found = records.read_all(trained)
    ours = Measurements(found)
    by_question = dict(line.strip("| ").split(" | ") for line in overview_lines((tmp_path / "results.md").read_text()))
    assert by_question["Cells of the paper's tables with a run"].startswith("3 of 4, 0 of them with three seeds")
    # Dense is within its ± 100 points; DPF is far below 99.99 ± 0.001 and far above 1.0 ± 0.1.
    last, best = (statistics.fmean(ours.values(DPF, "top-1", column)) for column in ("last", "best"))
    beyond = [f"{value:.2f}" for value in (99.99 - last - 0.002, best - 1.0 - 0.2)]
    assert by_question["Within ± 2 std of the paper's own runs, last epoch"] == (
        f"1 of 2; the others by {beyond[0]} points beyond"
    )
    assert by_question["Within ± 2 std of the paper's own runs, best epoch"].startswith("0 of 1; the others by")
    ahead = ours.values(DIGITS, "top-1", "last")[0] - best
    assert by_question["DCIL at its last epoch above DPF at its best"].startswith(f"{int(ahead > 0)} of 1, by ")
    for name in ("agreement", "sparsity", "stability"):
        assert f"results-{name}.svg" in (tmp_path / "results.md").read_text()
        assert (tmp_path / f"results-{name}.svg").read_text().startswith("<svg")


def overview_lines(page):
    """The rows of the table at the top of the page."""
    section = page.split("## At a glance")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


def test_a_page_without_runs_has_no_overview(trained, tiny_table, tmp_path):
    report.build(trained, tmp_path)
    assert "At a glance" not in (tmp_path / "results.md").read_text()


def test_accuracy_by_the_age_of_the_masks():
    """Ten epochs of 7 steps, masks every 4: epochs 9 and 10, the last fifth, end 63 % 4 = 3 and 70 % 4 = 2 steps on."""
    method, top1 = {"every": 4, "epoch_steps": 7}, [float(epoch) for epoch in range(1, 11)]
    for updates, found in ((2, [(3, 9.0), (2, 10.0)]), (0, []), (7, [])):  # changes that are over, or more of them
        raw = {"config": {"method": method}, "epochs": {"top1": top1, "updates": [updates] * 10}}
        assert mask_age.by_age(records.Record(Path(), "cell", 0, raw)) == found


def test_trials_are_never_mixed_in(trained, tiny_table, tmp_path):
    report.build(trained, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "0 runs of 0 cells are recorded" in text and "Records left out" in text


def test_findings_are_shown_beside_the_cell(trained, tiny_table, tmp_path):
    out = tmp_path / "results"
    shutil.copytree(trained, out)
    (out / "findings.json").write_text(json.dumps({DPF.id: "The masks moved | <late>."}))
    report.build(out, tmp_path, EPOCHS)
    assert "The masks moved \\| &lt;late&gt;." in (tmp_path / "results.md").read_text()
    assert "The masks moved | &lt;late&gt;." in (tmp_path / "results.html").read_text()
    (out / "findings.json").write_text(json.dumps({"digits/resnet8-digits/dpf-0.91": "?"}))
    with pytest.raises(UserError, match=re.escape("digits/resnet8-digits/dpf-0.9'")):
        report.build(out, tmp_path, EPOCHS)


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": "dcil record 1"}', None])
def test_a_damaged_record_is_named_in_one_line(trained, tiny_table, tmp_path, damage):
    out = tmp_path / "results"
    shutil.copytree(trained, out)
    path = CellRun(DPF, 1, out).record
    if damage is None:  # an epoch is missing
        raw = json.loads(path.read_text())
        raw["epochs"]["top1"].pop()
        damage = json.dumps(raw)
    path.write_text(damage)
    with pytest.raises(UserError) as caught:
        report.build(out, tmp_path, EPOCHS)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "results.md").exists()


def test_the_command_trains_and_reports(tiny_table, tmp_path, capsys):
    words = ["tiny", "--cells", "dpf", "--epochs", "1", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--report", "--tidy"]) == 0
    assert main(words) == 0
    assert "1 of 1 runs are recorded" in capsys.readouterr().out
    assert (tmp_path / "trial-1" / "docs" / "results.html").exists()
    assert not list(tmp_path.glob("digits")) and not list((tmp_path / "trial-1" / "runs").rglob("*.safetensors"))


# -- what the repository says ----------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_repository_is_made_from_its_records(tmp_path):
    report.build(ROOT / "results", tmp_path)
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs" / "results.md").read_text()


def test_the_readmes_table_is_of_the_records():
    ours = Measurements(records.read_all(ROOT / "results"))
    methods = {"dense": "dense", "DPF": "dpf", "DCIL": "dcil", "DCIL without KL": "dcil"}
    rows = re.findall(
        r"^\| ([\w ]+) \| (–|\d+ %) \| (\d) \| (.+?) \| .+? \| (.+?) \| (.+?) \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert len(rows) == 7
    for name, sparsity, n, last, best, std in rows:
        share = 0.0 if sparsity == "–" else int(sparsity.split()[0]) / 100
        cell = Cell("cifar10", "resnet20", methods[name], share, kl="without" not in name)
        values = [
            ours.values(cell, "top-1", "last"),
            ours.values(cell, "top-1", "best"),
            ours.values(cell, "std", "last"),
        ]
        assert len(values[0]) == int(n)
        assert spread(values[0]) == last
        assert [f"{statistics.fmean(v):.2f}" for v in values[1:]] == [best, std]


def test_the_results_page_replaces_no_page_of_others(trained, tmp_path, tiny_table):
    (tmp_path / "results.md").write_text("mine")
    with pytest.raises(UserError, match="choose another --docs"):
        report.build(trained, tmp_path, EPOCHS)
    assert [file.name for file in tmp_path.iterdir()] == ["results.md"]


def test_a_record_that_was_changed_by_hand_is_refused(trained, tmp_path, tiny_table):
    out = tmp_path / "copy"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("runs"))
    file = CellRun(DPF, 0, out).record
    raw = json.loads(file.read_text())
    raw["epochs"]["top1"][-1] = 99.0
    file.write_text(json.dumps(raw))
    with pytest.raises(UserError, match="changed after it was written"):
        report.build(out, tmp_path / "docs", EPOCHS)
    del raw["sha256"]  # as earlier versions wrote it
    file.write_text(json.dumps(raw))
    report.build(out, tmp_path / "docs", EPOCHS)
