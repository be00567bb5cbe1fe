"""Many runs from one command: the grid, the list, resuming, and one that fails without the others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from dcil.cli import main
from dcil.errors import UserError
from dcil.train.sweep import grid

QUICK = ["--epochs", "1", "--batch", "300", "--device", "cpu"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def test_the_grid_is_every_combination_and_dense_comes_once():
    axes = {"method": ["dense", "dpf"], "sparsity": [0.9, 0.95], "seed": [0, 1]}
    runs = grid(axes)
    assert len(runs) == 2 + 4
    assert {"method": "dense", "seed": 1} in runs
    assert {"method": "dpf", "sparsity": 0.95, "seed": 0} in runs
    assert grid({}) == [{}]
    with pytest.raises(UserError, match="did you mean 'dcil'"):
        grid({"method": ["dcli"]})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parallel", ["1", "3"])
def test_a_sweep_trains_them_all_and_goes_on_where_it_stopped(tmp_path, parallel, capsys, device):
    words = [
        "sweep",
        *QUICK,
        "--device",
        device,
        "--methods",
        "dpf,dcil",
        "--seeds",
        "0,1",
        "--parallel",
        parallel,
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    names = sorted(p.parent.name for p in tmp_path.glob("*/summary.json"))
    assert len(names) == 4
    assert "digits-resnet8-digits-dcil-weight0.95-seed1" in names
    assert "4 of 4 runs are complete" in capsys.readouterr().out
    first = tmp_path / names[0]
    before = (first / "checkpoint.safetensors").read_bytes()
    (tmp_path / names[-1] / "summary.json").unlink()
    assert main(words) == 0
    assert (first / "checkpoint.safetensors").read_bytes() == before
    assert (tmp_path / names[-1] / "summary.json").exists()


def test_runs_of_a_sweep_are_the_runs_of_train(tmp_path):
    assert main(["sweep", *QUICK, "--seeds", "0,1", "--parallel", "2", "--out", str(tmp_path / "sweep")]) == 0
    for seed in ("0", "1"):
        assert main(["train", *QUICK, "--seed", seed, "--out", str(tmp_path / seed)]) == 0
        one = load_file(tmp_path / seed / "checkpoint.safetensors")
        two = load_file(
            tmp_path / "sweep" / f"digits-resnet8-digits-dcil-weight0.95-seed{seed}" / "checkpoint.safetensors"
        )
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_one_failing_run_leaves_the_others_alone(tmp_path, capsys):
    file = tmp_path / "list.json"
    runs = [{"name": "wild", "lr": 1e30}, {"name": "tame", "settings": {"kl": 0}}]
    file.write_text(json.dumps(runs))
    out = tmp_path / "runs"
    assert main(["sweep", *QUICK, "--list", str(file), "--out", str(out)]) == 1
    assert not (out / "wild" / "summary.json").exists()
    assert json.loads((out / "tame" / "config.json").read_text())["method"]["kl"] == 0
    assert (out / "tame" / "summary.json").exists()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "wild failed" in err
    assert "must be finite" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "dcli", "--out", "x"], "did you mean 'dcil'"),
        (["--seeds", "0,x", "--out", "x"], "--seeds: each must be a whole number (int), got 'x'"),
        (["--seeds", "0"], "--out is missing"),
        (["--parallel", "0", "--out", "x"], "--parallel"),
        (["--list", "nowhere.json", "--out", "x"], "nowhere.json"),
        (["--engine", "grap", "--out", "x"], "did you mean 'graph'"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *QUICK, *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def refused(tmp_path, capsys, content, *more):
    """Run a sweep of a list that must be refused; return the line, after checking that nothing was changed."""
    file = tmp_path / "list.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert main(["sweep", *QUICK, "--list", str(file), "--out", str(tmp_path / "out"), *more]) == 2
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "name", ["../thesis", "/tmp/thesis", "a/b", "..", ".", "", "x/", ".git", "a\nb", "report.html", "n" * 300]
)
def test_a_run_is_one_folder_below_out(tmp_path, capsys, name):
    assert repr(name)[1:-1][:20] in refused(tmp_path, capsys, [{"name": "first"}, {"name": name}])


@pytest.mark.parametrize("there", ["foreign", "link", "broken", "file"])
def test_what_is_no_run_folder_is_left_alone(tmp_path, capsys, there):
    out = tmp_path / "out"
    out.mkdir()
    if there == "foreign":
        (out / "x").mkdir()
        (out / "x" / "model.safetensors").write_text("not ours")
    elif there == "file":
        (out / "x").write_text("not ours")
    else:
        (tmp_path / "thesis").mkdir()
        (out / "x").symlink_to(tmp_path / ("thesis" if there == "link" else "nowhere"))
    assert str(out / "x") in refused(tmp_path, capsys, [{"name": "first"}, {"name": "x"}])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "at least one"),
        (b"{}", "not a list of objects"),
        (b"[1]", "not a list of objects"),
        (b"\xff", "can't decode"),
        (b"[" * 200_000, "nested"),
        ([{"seed": 0}, {"epochs": 2.5}], "epochs must be a whole number (int), got 2.5"),
        ([{"settings": ["kl"]}], "settings must be an object of settings"),
        ([{"settings": [["kl", 1]]}], "settings must be an object of settings"),
        ([{"settings": {"kl": [1]}}], "kl of DCIL must be a number"),
        ([{"model": ["resnet20"]}], "model must be a text"),
        ([{"name": 3}], "name must be a text"),
        ([{"milestones": {"1": 2}}], "milestones must be epochs"),
        ([{"lr": 10**400}], "64 bits"),
        ([{"method": ""}], "unknown method ''"),
        (b'[{"seed": 1, "seed": 2}]', "twice"),
        (b'[{"name": "\\ud800"}]', "lone surrogates"),
    ],
)
def test_the_whole_list_is_checked_before_anything_is_written(tmp_path, capsys, content, said):
    assert said in refused(tmp_path, capsys, content)


def test_a_list_and_a_grid_are_two_sweeps(tmp_path, capsys):
    assert "--seeds" in refused(tmp_path, capsys, [{"seed": 1}], "--seeds", "0,1")
    assert main(["sweep", *QUICK, "--seeds", ",", "--out", str(tmp_path / "out")]) == 2
    assert "at least one value" in capsys.readouterr().err


def test_names_are_no_markup(tmp_path, capsys):
    file = tmp_path / "list.json"
    file.write_text(json.dumps([{"name": "[bold]a [b] $(x)"}]))
    assert main(["sweep", *QUICK, "--list", str(file), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "[bold]a [b] $(x): epoch 1 of 1" in out
