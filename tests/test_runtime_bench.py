"""The CPU benchmark: masks as promised, engines side by side, one JSON record."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from dcil import UserError
from dcil.bench import cpu
from dcil.commands.bench_cpu import bench_cpu
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


@built
def test_engines_side_by_side(tmp_path, capsys):
    threads = torch.get_num_threads()
    words = "--models resnet8-digits --masks erk --sparsity 0.9 --batch 1,3 --engines ours,torch --rounds 2 --out"
    assert bench_cpu([*words.split(), str(tmp_path / "bench.json")]) == 0
    torch.set_num_threads(threads)
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [case["batch"] for case in record["cases"]] == [1, 3]
    for case in record["cases"]:
        assert case["engines"]["ours"]["error"] < 1e-5 and case["ratios"]["torch"] == 1
    assert "x best dense fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--engines", "our"], "did you mean 'ours'"),
        (["--sparsity", "1.5"], "not a sparsity"),
        (["--batch", "1,x"], "not a list"),
        (["--masks", "magic"], "unknown masks"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_words_are_explained(words, why):
    with pytest.raises(UserError, match=why):
        bench_cpu(["--models", "resnet8-digits", *words])
