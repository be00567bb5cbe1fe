"""Plan files written by earlier versions: read today, they give what they always gave."""

from __future__ import annotations

import struct
from pathlib import Path

import definition
import definition_tokens
import numpy as np
import pytest
import quantized_definition
from make_files import FILES, TOKENS

from dcil_runtime import Plan, PlanError, instruction_set, load, read, write
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
STORED = sorted(FILES.glob("v*/*.dcil"))
TOKEN_FILES = [FILES / f"v{v}" / f"{make.__name__}.dcil" for v, made in TOKENS.items() for make in made]


def arrays(file: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the stored inputs and outputs."""
    names = (sorted(file.parent.glob(f"{file.stem}.{kind}*.npy")) for kind in ("in", "out"))
    inputs, outputs = ([np.load(name) for name in found] for found in names)
    return inputs, outputs


def results(plan: Plan, inputs: list[np.ndarray]) -> list[np.ndarray]:
    found = plan(*inputs)
    return list(found) if isinstance(found, tuple) else [found]


def check(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for y, want in zip(found, wanted, strict=True):
        assert y.shape == want.shape and np.abs(y - want).max() <= 1e-6 * np.abs(want).max()


def every(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda file: f"{file.parent.name}-{file.stem}")


@every(STORED)
@pytest.mark.parametrize("isa", ["avx512", "avx2", "wide", "neon", "portable"])
def test_a_stored_file_gives_its_outputs(file, isa):
    if not instruction_set(isa):
        pytest.skip(f"this CPU does not run {isa}")
    plan = load(file, isa=isa, tune_seconds=0)
    inputs, outputs = arrays(file)
    assert f"v{plan.info()['version']}" == file.parent.name
    for batch in (len(inputs[0]), 1):
        check(results(plan, [x[:batch] for x in inputs]), [y[:batch] for y in outputs])


@every(STORED)
def test_what_is_read_from_a_stored_file_can_be_written_again(file, tmp_path):
    write(read(file), tmp_path / "again.dcil")
    inputs, outputs = arrays(file)
    check(results(load(tmp_path / "again.dcil", tune_seconds=0), inputs), outputs)


@every([file for file in STORED if file.parent.name == "v1"])
def test_outputs_of_version_1_are_those_of_the_definition(file):
    (x,), outputs = arrays(file)
    check([definition.run(read(file), x)], outputs)


@every([file for file in TOKEN_FILES if not file.stem.startswith("int8_")])
def test_outputs_of_tokens_are_those_of_the_definition(file):
    inputs, outputs = arrays(file)
    check(definition_tokens.run(read(file), inputs), outputs)


@every([file for file in STORED if file.stem.startswith("int8_")])
def test_outputs_of_int8_files_are_those_of_the_definition(file):
    inputs, outputs = arrays(file)
    found = quantized_definition.run_ports(read(file), inputs) if file in TOKEN_FILES else None
    check(found or [quantized_definition.run(read(file), *inputs)], outputs)


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
