"""Records are told from those of later code, and nothing that was recorded is lost by a change of the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcil.reproduce import records, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.estimate import cached_config
from dcil.reproduce.matching import matches_recipe, settings_equal
from dcil.reproduce.revisions import REVISIONS, older_than

RESULTS = Path(__file__).parents[2] / "results"
EXTRA_UPDATE, BIAS, RIGL = REVISIONS[:3]


def session(after, revision=None):
    return {"after": after, "code": {"dcil": "0.1.0"} | ({} if revision is None else {"revision": revision})}


@pytest.mark.parametrize(
    ("cell", "sessions", "older"),
    [
        (Cell("cifar10", "resnet20", "dcil", 0.9), [session(0)], [EXTRA_UPDATE]),
        (Cell("cifar10", "resnet20", "dcil", 0.9), [], [EXTRA_UPDATE]),
        (Cell("cifar10", "resnet20", "dcil", 0.9), [session(0, 3)], []),
        # Resumed by newer code before the epoch that ends with the target step, or after it.
        (Cell("cifar10", "resnet20", "dcil", 0.9), [session(0), session(224, 1)], []),
        (Cell("cifar10", "resnet20", "dcil", 0.9), [session(0), session(225, 1)], [EXTRA_UPDATE]),
        (Cell("cifar10", "resnet20", "dense"), [session(0)], []),
        (Cell("cifar10", "resnet20", "gmp", 0.9), [session(0)], []),
        (Cell("cifar10", "wrn-28-2", "dpf", 0.9), [session(0), session(1, 3)], [BIAS]),
        (Cell("cifar10", "wrn-28-2", "dense"), [session(0, 1)], [BIAS]),
        (Cell("cifar10", "resnet20", "rigl", 0.9), [session(0, 2), session(200, 3)], [RIGL]),
    ],
)
def test_what_a_run_was_trained_without(cell, sessions, older):
    assert older_than(cached_config(cell, None), 391, sessions) == older


def test_the_records_say_themselves_that_masks_were_updated_at_the_target_step():
    """One update more than the method of today has: the number in the record agrees with the revision."""
    checked = 0
    for record in records.read_all(RESULTS):
        config, method = cached_config(tables.all_cells()[record.cell], None), record.raw["config"]["method"]
        if config.method in ("dcil", "dpf"):
            regular = (method["steps"] - 1) // 16
            older = EXTRA_UPDATE in older_than(config, method["epoch_steps"], record.raw["sessions"])
            assert sum(record.column("updates")) == regular + older, record.path
            checked += 1
    assert checked


def test_every_record_of_the_repository_matches_its_recipe():
    found = records.read_all(RESULTS)
    cells = tables.all_cells()
    assert found and all(matches_recipe(record.raw["config"], cells[record.cell], None) for record in found)


def test_settings_that_came_later_do_not_exclude_a_record():
    recorded = {"lr": 0.1, "settings": {"gradual": True}, "method": {"scope": {"type": "Uniform"}}}
    present = {"lr": 0.1, "new": 1, "settings": {"gradual": True, "scope": "uniform"}}
    assert settings_equal(recorded, present | {"method": {"scope": {"type": "Uniform", "more": 1}}})
    assert not settings_equal(recorded, present | {"method": {"scope": {"type": "UniformFloor"}}})
    assert not settings_equal(recorded, present | {"lr": 0.2})
