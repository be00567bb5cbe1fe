"""The command line as a person meets it: what it prints, and one clear line for every wrong value."""

from __future__ import annotations

import json
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dcil import METHODS, UserError
from dcil.cli import COMMANDS, main
from dcil.export import read_torch
from dcil.runs.atomic import current_umask
from dcil.train import RunFolder
from dcil.train.restore import load_net

QUICK = ["--epochs", "2", "--batch", "256"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *QUICK, "--method", "dcil", "--out", str(folder)]) == 0
    return folder


def wrong(words, capsys):
    """Run a command that must fail; its one line."""
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("dcil: ")
    assert "Traceback" not in out + err
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], ["'trian'", "'train'"]),
        (["train", "--method", "dcli"], ["'dcli'", "did you mean 'dcil'", "dpf"]),
        (["train", "--method", "dcil,dcil"], ["once"]),
        (["train", "--model", "resnet2O"], ["'resnet2O'", "did you mean 'resnet20'"]),
        (["train", "--model", "wrn-27-2"], ["27"]),
        (["train", "--dataset", "cifar"], ["'cifar'", "'cifar10'"]),
        (["train", "--recipe", "cifar10-resnet2"], ["did you mean 'cifar10-resnet20'"]),
        (["train", "--granularity", "filters"], ["did you mean 'filter'", "weight"]),
        (["train", "--recipe=--"], ["--recipe", "must have a value"]),
        (["train", "--schedule", "steps"], ["did you mean 'step'"]),
        (["train", "--sparsity", "95"], ["sparsity must be", "< 1, got 95", "0.95"]),
        (["train", "--sparsity", "a lot"], ["--sparsity", "'a lot'", "number"]),
        (["train", "--epochs", "1.5"], ["--epochs", "'1.5'", "whole number"]),
        (["train", "--epochs", "0"], ["--epochs must be >= 1, got 0"]),
        (["train", "--target-epoch", "99"], ["--target-epoch must be", "60", "got 99"]),
        (["train", "--lr", "-1"], ["--lr must be > 0", "got -1.0"]),
        (["train", "--lr", "nan"], ["--lr must be a finite number, got nan"]),
        (["train", "--seed", "-3"], ["--seed must be >= 0, got -3"]),
        (["train", "--milestones", "30,x"], ["'30,x'", "150,225"]),
        (["train", "--set", "kll=0"], ["'kll'", "'kl'"]),
        (["train", "--set", "kl=much"], ["kl=much", "float"]),
        (["train", "--set", "kl"], ["NAME=VALUE"]),
        (["train", "--method", "dpf", "--set", "freeze=maybe"], ["freeze=maybe", "bool"]),
        (["train", "--set", "every=-1"], ["every must be", "got -1"]),
        (["train", "--sparsty", "0.9"], ["'--sparsty'", "'--sparsity'"]),
        (["train", "--device", "cuda:77"], ["cuda:77", "cpu"]),
        (["train", "--device", "gpu"], ["gpu", "allowed: auto, cpu, cuda"]),
        (["train", "--device", "meta"], ["meta", "allowed: auto, cpu, cuda"]),
        (["train", "--weight-decay", "inf"], ["--weight-decay must be a finite number, got inf"]),
        (["train", "--set", "kl=inf"], ["kl must be a finite number, got inf"]),
        (["train", "--set", "ramp=0.5"], ["ramp=0.5", "--target-epoch"]),
        (["train", "--set", "criterion=obs2"], ["'obs2'", "'obs'"]),
        (["train", "--set", "scope=unifrom"], ["'unifrom'", "'uniform'"]),
        (["train", "--granularity", "4:2"], ["4:2", "N < M"]),
        (["train", "--granularity", "2:4", "--sparsity", "0.9"], ["sparsity must be <= 0.5, got 0.9"]),
        (["train", "--method", "sfp", "--granularity", "weight"], ["SFP", "Filter"]),
        (["train", "--method", "rigl,sfp", "--set", "kl=0"], ["'kl'"]),
        (["train", "extra"], ["'extra'"]),
        (["eval", "nowhere"], ["nowhere", "config.json"]),
        (["report", "nowhere"], ["nowhere"]),
        (["export", "nowhere", "--to", "safetensors", "--out", "x"], ["nowhere"]),
        (["export", "nowhere", "--to", "safetensor", "--out", "x"], ["did you mean 'safetensors'"]),
        (["export", "nowhere", "--to", "torch"], ["--out"]),
        (["list", "dcill"], ["did you mean 'dcil'"]),
        (["bench", "stepp"], ["did you mean 'step'"]),
    ],
)
def test_a_wrong_value_gets_one_line_and_writes_nothing(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = wrong(words, capsys)
    for part in said:
        assert part in line, line
    assert list(tmp_path.iterdir()) == []


def test_missing_data_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("dcil.data.fetch", None)
    line = wrong(["train", "--dataset", "cifar10", "--data-dir", tmp_path / "d", "--out", tmp_path / "r"], capsys)
    assert "cifar-10-batches-bin" in line
    assert not (tmp_path / "r").exists()


def test_a_run_is_not_overwritten_and_not_resumed_as_another(run, capsys):
    before = (run / "checkpoint.safetensors").read_bytes()
    assert "--resume" in wrong(["train", *QUICK, "--out", run], capsys)
    assert "epochs 2, not 9" in wrong(["train", "--resume", "--epochs", 9, "--out", run], capsys)
    assert "method dcil, not dpf" in wrong(["train", "--resume", "--method", "dpf", "--out", run], capsys)
    assert (run / "checkpoint.safetensors").read_bytes() == before


def test_resume_means_this_run(run, tmp_path, capsys):
    assert "'nonsense'" in wrong(["train", "--resume", "--recipe", "nonsense", "--out", run], capsys)
    assert "was started with" in wrong(["train", "--resume", "--recipe", "cifar10-resnet20", "--out", run], capsys)
    assert "is a run itself" in wrong(["train", "--method", "dense,dpf", "--out", run], capsys)
    (tmp_path / "parent" / "dpf").mkdir(parents=True)
    (tmp_path / "parent" / "dpf" / "config.json").write_text("{}")
    assert "--method dpf" in wrong(["train", "--resume", "--out", tmp_path / "parent"], capsys)


def test_a_place_that_cannot_be_written_is_said_in_one_line(run, capsys):
    assert "/dev/null" in wrong(["export", run, "--to", "torch", "--out", "/dev/null/x.pt"], capsys)
    assert "/dev/null" in wrong(["train", *QUICK, "--out", "/dev/null/x"], capsys)


def test_damaged_run_files_are_named(tmp_path, run, capsys):
    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    (broken / "summary.json").write_text("{")
    assert "summary.json is damaged" in wrong(["train", "--resume", "--out", broken], capsys)
    record = json.loads((broken / "config.json").read_text())
    del record["classes"]
    (broken / "config.json").write_text(json.dumps(record))
    assert "config.json is damaged" in wrong(["eval", broken], capsys)


def test_files_can_be_read_by_others(run):
    for file in run.glob("*.safetensors"):
        assert file.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def test_a_folder_with_other_things_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("dear")
    assert "not a run folder" in wrong(["train", *QUICK, "--out", tmp_path], capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_resuming_a_finished_run_shows_it_again(run, capsys):
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert "95.00 %" in capsys.readouterr().out


def test_flags_override_and_scale_the_recipe(tmp_path):
    words = ["train", "--epochs", "4", "--batch", "300", "--method", "dcil", "--set", "kl=0", "--set", "every=4"]
    assert main([*words, "--granularity", "filter", "--sparsity", "0.3", "--out", str(tmp_path / "r")]) == 0
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert (config["target_epoch"], config["milestones"]) == (3, [2, 3])
    assert config["method"]["kl"] == 0.0
    assert config["method"]["every"] == 4
    assert config["method"]["granularity"] == {"type": "Filter"}


def test_several_methods_in_one_comparison(tmp_path, capsys):
    words = ["train", *QUICK, "--method", "dense,dpf", "--set", "freeze=true", "--out", str(tmp_path / "c")]
    assert main(words) == 0
    assert json.loads((tmp_path / "c" / "dpf" / "config.json").read_text())["method"]["freeze"] is True
    out = capsys.readouterr().out
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"dense", "dpf", "report.html"}
    for word in ("dense", "dpf", "Last", "Best", "Std", "report.html", "next:"):
        assert word in out


def test_eval_counts(run, capsys):
    assert main(["eval", str(run), "--layers"]) == 0
    out = capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert f"{summary['weights']:,}" in out
    assert f"{summary['kept']:,}" in out
    top1 = re.search(r"pruned\D+([\d.]+)", out)
    assert top1 is not None
    assert float(top1[1]) == pytest.approx(summary["top1_last"], abs=0.005)
    assert "super" in out
    assert "layer3.0.conv2" in out


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_export_is_the_finished_model(run, to, tmp_path, capsys):
    out = tmp_path / "model.file"
    assert main(["export", str(run), "--to", to, "--out", str(out)]) == 0
    state = load_file(out) if to == "safetensors" else torch.load(out, weights_only=True)
    want = load_file(run / "model.safetensors")
    assert state.keys() == want.keys()
    assert all(torch.equal(state[k], want[k]) for k in want)
    assert "kept" in capsys.readouterr().out


def test_export_for_the_cpu_runs_with_numpy(run, tmp_path):
    from dcil.runtime import NativeMissing, load

    out = tmp_path / "net.dcil"
    code = main(["export", str(run), "--to", "cpu", "--out", str(out)])
    try:
        plan = load(out) if code == 0 else None
    except NativeMissing:
        plan = None
    if plan is None:
        pytest.skip("the native module is not built here")
    net = load_net(RunFolder(run))
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(plan(x.numpy())), net(x), rtol=1e-4, atol=1e-5)


def test_export_into_a_folder_is_refused(run, tmp_path, capsys):
    assert "is a folder" in wrong(["export", run, "--to", "torch", "--out", tmp_path], capsys)
    assert list(tmp_path.iterdir()) == []


def test_export_that_reads_back_differently_leaves_no_file(run, tmp_path, capsys, monkeypatch):
    import dcil.export

    def lossy(state, file, notes):
        torch.save({k: v.half().float() for k, v in state.items()}, file)

    monkeypatch.setitem(dcil.export.FORMATS, "torch", (lossy, dcil.export.read_torch))
    assert "was not written" in wrong(["export", run, "--to", "torch", "--out", tmp_path / "m.pt"], capsys)
    assert list(tmp_path.iterdir()) == []


def test_list_and_help(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for word in ("dcil", "dpf", "dense", "resnet20", "digits", "cifar100-wrn-28-2"):
        assert word in out
    assert main(["list", "dcil"]) == 0
    assert "temperature" in capsys.readouterr().out
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            raise SystemExit(main([command, "--help"]))
        assert stop.value.code == 0


def test_bench_step_prints_ratios(capsys):
    assert main(["bench", "step", "--models", "resnet8-digits", "--batch", "4", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "DCIL" in out
    assert "x dense" in out


def test_a_page_among_the_runs_is_passed_over(run, tmp_path, capsys):
    """runs/table/* has the comparison's own report in it."""
    page = tmp_path / "report.html"
    page.write_text("")
    assert main(["report", str(page), str(run), "--out", str(tmp_path / "new.html")]) == 0
    assert (tmp_path / "new.html").stat().st_size > 1000
    assert "not a run folder" in wrong(["report", page, "--out", tmp_path / "none.html"], capsys)


def test_an_unfinished_run_says_so(run, tmp_path, capsys):
    folder = tmp_path / "stopped"
    shutil.copytree(run, folder)
    (folder / "summary.json").unlink()
    for words in (["export", folder, "--to", "sparse", "--out", tmp_path / "x.sparse"], ["eval", folder]):
        assert main([str(word) for word in words]) == 0
        assert "ends at epoch 2 of 2; dcil train --resume" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_training_wants_a_gpu(capsys):
    assert "dcil bench step" in wrong(["bench", "train"], capsys)


@pytest.mark.parametrize("words", [["--set", "class_dim=3"], ["--lr", "1e30"]])
def test_a_run_that_fails_in_its_first_epoch_leaves_nothing(words, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--method", "dcil", "--epochs", "1", "--out", str(out), *words]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


def test_runs_of_every_method_can_be_read(tmp_path, capsys):
    words = ["--recipe", "digits", "--method", "all", "--epochs", "1", "--batch", "360"]
    assert main(["train", *words, "--out", str(tmp_path)]) == 0
    for method in METHODS:
        assert main(["eval", str(tmp_path / method)]) == 0


def test_a_damaged_file_of_torch_is_named(run, tmp_path, capsys):
    file = tmp_path / "net.pt"
    assert main(["export", str(run), "--to", "torch", "--out", str(file)]) == 0
    whole, draw = file.read_bytes(), random.Random(1)
    for _ in range(60):
        altered = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.randrange(1, 40) if altered else 0):
            altered[draw.randrange(min(len(altered), 3000))] = draw.randrange(256)
        file.write_bytes(altered)
        try:
            read_torch(file)
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
