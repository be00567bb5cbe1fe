"""The training loops that make_step is compared with."""

from __future__ import annotations

import json

import pytest
import torch

from dcil.bench import loops
from dcil.bench.loops import ALL, LOOPS, Case, make, measure, run
from dcil.cli import main

CPU = torch.device("cpu")
TINY = {"resnet8-digits": Case(4, 10, 8), "gpt-1-32": Case(2, 11, length=6)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(loops, "CASES", TINY)


@pytest.mark.parametrize("loop", ["eager", "make_step", "make_step low memory"])
@pytest.mark.parametrize("method", ["dense", "dcil"])
@pytest.mark.parametrize("name", TINY)
def test_a_loop_trains(name, method, loop, monkeypatch):
    built = []
    monkeypatch.setattr(loops, "build", lambda *args, build=loops.build: built.append(build(*args)) or built[0])
    training = make(name, method, loop, CPU)
    before = [p.detach().clone() for p in built[0].parameters()]
    training.step(), training.step()
    assert all(not torch.equal(p, old) for p, old in zip(built[0].parameters(), before, strict=True) if p.dim() > 1)
    assert ("eager" in training.how()) == (loop not in LOOPS)  # of make_step: nothing is recorded on a CPU


def test_a_loop_that_torch_cannot_run_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: 1 / 0)
    rows = measure("resnet8-digits", "compile", CPU, 1, 1)
    assert [(row.method, row.ms) for row in rows] == [("dense", None), ("dcil", None)]
    assert all(row.how == "ZeroDivisionError: division by zero" for row in rows)
    assert all(row.ms > 0 for row in measure("resnet8-digits", "eager", CPU, 1, 1))


def test_a_training_that_fails_while_it_is_timed_is_left_out(monkeypatch):
    made = loops.make

    def failing(name, method, loop, device):
        training, left = made(name, method, loop, device), iter(range(50))
        return training._replace(step=lambda: next(left) and None) if method == "dcil" else training

    monkeypatch.setattr(loops, "make", failing)
    dense, dcil = measure("resnet8-digits", "eager", CPU, 1, 8)
    assert dense.ms > 0 and dcil.ms is None and dcil.how.startswith("StopIteration")


def test_the_table_sets_dcil_beside_dense(tmp_path, capsys):
    run(["resnet8-digits"], [loop for loop in ALL if "compile" not in loop], CPU, tmp_path / "out.json", 1, 1)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["method"], row["loop"]) for row in rows] == [
        *[(method, loop) for loop in ("eager", "make_step") for method in ("dense", "dcil")],
        ("dcil", "make_step low memory"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("DCIL /", "masks %", "memory"))


def test_the_command(tmp_path, capsys):
    words = ["bench", "train", "--loop", "own", "--device", "cpu", "--out", str(tmp_path / "x.json")]
    assert main([*words, "--models", "gpt-1-32", "--loops", "eager,make_step", "--calls", "1"]) == 0
    assert main([*words, "--models", "gpt-1-32", "--loops", "fast"]) == 2
    assert "unknown loop 'fast': allowed: compile, compile + CUDA graphs, dcil train" in capsys.readouterr().err
