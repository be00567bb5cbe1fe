"""Wheels for each platform whose compiler is installed: their tag, what is in them, and the C++ example with them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

PACKAGE = Path(__file__).parents[1]
PLAN = PACKAGE / "tests" / "files" / "v1" / "classifier.dcil"
#: Compiler, platform, its number in ELF files, and what runs its programs.
PLATFORMS = [
    ("g++", os.uname().machine, {"x86_64": 62, "aarch64": 183}.get(os.uname().machine, 0), []),
    ("aarch64-linux-gnu-g++", "aarch64", 183, ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cxx", "platform", "number", "emulator"), PLATFORMS, ids=[cxx for cxx, *_ in PLATFORMS])
def test_a_wheel_has_the_tag_of_its_platform_and_runs_there(cxx, platform, number, emulator, tmp_path):
    missing = [name for name in (cxx, *emulator[:1]) if not shutil.which(name)]
    missing += [name for name in ("build", "hatchling", "auditwheel") if not importlib.util.find_spec(name)]
    if missing or not number:
        pytest.skip(f"needs {', '.join(missing) or 'a known processor'}")
    make = [sys.executable, PACKAGE / "native" / "wheels.py", tmp_path / "dist"]
    subprocess.run(make, check=True, env={**os.environ, "CXX": cxx}, capture_output=True)
    (wheel,) = tmp_path.glob("dist/*.whl")
    assert "-py3-none-manylinux_" in wheel.name and wheel.name.endswith(f"_{platform}.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    installed = tmp_path / "dcil_runtime"
    library = installed / "libdcil_runtime.so"
    assert struct.unpack_from("<H", library.read_bytes(), 18) == (number,)
    source = PACKAGE / "examples" / "classify.cpp"
    flags = ["-std=c++17", f"-I{installed / 'include'}", source, "-o", tmp_path / "classify", library]
    subprocess.run([cxx, *flags, f"-Wl,-rpath,{installed}"], check=True)
    x, y = (np.load(PLAN.with_suffix(f".{side}0.npy")) for side in ("in", "out"))
    done = subprocess.run([*emulator, tmp_path / "classify", PLAN], input=x.tobytes(), capture_output=True, check=True)
    assert [int(line) for line in done.stdout.split()] == list(y.argmax(1))
