"""The example of a C++ program: compiled with the flags that the command prints, run on a stored plan."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    cxx = shutil.which("g++") or shutil.which("clang++")
    if cxx is None:
        pytest.skip("no C++ compiler (Debian: apt install g++)")
    flags = [
        subprocess.run([sys.executable, "-m", "dcil_runtime", f"--{kind}"], capture_output=True, text=True).stdout
        for kind in ("cflags", "libs")
    ]
    program = tmp_path_factory.mktemp("example") / "classify"
    compile_flags, link_flags = (text.split() for text in flags)
    subprocess.run(
        [cxx, "-std=c++17", "-Wall", "-Werror", *compile_flags, EXAMPLE, "-o", program, *link_flags], check=True
    )
    return program


def test_it_prints_the_class_of_each_image(program):
    x, y = (np.load(PLAN.with_suffix(f".{side}0.npy")) for side in ("in", "out"))
    done = subprocess.run([program, PLAN], input=x.tobytes(), capture_output=True, check=True)
    assert [int(line) for line in done.stdout.split()] == list(y.argmax(1))


def test_it_says_why_a_file_is_refused(program):
    done = subprocess.run([program, EXAMPLE], input="", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "it does not begin like one\n")
