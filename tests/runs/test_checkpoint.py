"""A checkpoint is taken only as it was written, and only by its own run."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dcil.cli import main
from dcil.errors import UserError
from dcil.runs.seal import sealed
from dcil.train import Config, RunFolder, train
from dcil.train.config import to_json
from dcil.train.restore import load_net

CPU = torch.device("cpu")
CONFIG = Config(epochs=2, target_epoch=1, milestones=(1,), batch=500)


class Stop(Exception):
    pass


def stopped(config: Config, folder: Path) -> Path:
    """A run that was stopped after its first epoch, with a checkpoint."""

    def progress(epoch, part, row):
        if epoch == 1 and row is not None:
            raise Stop

    with pytest.raises(Stop):
        train(config, RunFolder(folder), Path("data"), CPU, progress)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return stopped(CONFIG, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def run(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "run"))


def contents(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, "pt") as opened:
        notes = dict(opened.metadata())
    return load_file(file), notes


def read(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def refusal(folder: Path, config: Config = CONFIG) -> str:
    """The one line that a run is refused with; nothing in its folder is changed by that."""
    before = {file.name: read(file) for file in folder.iterdir() if file.is_file()}
    with pytest.raises(UserError) as error:
        train(config, RunFolder(folder), Path("data"), CPU)
    assert {file.name: read(file) for file in folder.iterdir() if file.is_file()} == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_any_flipped_bit_is_noticed(run):
    file = run / "checkpoint.safetensors"
    whole, draw = file.read_bytes(), random.Random(15)
    for _ in range(60):
        place = draw.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"checkpoint\.safetensors"):
            load_net(RunFolder(run))
    file.write_bytes(whole)
    load_net(RunFolder(run))


@pytest.mark.parametrize("what", ["momentum", "mask", "norm", "extra", "note", "dtype", "old format", "no checksum"])
def test_what_is_missing_or_added_is_noticed(run, what):
    file = run / "checkpoint.safetensors"
    tensors, notes = contents(file)
    if what == "momentum":
        del tensors["optimizer.0.momentum_buffer"]
    elif what == "mask":
        del tensors[next(key for key in tensors if tensors[key].dtype == torch.bool)]
    elif what == "norm":
        del tensors[next(key for key in tensors if "running_mean" in key)]
    elif what == "extra":
        tensors["other"] = torch.ones(1)
    elif what == "note":
        notes["epoch"] = "2"
    elif what == "dtype":
        tensors["optimizer.0.momentum_buffer"] = tensors["optimizer.0.momentum_buffer"].double()
    elif what == "old format":
        notes["format"] = "dcil checkpoint 1"
    else:
        del notes["sha256"]
    save_file(tensors, file, notes)
    assert str(file) in refusal(run)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"sparsity": 0.9},
        {"granularity": "filter", "sparsity": 0.5},
        {"batch": 400},
        {"method": "dpf"},
        {"settings": {"kl": 0.5}},
        {"lr": 0.05},
        {"weight_decay": 0.0},
        {"momentum": 0.5},
        {"milestones": ()},
        {"epochs": 3},
        {"finetune_epochs": 1},
        {"schedule": "step"},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_run_is_named_with_the_setting(run, tmp_path, other):
    foreign = stopped(replace(CONFIG, **other), tmp_path / "foreign")
    for name in ("checkpoint.safetensors", "checkpoint.json", "metrics.jsonl"):
        shutil.copy(foreign / name, run / name)
    said = refusal(run)
    assert "must have the settings of its run" in said
    with pytest.raises(UserError, match="must have the settings of its run"):
        load_net(RunFolder(run))


def test_the_same_settings_with_other_metrics_are_another_run(run):
    file = run / "metrics.jsonl"
    row = json.loads(file.read_text())
    file.write_text(json.dumps(row | {"top1": row["top1"] + 1}) + "\n")
    assert "metrics of its run" in refusal(run)


def test_a_config_edited_by_hand_is_refused(run, capsys):
    file = run / "config.json"
    record = json.loads(file.read_text())
    edits = [{"sparsity": 0.5}, {"epochs": 4}, {"seed": 3}, {"granularity": "filter"}, {"target_epoch": 2}]
    edits += [{"schedule": "step"}, {"settings": {"kl": 0.0}}, {"lr": 0.3}, {"batch": 250}, {"momentum": 0.0}]
    edits += [{"method": record["method"] | {"sparsity": 0.5}}, {"method": record["method"] | {"kl": 0.1}}]
    edits += [{"method": record["method"] | {"name": "dpf", "type": "DPF"}}, {"total_epochs": 9}, {"model": "wrn-10-1"}]
    for edit in edits:
        file.write_text(json.dumps(record | edit))
        before = {f.name: f.read_bytes() for f in run.iterdir()}
        for words in (["train", "--resume"], ["train", "--resume", "--epochs", "2"]):
            assert main([*words, "--out", str(run)]) == 2, edit
        assert main(["eval", str(run)]) == 2, edit
        assert len(capsys.readouterr().err.splitlines()) == 3
        assert {f.name: f.read_bytes() for f in run.iterdir()} == before


def test_checkpoints_of_format_1_are_resumed(run, tmp_path):
    """Without checksum and settings; what can be checked is."""
    train(CONFIG, RunFolder(tmp_path / "whole"), Path("data"), CPU)
    file = run / "checkpoint.safetensors"
    tensors, notes = contents(file)
    old = {name: notes[name] for name in ("epoch", "step")} | {"format": "dcil checkpoint 1"}
    for wrong in ({"epoch": "2"}, {"step": "4"}, {"epoch": "-1"}, {"format": "dcil checkpoint 9"}):
        save_file(tensors, file, old | wrong)
        refusal(run)
    save_file({k: v for k, v in tensors.items() if k != "optimizer.3.momentum_buffer"}, file, old)
    assert "optimizer.3.momentum_buffer is missing" in refusal(run)
    save_file(tensors, file, old)
    train(CONFIG, RunFolder(run), Path("data"), CPU)
    one, two = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "whole"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_network_of_other_shapes_is_named_by_the_tensor(run):
    file = run / "checkpoint.safetensors"
    tensors, notes = contents(file)
    key = next(key for key in tensors if key.endswith("conv1.weight"))
    save_file(
        tensors | {key: tensors[key][:1].clone()}, file, {**notes, "format": "dcil checkpoint 1"} | {"sha256": ""}
    )
    assert "checksum" in refusal(run)
    old = {name: notes[name] for name in ("epoch", "step")} | {"format": "dcil checkpoint 1"}
    save_file(tensors | {key: tensors[key][:1].clone()}, file, old)
    said = refusal(run)
    assert "conv1.weight" in said
    assert "Error(s)" not in said


def test_a_checkpoint_that_cannot_be_read_is_not_called_missing(run, monkeypatch):
    file, opened = run / "checkpoint.safetensors", Path.open

    def denied(self, *args, **kwargs):
        if self == file:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read: Permission denied" in refusal(run)
    monkeypatch.undo()
    file.unlink()
    assert "is missing" in refusal(run)  # not trained anew in silence: checkpoint.json says that there was one
    file.symlink_to(run / "nowhere")
    assert "is missing" in refusal(run)
    file.unlink()
    os.mkfifo(file)
    assert "no ordinary file" in refusal(run)


def test_checkpoint_json_follows_the_checkpoint(run):
    (run / "checkpoint.json").write_text("{}")
    train(CONFIG, RunFolder(run), Path("data"), CPU, until=1)
    assert json.loads((run / "checkpoint.json").read_text())["epoch"] == "1"


def test_the_result_of_a_finished_run_is_checked(run, capsys):
    train(CONFIG, RunFolder(run), Path("data"), CPU)
    model, summary = run / "model.safetensors", run / "summary.json"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main(["eval", str(run)]) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err
    model.write_bytes(whole)
    text = summary.read_text()
    summary.write_text(json.dumps(json.loads(text) | {"kept": 1}))
    assert main(["eval", str(run)]) == 2
    assert "summary.json is damaged: it was changed" in capsys.readouterr().err
    summary.write_text(json.dumps(sealed(json.loads(text) | {"kept": 1})))  # of another run
    assert main(["eval", str(run)]) == 2
    assert "summary.json must fit" in capsys.readouterr().err
    summary.unlink()  # the way out that the line names
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert model.read_bytes() == whole


def test_a_run_that_was_begun_meanwhile_is_not_taken_over(run, tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match="holds a run already"):
        train(CONFIG, RunFolder(run), Path("data"), CPU, resume=False)
    assert "must have the settings" in refusal(run, replace(CONFIG, seed=5))
    train(CONFIG, RunFolder(run), Path("data"), CPU)
    for wrong in ({"config": CONFIG, "resume": False}, {"config": replace(CONFIG, seed=5)}):
        with pytest.raises(UserError, match="holds another run"):
            train(folder=RunFolder(run), data_dir=Path("data"), device=CPU, **wrong)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "model.safetensors").write_text("somebody's")
    assert "no config.json" in refusal(tmp_path / "strange")


def test_a_comparison_refuses_what_another_process_put_into_its_folders(run, tmp_path, capsys, monkeypatch):
    """The runs are planned first; the folder of the second is filled while the first is trained."""
    import dcil.cli.train as command

    out, train_one = tmp_path / "out", command.train_one

    def filled(console, planned, *rest):
        if planned.name == "dcil":
            shutil.copytree(run, planned.folder.path)
        train_one(console, planned, *rest)

    monkeypatch.setattr(command, "train_one", filled)
    words = ["train", "--method", "dense,dcil", "--epochs", "1", "--batch", "500", "--out", str(out)]
    assert main(words) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert not (out / "dcil" / "summary.json").exists()


def test_changes_by_hand_to_a_finished_run_are_noticed(run, tmp_path, capsys):
    train(CONFIG, RunFolder(run), Path("data"), CPU)
    report = ["report", str(run), "--out", str(tmp_path / "report.html")]
    for name, change in (
        ("config.json", lambda record: record | {"lr": 0.2}),
        ("config.json", lambda record: record | {"shape": [1, 1, 1]}),
        ("summary.json", lambda record: record | {"top1_last": 99.0}),
        ("metrics.jsonl", lambda record: record | {"top1": 99.0}),
    ):
        file = run / name
        before = file.read_text()
        file.write_text(json.dumps(change(json.loads(before.splitlines()[0] if name == "metrics.jsonl" else before))))
        assert main(report) == 2
        err = capsys.readouterr().err
        assert name in err and err.count("\n") == 1
        file.write_text(before)
    assert main(report) == 0


def test_changes_by_hand_to_an_unfinished_run_are_noticed(run, tmp_path, capsys):
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"top1": 99.0}) + "\n" for row in rows))
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 2
    assert "must hold the metrics of its run" in capsys.readouterr().err


def test_a_config_that_was_changed_before_the_first_checkpoint_is_refused(tmp_path, capsys):
    folder = RunFolder(tmp_path / "new")
    folder.path.mkdir()
    folder.begin(to_json(CONFIG, CONFIG.build_method(4), {"classes": 10, "shape": [1, 8, 8]}))
    file = folder.path / "config.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    assert main(["train", "--resume", "--out", str(folder.path)]) == 2
    assert "config.json is damaged: it was changed" in capsys.readouterr().err


def test_runs_of_earlier_versions_have_no_seals(run, tmp_path):
    train(CONFIG, RunFolder(run), Path("data"), CPU)
    for name in ("config.json", "summary.json"):
        record = json.loads((run / name).read_text())
        record = {key: value for key, value in record.items() if key not in ("sha256", "metrics_sha256")}
        (run / name).write_text(json.dumps(record))
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["eval", str(run), "--device", "cpu"]) == 0
