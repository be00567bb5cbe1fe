"""Train, export in each format, load in a new process that has never heard of dcil: the same predictions."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dcil.export
from dcil import data, models
from dcil.cli import main
from dcil.errors import UserError
from dcil.export import FORMATS, PROGRAMS, export, load_sparse
from dcil.train import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished filter-pruned run, with its test images and what the masked network says of them."""
    folder = tmp_path_factory.mktemp("export") / "run"
    words = ["train", "--epochs", "2", "--batch", "256", "--granularity", "filter", "--sparsity", "0.4"]
    assert main([*words, "--method", "dcil", "--out", str(folder)]) == 0
    loader = data.load("digits", folder).loader(256, torch.device("cpu"), 0)
    images = torch.cat([x for x, _ in loader.test()])
    model = RunFolder(folder).load().finalize()
    with torch.no_grad():
        answers = model(images)
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "answers.npy", answers.numpy())
    return folder


def exported(run, to, out, *words):
    assert main(["export", str(run), "--to", to, "--out", str(out), *words]) == 0
    return out


def elsewhere(run, script):
    """Run ``script`` in a new process without dcil; it must leave the outputs for the images in ``out``."""
    start = "import sys; sys.modules['dcil'] = None; import numpy as np; images = np.load('images.npy')\n"
    end = "\nnp.save('out.npy', out)"
    done = subprocess.run([sys.executable, "-c", start + script + end], cwd=run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.load(run / "out.npy"), np.load(run / "answers.npy")


def assert_same_answers(found, want, tolerance):
    assert np.abs(found - want).max() <= tolerance
    assert (found.argmax(1) == want.argmax(1)).all()  # to the last image


def test_compact_runs_with_torch_alone(run, tmp_path, capsys):
    exported(run, "compact", run / "small.pt2")
    out = capsys.readouterr().out
    assert re.search(r"sparsity\s+┃ compact", out)
    assert "computes the same" in out
    script = """
import torch
model = torch.export.load('small.pt2').module()
out = torch.cat([model(torch.from_numpy(part)) for part in np.array_split(images, 3)]).detach().numpy()
"""
    assert_same_answers(*elsewhere(run, script), 1e-5)


@pytest.mark.parametrize("words", [[], ["--compact"]])
def test_onnx_runs_with_onnxruntime_alone(run, tmp_path, words):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exported(run, "onnx", run / "m.onnx", *words)
    script = """
sys.modules['torch'] = None
import onnxruntime
session = onnxruntime.InferenceSession('m.onnx')
notes = session.get_modelmeta().custom_metadata_map
assert notes['method'] == 'dcil' and 0.2 < float(notes['sparsity']) < 1 and notes['run'] == 'run', notes
out = np.concatenate([session.run(None, {'input': part})[0] for part in np.array_split(images, 3)])
"""
    assert_same_answers(*elsewhere(run, script), 1e-4)


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
    assert "did you mean 'compact'" in wrong(["export", run, "--to", "compct", "--out", out], capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", list(PROGRAMS))
def test_a_program_that_computes_something_else_leaves_no_file(to, tmp_path, monkeypatch):
    tolerance = PROGRAMS[to][2]
    monkeypatch.setitem(PROGRAMS, to, (lambda *a: a[2].write_bytes(b"x"), lambda file, x: x[:, :2] + 1.0, tolerance))
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


def test_the_source_network_is_left_alone(tmp_path):
    model = models.build("resnet8-digits", 4, 1).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    export(model, "sparse", tmp_path / "m", example=torch.randn(2, 1, 8, 8))
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_bench_infer_compares_with_the_best_dense_form(capsys):
    """One call of each form; says nothing about time but that the ratios are to the best dense one."""
    from dcil.commands.bench_infer import bench_infer

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
