"""Output that is closed, full, cut off or of a narrow encoding: one line at most, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dcil.cli import main

DCIL = f"{sys.executable} -m dcil"


def shell(command, **environment):
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=inherited | environment, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (f"{DCIL} --help >&-", 0, ""),
        (f"{DCIL} --help >&- 2>&- <&-", 0, ""),
        (f"{DCIL} nonsense 2>&-", 2, ""),
        (f"{DCIL} nonsense 2>/dev/full", 2, ""),
        (f"{DCIL} --help >/dev/full", 1, "dcil: standard output: No space left on device\n"),
        (f"set -o pipefail; {DCIL} --help | true", 1, ""),
    ],
)
def test_output_that_cannot_be_written(command, code, said):
    found, _, err = shell(command)
    assert err == said
    assert found in (code, 0 if "pipefail" in command else code)  # true may still read what is written


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_output_is_one_line_also_without_a_buffer(unbuffered):
    code, _, err = shell(f"{DCIL} --version >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert code in (1, 2)
    assert err == "dcil: standard output: No space left on device\n"


def test_an_encoding_without_the_characters():
    code, out, err = shell(f"{DCIL} --help", PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "COMMAND \\u2026" in out
    code, _, err = shell(f"{DCIL} report $'r\\xff\\x1b'", PYTHONIOENCODING="ascii")
    assert code == 2
    assert err == "dcil: r\\xff\\x1b is not a run folder: it has no config.json\n"


@pytest.mark.parametrize(
    ("error", "said"), [(MemoryError, "memory does not suffice"), (RecursionError, "nested too deeply")]
)
def test_the_limits_of_the_machine_are_one_line(error, said, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setattr("dcil.cli.run", fail)
    assert main(["list"]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_weights_are_kept_under_names_in_utf8(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--epochs", "1", "--device", "cpu", "--out", os.fsdecode(b"r\xff")]) == 2
    assert "must be a path in UTF-8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
