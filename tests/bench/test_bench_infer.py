"""Engines side by side: masks as promised, every engine in turn, one JSON record."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch
from torch import nn

from dcil import UserError
from dcil.bench import cpu
from dcil.cli import main
from dcil.cli.bench_infer import bench_infer
from dcil_runtime.native import LIBRARY

built = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")


@pytest.mark.parametrize("masks", ["uniform", "erk"])
@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_random_masks_keep_the_promised_number_of_weights(masks, sparsity):
    model = cpu.masked("resnet20", masks, sparsity)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    kept, total = sum(int(w.count_nonzero()) for w in weights), sum(w.numel() for w in weights)
    assert abs(kept / total - (1 - sparsity)) < 2e-4
    density = [int(w.count_nonzero()) / w.numel() for w in weights]
    if masks == "erk":
        assert density[0] > density[-1]
    else:
        assert max(density) - min(density) < 0.02


def test_random_masks_of_transformers_leave_the_classifier():
    model = cpu.masked("vit-ti-4", "uniform", 0.9)
    kept = {
        name: float((m.weight != 0).float().mean()) for name, m in model.named_modules() if hasattr(m, "in_features")
    }
    assert kept.pop("head") == 1 and all(abs(share - 0.1) < 0.01 for share in kept.values()) and len(kept) > 40


SMALL = ["--model", "resnet8-digits", "--masks", "erk", "--sparsity", "0.9", "--engines", "ours,torch"]


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@built
def test_engines_read_tokens(capsys):
    words = [
        "--model",
        "gpt-1-64",
        "--masks",
        "uniform",
        "--no-forms",
        "--batch",
        "1",
        "--threads",
        "1",
        "--rounds",
        "1",
    ]
    assert bench_infer([*words, "--engines", "ours,torch", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["cases"][0]["rows"]
    assert {row["engine"] for row in rows} == {"ours", "torch"} and all(row["error"] < 1e-5 for row in rows)


@built
def test_engines_under_random_masks(tmp_path, capsys):
    words = [*SMALL, *["--sparsity", "0.9,0.5", "--batch", "1,3", "--threads", "1", "--rounds", "2", "--out"]]
    assert bench_infer([*words, str(tmp_path / "bench.json")]) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    machine = record["machine"]
    assert machine["kernels"] and machine["versions"]["torch"] == importlib.metadata.version("torch")
    assert [case["batch"] for case in record["cases"]] == [1, 3]
    for case in record["cases"]:
        rows = {(row["engine"], row["masks"]): row for row in case["rows"]}
        assert set(rows) == {("ours", "erk 0.9"), ("ours", "erk 0.5"), ("torch", "")}
        assert rows["ours", "erk 0.5"]["error"] < 1e-5 and rows["torch", ""]["ratio"] == 1
    assert "as the best dense engine" in capsys.readouterr().out


@built
def test_engines_on_a_trained_run_come_with_its_compact_forms(tmp_path, capsys):
    train = "train --recipe digits --method dcil --sparsity 0.9 --epochs 1 --model resnet8-digits --out"
    assert main([*train.split(), str(tmp_path / "run")]) == 0
    capsys.readouterr()
    words = [str(tmp_path / "run"), *SMALL[-2:], "--batch", "2", "--threads", "1", "--rounds", "1"]
    assert bench_infer([*words, "--no-onnx", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["engines"][0]["rows"][0]["masks"].startswith("dcil 0.9") and record["counts"]["compact"]["parameters"]
    assert bench_infer([*words, "--no-forms"]) == 0
    assert "dcil 0.9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--engines", "our"], "did you mean 'ours'"),
        (["--sparsity", "1.5"], "must be >= 0 and < 1, got 1.5"),
        (["--sparsity", "x"], "must be a number"),
        (["--batch", "1,x"], "must be a whole number"),
        (["--masks", "magic"], "unknown masks"),
        (["--rounds", "0"], "from 1 to"),
        (["--rounds", "-1"], "from 1 to"),
        (["--size", "-5"], "from 1 to"),
        (["--batch", "65536", "--model", "resnet18"], "at most 67,108,864 pixels"),
        (["--threads", "1000000000"], "from 1 to"),
    ],
)
def test_wrong_words_are_explained(words, why):
    with pytest.raises(UserError, match=why):
        bench_infer([*SMALL, *words])
