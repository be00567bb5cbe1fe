"""Paths as words of a shell's command line, and as text for a terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dcil.runs.printable import printable, quoted

NAMES = [b"plain", b"a b", b"it's", b"$(touch x)", b"-x", b"a\nb", b"\x1b[31m", b"r\xff", b"\\x41\xff'", "é".encode()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("name", NAMES)
def test_a_shell_reads_the_path_back(name):
    word = quoted(Path(os.fsdecode(name)))
    assert word.isprintable()
    read = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert read == (b"./-x" if name == b"-x" else name)


def test_a_terminal_shows_every_name():
    assert printable("é\nok") == "é\nok"
    assert printable(os.fsdecode(b"r\xff\x1b[31m")) == "r\\xff\\x1b[31m"
    assert printable("\ud800\u202e") == "\\ud800\\u202e"
