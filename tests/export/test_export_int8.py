"""Export in int8: what it prints, how near it is to fp32, which layers stay in fp32, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dcil import data
from dcil.cli import main
from dcil.data import imagefolder
from dcil.errors import UserError
from dcil.export import Change, export, export_int8
from dcil.runtime import sensitivity
from dcil.runtime.lower import lower
from dcil.runtime.quantize import calibrated, layers_of, quantized, with_int8
from dcil.runtime.ranges import quant_for, squared_error
from dcil_runtime import Op, Plan, load
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")


class Small(nn.Module):
    """A shortcut, a pool, a concatenation and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.next = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.side, self.fc = nn.Conv2d(8, 4, 1), nn.Linear(12, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        y = torch.max_pool2d(torch.relu(self.next(x) + x), 2)
        return self.fc(torch.cat([y, self.side(y)], 1).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small().eval()


def batches(model, count=32):
    x = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return x, model(x).argmax(1)


def test_ranges_clip_what_is_rare_and_zeros_stay_zeros():
    random = np.random.default_rng(0)
    sample = np.append(np.abs(random.standard_normal(10_000)), 60).astype(np.float32)
    scale, zero = quant_for(sample)
    assert zero == 0 and 255 * scale < 60
    assert squared_error(sample, (scale, zero)) < squared_error(sample, (60 / 255, 0))
    signed = quant_for(random.standard_normal(10_000).astype(np.float32))
    assert 100 < signed[1] < 156
    assert quant_for(np.zeros(3, np.float32)) == (1.0, 0)


def test_weights_are_symmetric_and_zeros_stay_zeros():
    weight = np.array([[[[0.5]], [[-2.0]]], [[[0.0]], [[0.0]]]], np.float32)
    op = with_int8(Op("conv", (0,), arrays={"weight": weight, "bias": np.zeros(2)}))
    assert op.arrays["weight"].ravel().tolist() == [32, -127, 0, 0]
    assert op.arrays["weight_scale"].tolist() == [np.float32(2 / 127), 1]


@pytest.mark.parametrize("drop", [[], [0], [1], [0, 1, 2, 3], [3]])
def test_any_layers_may_stay_in_fp32(model, drop):
    x, _ = batches(model)
    network = lower(model, x[:1])
    layers = layers_of(network)
    found = quantized(network, calibrated(network, x.numpy()), [k for i, k in enumerate(layers) if i not in drop])
    want, got = (Plan(each, tune_seconds=0)(x.numpy()) for each in (network, found))
    assert sum("weight_scale" in op.arrays for op in found.ops) == len(layers) - len(drop)
    assert np.abs(got - want).max() < (1e-5 if len(drop) == len(layers) else 0.1 * np.abs(want).max())


def test_what_is_written_is_what_was_measured(model, tmp_path):
    x, y = batches(model)
    written, change = export_int8(model, tmp_path / "net.dcil", x, [(x, y)])
    assert (change.fp32, change.images, change.layers) == (100, 32, 4)
    got = load(tmp_path / "net.dcil")(x.numpy()).argmax(1)
    assert 100 * float((got == y.numpy()).mean()) == change.int8 >= 90
    assert written.size < written.dense / 2 or written.size < 4000


def test_layers_that_change_predictions_stay_in_fp32(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "MOST_CHANGED", -1.0)
    x, y = batches(model)
    _, change = export_int8(model, tmp_path / "net.dcil", x, [(x, y)])
    assert len(change.kept) == 4 and change.kept[0] == change.worst[0][0]


def test_a_loss_beyond_the_bound_is_said():
    change = Change(90.0, 89.5, 1000, 64, [("operator 1 (linear, 2 to 3)", 0.01)], [], 4)
    assert "0.50 points of top-1, more than the bound of 0.3" in change.lines(0.3)[-1]
    assert len(change.lines(0.6)) == len(change.lines(0.3)) - 1


def test_the_command(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "net.dcil"
    words = ["--epochs", "2", "--model", "resnet8-digits", "--method", "gmp", "--sparsity", "0.8", "--out", str(run)]
    assert main(["train", *words]) == 0
    export_words = ["export", str(run), "--to", "cpu", "--out", str(out), "--dtype", "int8"]
    capsys.readouterr()
    assert main([*export_words, "--calibrate", "64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"top-1 [\d.]+ % in fp32, [\d.]+ % in int8 \([+-][\d.]+ points\) on 360 test images", said)
    assert "operator" in said and load(out).notes["dtype"] == "int8"
    for more, why in ([], "give --calibrate"), (["--calibrate", "999999"], "65536"), (["--calibrate", "60000"], "1437"):
        assert main([*export_words, *more]) == 2
        assert why in capsys.readouterr().err
    assert main(["export", str(run), "--to", "onnx", "--out", str(out), "--dtype", "int8", "--calibrate", "8"]) == 2
    assert "--to cpu only" in capsys.readouterr().err


def test_int8_without_images_is_refused(model, tmp_path):
    with pytest.raises(UserError, match="export_int8"):
        export(model, "cpu", tmp_path / "net.dcil", dtype="int8", example=torch.zeros(1, 3, 12, 12))


def test_several_outputs_are_refused_and_nothing_is_written(tmp_path):
    class Two(Small):
        def forward(self, x):
            return super().forward(x), self.stem(x)

    x, y = batches(Small().eval())
    with pytest.raises(UserError, match="one input of images and one output"):
        export_int8(Two().eval(), tmp_path / "m", x, [(x, y)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bound", ["nan", "-1"])
def test_a_bound_that_bounds_nothing_is_refused(bound, tmp_path, capsys):
    words = ["export", str(tmp_path / "run"), "--to", "cpu", "--out", str(tmp_path / "net.dcil"), "--dtype", "int8"]
    assert main([*words, "--calibrate", "8", "--bound", bound]) == 2
    assert "--bound must be >= 0" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--calibrate", "--bound", "--data-dir", "--damaged"])
def test_options_of_int8_are_refused_without_it(option, tmp_path, capsys):
    value = "skip" if option == "--damaged" else "8"
    assert main(["export", "run", "--to", "cpu", "--out", str(tmp_path / "net.plan"), option, value]) == 2
    assert capsys.readouterr().err == f"dcil: {option} goes with --to cpu --dtype int8 only (drop it)\n"


def test_damaged_images_may_be_left_out(tmp_path, monkeypatch, capsys):
    """As of the other commands that read images; as many are calibrated on as were asked for."""
    random = np.random.default_rng(0)
    for split, count in (("train", 70), ("val", 4)):
        for i in range(count):
            path = tmp_path / split / f"c{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8)).save(path)
    tiny = lambda where, fetch: replace(imagefolder.load(where), crop=8, resize=10, workers=0)  # noqa: E731
    monkeypatch.setitem(data.DATASETS, "imagefolder", tiny)
    run, images, out = tmp_path / "run", ["--data-dir", str(tmp_path)], str(tmp_path / "net.dcil")
    words = [
        "--dataset",
        "imagefolder",
        "--model",
        "resnet8-digits",
        "--epochs",
        "1",
        "--batch",
        "35",
        "--out",
        str(run),
    ]
    assert main(["train", *words, *images, "--device", "cpu"]) == 0
    for damaged in ("train/c0/2.png", "val/c1/1.png"):
        (tmp_path / damaged).write_bytes(b"")
    words = ["export", str(run), "--to", "cpu", "--out", out, "--dtype", "int8", "--calibrate", "69", *images]
    assert main(words) == 2 and "not readable as an image" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="left out of its batch"):
        assert main([*words, "--damaged", "skip"]) == 0
    assert "on 3 test images, calibrated on 69" in " ".join(capsys.readouterr().out.split())
