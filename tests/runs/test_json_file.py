"""JSON files that are damaged or hostile are refused with an error, and never hang or crash the reader."""

from __future__ import annotations

import os

import pytest

from dcil.runs.json_file import DEEPEST, parse, parse_object, read_text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "nested more than"),
        ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "nested more than"),
        ('{"a": "\\ud800"}', "lone surrogates"),
        ('{"\\ud800": 1}', "lone surrogates"),
        ('["\\u001b[31m"]', "control characters"),
        ('["\\u0000"]', "control characters"),
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
        ("1" * 5000, "4300 digits"),
        ("1" * 50, "64 bits"),
        ("", "Expecting value"),
    ],
)
def test_what_could_not_be_printed_or_written_again_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_ordinary_json_passes():
    text = '{"a": [1, 2.5, null, true, "é\\n\\t"], "b": {}}'
    assert parse(text) == {"a": [1, 2.5, None, True, "é\n\t"], "b": {}}
    assert parse("[" * DEEPEST + "]" * DEEPEST)
    with pytest.raises(ValueError, match="not a JSON object"):
        parse_object("[]")


def test_only_regular_files_of_utf8_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_text(tmp_path / name)
    for strange in ("loop", "nowhere"):
        (tmp_path / strange).symlink_to(strange if strange == "loop" else "gone")
        with pytest.raises(OSError):
            read_text(tmp_path / strange)
    with pytest.raises(OSError):
        read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(tmp_path / "latin")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf{}")
    assert parse_object(read_text(tmp_path / "marked")) == {}
