"""The example of a C++ program: compiled with the command that the README shows, run on a stored plan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from make_files import FILES

from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
EXAMPLE = Path(__file__).parents[1] / "examples" / "classify.cpp"
PLAN = FILES / "v1" / "classifier.dcil"


README = EXAMPLE.parents[1] / "README.md"


def block(language: str, within: str) -> str:
    """Return the code block of the README that holds some text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S) if within in text]
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    command, _ = block("sh", "classify.cpp").splitlines()
    if shutil.which("g++") is None:
        pytest.skip("no g++ (Debian: apt install g++)")
    folder = tmp_path_factory.mktemp("example")
    (folder / "classify.cpp").write_text(EXAMPLE.read_text())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, check=True)
    return folder / "classify"


def test_the_readme_shows_it():
    assert block("cpp", "dcil_load") == EXAMPLE.read_text()


def test_it_prints_the_class_of_each_image(program):
    x, y = (np.load(PLAN.with_suffix(f".{side}0.npy")) for side in ("in", "out"))
    done = subprocess.run([program, PLAN], input=x.tobytes(), capture_output=True, check=True)
    assert [int(line) for line in done.stdout.split()] == list(y.argmax(1))


def test_it_says_why_a_file_is_refused(program):
    done = subprocess.run([program, EXAMPLE], input="", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "it does not begin like one\n")
