"""The benchmark of a step on the CPU: every network that it offers runs, and ratios are those of its times."""

from __future__ import annotations

import re
import warnings

import pytest

from dcil.bench import step


@pytest.mark.parametrize("model", ["resnet8-digits", "gpt-1-32"])
def test_every_kind_of_network(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.run([model], batch=4, sequences=2, rounds=1)
    rows = [
        re.findall(r"[\w.]+", line.split(model)[1]) for line in capsys.readouterr().out.splitlines() if model in line
    ]
    assert [row[0] for row in rows] == ["Dense", "DPF", "DCIL"]
    dense = float(rows[0][1])
    for _, ms, ratio, *_ in rows:
        assert float(ms) > 0 and abs(float(ratio) - float(ms) / dense) < 0.1 * float(ratio) + 0.1 / dense
