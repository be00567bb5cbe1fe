"""Every command on run folders with altered files: an exit code and at most one line, never a traceback or a wait."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest

from dcil.cli import main
from dcil.runs.seal import sealed

VALUES = [
    None,
    True,
    -1,
    0,
    2.5,
    1e308,
    10**12,
    10**30,
    float("nan"),
    "",
    "x",
    "[/]",
    "\x1b[31m",
    "\ud800",
    [],
    [[1]],
    {},
]
RAW = [b"", b"{", b"null", b"[]", b"\xff\xfe", b"\x00" * 10, b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900]
FILES = ("config.json", "metrics.jsonl", "summary.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "--epochs", "1", "--batch", "400", "--device", "cpu", "--out", str(folder)]) == 0
    return folder


def alter(file, random):
    """Put a strange value into one field of a JSON file, drop the field, or replace the file."""
    kind = random.random()
    if kind < 0.15:
        file.write_bytes(random.choice(RAW))
        return
    if kind < 0.25:
        file.unlink()
        make = random.choice([os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
        make(file)
        return
    record = json.loads(file.read_text())
    inner, key = record, random.choice(list(record))
    while isinstance(inner[key], dict) and inner[key] and random.random() < 0.7:
        inner = inner[key]
        key = random.choice(list(inner))
    if random.random() < 0.2:
        del inner[key]
    else:
        inner[key] = random.choice(VALUES)
    if file.suffix == ".json":
        record = sealed(record)  # else the checksum is all that is ever refused
    file.write_text(json.dumps(record) + "\n" * (file.suffix == ".jsonl"))


@pytest.mark.parametrize("seed", range(24))
def test_an_altered_run_folder_is_used_or_refused(run, tmp_path, capsys, seed):
    chosen = random.Random(seed)
    folder = shutil.copytree(run, tmp_path / "run")
    if seed % 2:
        (folder / "summary.json").unlink()
    alter(folder / chosen.choice(FILES[: 2 + (seed % 2 == 0)]), chosen)
    for words in (
        ["report", str(folder), "--out", str(tmp_path / "report.html")],
        ["eval", str(folder), "--no-layers", "--device", "cpu"],
        ["train", "--resume", "--device", "cpu", "--out", str(folder)],
    )[: 3 if seed % 4 < 2 else 2]:
        code = main(words)
        out, err = capsys.readouterr()
        assert (code, err.count("\n")) in ((0, 0), (2, 1))
        assert "\x1b" not in out + err
