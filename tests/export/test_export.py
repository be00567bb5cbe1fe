"""The export command and function: what they print, what they refuse, and that a failure leaves no file."""

from __future__ import annotations

import json
import os
import re
import resource
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dcil.export
from dcil import DCIL, SparseNet, data, models
from dcil.cli import main
from dcil.errors import UserError
from dcil.export import FORMATS, PROGRAMS, export, load_sparse
from dcil.train import RunFolder
from dcil.train.restore import load_net


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished filter-pruned run, with its test images and what the masked network says of them."""
    folder = tmp_path_factory.mktemp("export") / "run"
    words = ["train", "--epochs", "2", "--batch", "256", "--granularity", "filter", "--sparsity", "0.4"]
    assert main([*words, "--method", "dcil", "--out", str(folder)]) == 0
    loader = data.load("digits", folder).loader(256, torch.device("cpu"), 0)
    images = torch.cat([x for x, _ in loader.test()])
    model = load_net(RunFolder(folder)).finalize()
    with torch.no_grad():
        answers = model(images)
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "answers.npy", answers.numpy())
    return folder


def exported(run, to, out, *words):
    assert main(["export", str(run), "--to", to, "--out", str(out), *words]) == 0
    return out


def test_compact_prints_what_became_of_it(run, tmp_path, capsys):
    exported(run, "compact", tmp_path / "small.pt2")
    out = capsys.readouterr().out
    assert re.search(r"sparsity\s+┃ compact", out)
    assert "computes the same" in out


def test_sparse_gives_the_same_answers(run, tmp_path, capsys):
    file = exported(run, "sparse", tmp_path / "m.dcil")
    out = capsys.readouterr().out
    over = re.search(r"│ sparse\s+│\s+[\d,]+\s+│\s+([\d.]+)\s+│\s+([\d.]+)", out)
    assert over is not None
    assert float(over[2]) <= 1.15
    record = RunFolder(run).record()
    model = load_sparse(file, models.build(record["model"], record["classes"], record["shape"][0])).eval()
    with torch.no_grad():
        found = model(torch.from_numpy(np.load(run / "images.npy"))).numpy()
    assert (found == np.load(run / "answers.npy")).all()


@pytest.mark.parametrize("to", ["torch", "safetensors", "sparse"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision(run, to, dtype, tmp_path):
    read = FORMATS[to][1]
    state = read(exported(run, to, tmp_path / "m", "--dtype", dtype))
    want = load_file(run / "model.safetensors")
    assert state["conv1.weight"].dtype == dcil.export.DTYPES[dtype]
    assert torch.equal(state["conv1.weight"], want["conv1.weight"].to(dcil.export.DTYPES[dtype]))
    assert torch.equal(state["bn1.running_var"], want["bn1.running_var"])


def test_every_export_prints_what_it_costs(run, tmp_path, capsys):
    exported(run, "torch", tmp_path / "m")
    out = capsys.readouterr().out
    for word in ("all parameters", "multiply-adds per image", "layer3.0.conv2", "dense fp32", "prunable weights kept"):
        assert word in out


def wrong(words, capsys):
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_wrong_values_get_one_line_and_leave_no_file(run, tmp_path, capsys):
    out = tmp_path / "m"
    assert "fp16" in wrong(["export", run, "--to", "sparse", "--out", out, "--dtype", "fp8"], capsys)
    assert "fp32 only" in wrong(["export", run, "--to", "compact", "--out", out, "--dtype", "fp16"], capsys)
    assert "compact" in wrong(["export", run, "--to", "torch", "--out", out, "--compact"], capsys)
    assert "2:4" in wrong(["export", run, "--to", "semi-structured", "--out", out], capsys)
    assert "block" in wrong(["export", run, "--to", "compact", "--out", out, "--block", "0"], capsys)
    assert "block" in wrong(["export", run, "--to", "onnx", "--out", out, "--block", "8"], capsys)
    assert "compact" in wrong(["export", run, "--to", "cpu", "--out", out, "--compact"], capsys)
    assert "folder" in wrong(["export", run, "--to", "torch", "--out", tmp_path], capsys)
    assert "unknown option" in wrong(["export", run, "--to", "torch", "--out", out, "--quiet"], capsys)
    assert "did you mean 'compact'" in wrong(["export", run, "--to", "compct", "--out", out], capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", list(PROGRAMS))
def test_a_program_that_computes_something_else_leaves_no_file(to, tmp_path, monkeypatch):
    tolerance = PROGRAMS[to][2]
    monkeypatch.setitem(PROGRAMS, to, (lambda *a: a[2].write_bytes(b"x"), lambda file, x: [x[0] + 1.0], tolerance))
    with pytest.raises(UserError, match="computes something else"):
        export(nn.Linear(2, 2), to, tmp_path / "m", example=torch.randn(1, 2))
    assert list(tmp_path.iterdir()) == []


def test_programs_need_an_example_and_onnx_its_extra(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="example"):
        export(nn.Linear(2, 2), "compact", tmp_path / "m")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'dcil\[onnx\]'"):
        export(nn.Linear(2, 2), "onnx", tmp_path / "m", example=torch.randn(1, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", list(FORMATS))
def test_a_state_that_comes_back_changed_leaves_no_file(to, tmp_path, monkeypatch):
    write, read = FORMATS[to]

    def wrong_number(file):
        state = read(file)
        state["weight"][0, 1] = torch.nan
        return state

    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[:, :2] = 0
    for broken in (lambda file: {}, wrong_number, lambda file: {k: v.double() for k, v in read(file).items()}):
        monkeypatch.setitem(FORMATS, to, (write, broken))
        with pytest.raises(UserError, match="something else"):
            export(model, to, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


class Wild(nn.Module):
    """Two inputs, one of whole numbers; outputs in a nest; a forward that writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words, x):
        self.calls += 1
        y = self.table(words).mean(1) + x
        return {"y": self.linear(y), "more": (y, y.sum(1))}


@pytest.mark.parametrize("to", ["torch", "sparse", "compact", "onnx"])
def test_any_number_of_inputs_and_outputs(to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxscript")
    example = torch.randint(9, (1, 5)), torch.randn(1, 4)
    assert export(Wild(), to, tmp_path / "m", example=example).error < 1e-6
    if to == "torch":
        assert torch.load(tmp_path / "m", weights_only=True)["calls"] == 0


REFUSED = {
    "cannot be exported: its finalize": (
        lambda: SparseNet(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DCIL(sparsity=0.5, steps=9)),
        (3, 2),
    ),
    "cannot be exported: no network": (lambda: {"weight": torch.zeros(2)}, (3, 2)),
    "does not run on the example": (lambda: nn.Linear(2, 2), (3, 7)),
    "with the batch as the first dimension": (lambda: nn.Linear(2, 2), ()),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("to", ["torch", "sparse", "compact", "cpu"])
def test_what_is_no_finished_network_is_refused(to, why, tmp_path):
    make, shape = REFUSED[why]
    with pytest.raises(UserError, match=why) as error:
        export(make(), to, tmp_path / "m", example=torch.randn(shape))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_an_exporter_cannot_do_is_one_line_and_no_file(tmp_path):
    class Branchy(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    for to in ("compact", "onnx", "cpu"):
        with pytest.raises(UserError) as error:
            export(Branchy(), to, tmp_path / "m", example=torch.randn(2, 2))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no CPU kernel for sum"):
        export(Wild(), "cpu", tmp_path / "m", example=(torch.randint(9, (1, 5)), torch.randn(1, 4)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", [*FORMATS, *PROGRAMS])
def test_a_full_disk_is_one_line(to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxscript")
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[:, :2] = 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*: File too large") as error:
            export(model, to, tmp_path / "m", example=torch.randn(2, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_somebody_elses_are_left_alone(run, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert "ordinary" in wrong(["export", run, "--to", "torch", "--out", tmp_path / "pipe"], capsys)
    assert (tmp_path / "pipe").is_fifo()
    for name in ("checkpoint.safetensors", "model.safetensors", "config.json"):
        before = (run / name).read_bytes()
        assert "of the run itself" in wrong(["export", run, "--to", "torch", "--out", run / name], capsys)
        assert (run / name).read_bytes() == before


def test_an_existing_file_is_replaced_only_by_a_good_one(run, tmp_path):
    (tmp_path / "m").write_text("before")
    with pytest.raises(UserError):
        export(nn.Linear(2, 2), "semi-structured", tmp_path / "m")
    assert (tmp_path / "m").read_text() == "before"
    export(nn.Linear(2, 2), "sparse", tmp_path / "m", {"sha256": "mine", "format": "mine"})
    assert load_sparse(tmp_path / "m", nn.Linear(2, 2)).weight.shape == (2, 2)


def test_the_source_network_is_left_alone(tmp_path):
    model = models.build("resnet8-digits", 4, 1).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    export(model, "sparse", tmp_path / "m", example=torch.randn(2, 1, 8, 8))
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_bench_infer_compares_with_the_best_dense_form(capsys):
    """One call of each form; says nothing about time but that the ratios are to the best dense one."""
    from dcil.cli.bench_infer import bench_infer

    words = ["--model", "resnet8-digits", "--sparsity", "0.5", "--rounds", "1", "--size", "8", "--no-onnx"]
    assert bench_infer([*words, "--threads", "1", "--batch", "1,2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["counts"]["compact"]["parameters"] < record["counts"]["dense"]["parameters"]
    for size in (1, 2):
        rows = [row for row in record["timings"] if row["batch"] == size and row["device"] == "cpu"]
        assert min(row["ratio"] for row in rows if row["form"].startswith("dense")) == 1.0
        assert {row["form"].split(",")[0] for row in rows} == {"dense", "masked", "compact", "compact by 8"}
    assert bench_infer([*words, "--threads", "1", "--batch", "1"]) == 0
    assert "x best dense" in capsys.readouterr().out
    with pytest.raises(UserError, match="one of the two"):
        bench_infer([])
