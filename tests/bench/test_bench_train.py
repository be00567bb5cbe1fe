"""The benchmark of the engine: every share of the batch in turn, ratios to dense training by the same engine."""

from __future__ import annotations

import json

import pytest

from dcil.bench import train
from dcil.bench.train import Case
from dcil.cli import main

TINY = {"resnet8-digits": Case("resnet8-digits", 8, 8, 10, 8 * 6, 8)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(train, "CASES", TINY)


def test_shares_and_engines_are_chosen(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "found.json"
    words = ["bench", "train", "--models", "resnet8-digits", "--device", "cpu", "--out", str(out)]
    assert main([*words, "--shares", "1,0.25", "--engines", "graph", "--parallel", "none"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["method"], row["share"]) for row in rows] == [
        ("dense", 1.0), ("dpf", 1.0), ("dcil", 1.0), ("dcil", 0.25), ("dcil", 1.0), ("dcil", 0.25)
    ]  # fmt: skip
    assert ["low memory" in row["route"] for row in rows] == [False] * 4 + [True] * 2
    assert all(row["engine"] == "graph" and row["ms_per_step"] > 0 for row in rows)
    assert "dcil, share 0.25" in capsys.readouterr().out
    for wrong, why in (("--shares=0", "must be > 0 and <= 1, got 0"), ("--engines=fast", "unknown engine 'fast'")):
        assert main([*words, wrong]) == 2
        assert why in capsys.readouterr().err


def test_the_share_reaches_the_method(monkeypatch):
    dataset = train.random_data(TINY["resnet8-digits"])
    settings = train.EngineSettings("eager", "fp32")
    trainer = train.build(TINY["resnet8-digits"], "dcil", dataset, train.torch.device("cpu"), settings, share=0.25)
    assert trainer.net.method.super_share == 0.25
