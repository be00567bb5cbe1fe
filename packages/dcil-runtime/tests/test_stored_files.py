"""Plan files written by earlier versions: read today, they give what they always gave."""

from __future__ import annotations

import struct
from pathlib import Path

import definition
import numpy as np
import pytest
import quantized_definition
from make_files import FILES

from dcil_runtime import PlanError, instruction_set, load, read, write
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
STORED = sorted(FILES.glob("v*/*.dcil"))


def arrays(file: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(file.with_suffix(".in0.npy")), np.load(file.with_suffix(".out0.npy"))


def every(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda file: f"{file.parent.name}-{file.stem}")


@every(STORED)
@pytest.mark.parametrize("isa", ["avx512", "avx2", "wide", "neon", "portable"])
def test_a_stored_file_gives_its_outputs(file, isa):
    if not instruction_set(isa):
        pytest.skip(f"this CPU does not run {isa}")
    plan = load(file, isa=isa, tune_seconds=0)
    x, y = arrays(file)
    assert f"v{plan.info()['version']}" == file.parent.name
    for batch in (len(x), 1):
        assert np.abs(plan(x[:batch]) - y[:batch]).max() <= 1e-6 * np.abs(y).max()


@every(STORED)
def test_what_is_read_from_a_stored_file_can_be_written_again(file, tmp_path):
    write(read(file), tmp_path / "again.dcil")
    x, y = arrays(file)
    assert np.abs(load(tmp_path / "again.dcil", tune_seconds=0)(x) - y).max() <= 1e-6 * np.abs(y).max()


@every([file for file in STORED if file.parent.name == "v1"])
def test_outputs_of_version_1_are_those_of_the_definition(file):
    x, y = arrays(file)
    assert np.abs(definition.run(read(file), x) - y).max() <= 1e-6 * np.abs(y).max()


@every([file for file in STORED if file.stem.startswith("int8_")])
def test_outputs_of_int8_files_are_those_of_the_definition(file):
    x, y = arrays(file)
    assert np.abs(quantized_definition.run(read(file), x) - y).max() <= 1e-6 * np.abs(y).max()


def test_the_files_of_version_1_have_every_operator_and_option_of_it():
    ops = [op for file in FILES.glob("v1/*.dcil") for op in read(file).ops]
    assert {op.kind for op in ops} == set(definition.OPERATORS)
    assert {op.act[0] for op in ops} == {"none", "clamp", "leaky", "silu", "hardswish"}
    assert {name for op in ops for name in op.arrays} >= {"index", "weight", "bias", "scale", "shift", "twin_scale"}
    for kind in ("conv", "linear"):
        same = [op for op in ops if op.kind == kind]
        assert {"index" in op.arrays for op in same} == {op.residual >= 0 for op in same} == {True, False}
    assert {op.count_pad for op in ops} == {op.twin for op in ops} == {0, 1}


@pytest.mark.parametrize("version", [0, 99, 2**32 - 1])
def test_a_version_that_the_reader_does_not_know_is_refused_in_one_line(version, tmp_path):
    raw = bytearray(STORED[0].read_bytes())
    struct.pack_into("<I", raw, 8, version)
    (tmp_path / "net.dcil").write_bytes(raw)
    with pytest.raises(PlanError, match=f"version {version}, but this dcil-runtime reads 1 to") as found:
        load(tmp_path / "net.dcil")
    assert "\n" not in str(found.value)
