"""The table of mutants fits the source; make test-all checks that the tests notice them (check.py)."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, SRC


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_text_occurs_once(file):
    text = (SRC / file).read_text()
    assert [m.old for m in MUTANTS if m.file == file and text.count(m.old) != 1] == []


def test_there_are_enough():
    assert len(MUTANTS) >= 40 and len(set(MUTANTS)) == len(MUTANTS)
    assert all(mutant.old != mutant.new for mutant in MUTANTS)
