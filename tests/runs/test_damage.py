"""A file whose contents are wrong is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcil.errors import UserError
from dcil.runs.damage import naming_file


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: json.loads("{"), "f.json is damaged: not valid JSON (Expecting"),
        (lambda: {}["seed"], "f.json is damaged: field 'seed' is missing; start the run anew"),
        (lambda: [][0], "f.json is damaged: list index out of range; start the run anew"),
        (lambda: int("x\ny"), "f.json is damaged: invalid literal"),
        (lambda: Path("/nowhere/f.json").read_text(), "f.json is missing; start the run anew"),
    ],
)
def test_one_line_with_the_file_the_reason_and_the_way_out(wrong, said):
    with pytest.raises(UserError) as error, naming_file("f.json"):
        wrong()
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_the_inner_file_is_named_once():
    inner = naming_file("inner", problem="is refused", advice="restore it")
    with pytest.raises(UserError, match=r"^inner is refused: no; restore it$"), naming_file("outer"), inner:
        raise UserError("no")


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), naming_file("f.json"):
        _ = 1 // 0
