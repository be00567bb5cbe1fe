"""Accuracy by sparsity: the axis is in order, whichever method was run at which sparsity."""

from __future__ import annotations

import pytest

from dcil.reproduce import overview_figures
from dcil.reproduce.cells import Cell


class Measured:
    """The last accuracy falls as the sparsity grows."""

    def values(self, cell: Cell, quantity: str, column: str) -> list[float]:
        return [100 * (1 - cell.sparsity**8)]


def test_sparsities_are_in_order(monkeypatch):
    seen = []

    def panels(title, caption, networks, draw_one, file):
        from matplotlib.figure import Figure

        axes = Figure().subplots()
        draw_one(axes, next(iter(networks.values())))
        seen.append(axes)

    monkeypatch.setattr(overview_figures, "panels", panels)
    cells = [Cell("cifar100", "wrn-28-2", method, s) for method, s in (("dpf", 0.95), ("dcil", 0.99), ("dcil", 0.9))]
    overview_figures.by_sparsity({("cifar100", "wrn-28-2"): cells}, Measured())
    assert [label.get_text() for label in seen[0].get_xticklabels()] == ["90 %", "95 %", "99 %"]
    dcil = [line for line in seen[0].get_lines() if len(line.get_xdata()) == 2]
    assert [list(line.get_xdata()) for line in dcil] == [[0, 2]] * 2
    assert list(dcil[0].get_ydata()) == pytest.approx([100 * (1 - s**8) for s in (0.9, 0.99)])
