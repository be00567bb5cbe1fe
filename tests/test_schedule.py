from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcil import Constant, Cubic
from dcil.schedule import Timeline

fractions = st.floats(0, 1, exclude_max=True)
steps = st.integers(1, 200_000)


@given(final=fractions, steps=steps, period=st.integers(1, 5000))
def test_endpoints(final, steps, period):
    schedule = Cubic(final, steps, period)
    assert schedule(0) == 0.0
    assert schedule(steps) == final
    assert schedule(steps + 12345) == final


@given(final=fractions, steps=steps, period=st.integers(1, 5000), at=st.lists(st.integers(0, 210_000), min_size=2))
def test_monotone_and_within_bounds(final, steps, period, at):
    values = [Cubic(final, steps, period)(step) for step in sorted(at)]
    assert values == sorted(values)
    assert all(0 <= value <= final for value in values)


@given(final=fractions, initial=fractions, steps=steps, step=st.integers(0, 210_000))
def test_initial_sparsity_bounds_it_too(final, initial, steps, step):
    value = Cubic(final, steps, initial=initial)(step)
    assert min(initial, final) <= value <= max(initial, final)


TIME = Timeline(0.9, 13, 4, 0.1, hold=1, every=4, first=4, last=12, extra=(13,), steps=20, seed=0)


def test_updates_happen_from_the_first_step_to_the_last_both_included():
    assert [step for step in range(25) if Constant().due(step, TIME)] == [4, 8, 12, 13]


def test_constant_prunes_at_the_first_update():
    assert [Constant().sparsity(step, TIME) for step in (0, 3, 4, 5)] == [0.1, 0.1, 0.9, 0.9]


def test_the_authors_curve_by_epoch():
    """s(e) = s * (1 - (1 - e / E)^3) with the integer epoch."""
    schedule = Cubic(0.95, 225 * 391, period=391)
    for epoch in (0, 1, 100, 224):
        for step in (epoch * 391, epoch * 391 + 390):
            assert schedule(step) == pytest.approx(0.95 * (1 - (1 - epoch / 225) ** 3), abs=1e-15)
    assert schedule(225 * 391 - 1) < 0.95 == schedule(225 * 391)


def test_smooth_by_step():
    assert Cubic(0.8, 100)(50) == pytest.approx(0.8 * 0.875)
    assert Cubic(0.8, 100)(51) > Cubic(0.8, 100)(50)
