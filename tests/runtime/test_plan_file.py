"""The plan file: what is written comes back, and no damaged or hostile file does anything but fail politely."""

from __future__ import annotations

import hashlib
import json
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from dcil.runtime import export_plan
from dcil_runtime import Network, Op, Plan, PlanError, load, native, read, write
from dcil_runtime.format import HEADER, MAGIC, VERSION
from dcil_runtime.native import LIBRARY, NativeMissing

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")


@pytest.fixture
def plan_file(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 9, 4))
    net[0].weight.data.mul_(torch.rand_like(net[0].weight) < 0.3)
    export_plan(net.eval(), torch.randn(1, 3, 15, 15), tmp_path / "net.dcil")
    return tmp_path / "net.dcil"


def sealed(meta: object, data: bytes = b"") -> bytes:
    """A file whose checksum is right, whatever it says."""
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    digest = hashlib.sha256(text + data).digest()
    return HEADER.pack(MAGIC, VERSION, 0, len(text), len(data), digest) + text + data


def parts(file) -> tuple[dict, bytes]:
    raw = file.read_bytes()
    size = HEADER.unpack_from(raw)[3]
    return json.loads(raw[HEADER.size : HEADER.size + size]), raw[HEADER.size + size :]


def test_what_is_written_comes_back(plan_file):
    network = read(plan_file)
    again = plan_file.with_name("again.dcil")
    write(network, again)
    assert [op.kind for op in read(again).ops] == ["conv", "maxpool", "flatten", "linear"]
    x = np.random.default_rng(0).standard_normal((3, 3, 15, 15), np.float32)
    assert np.array_equal(load(plan_file, tune_seconds=0)(x), load(again, tune_seconds=0)(x))


def test_every_truncation_and_flip_is_refused(plan_file):
    whole = plan_file.read_bytes()
    rng = random.Random(1)
    for end in [*range(70), *rng.sample(range(len(whole)), 100)]:
        plan_file.write_bytes(whole[:end])
        with pytest.raises(PlanError):
            read(plan_file)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        plan_file.write_bytes(damaged)
        with pytest.raises(PlanError):
            read(plan_file)


def mutate(value: object, rng: random.Random) -> object:
    """One leaf of a JSON tree replaced by something nasty."""
    nasty = [-1, 0, 1, 7, 2**31, 2**63, 1e308, None, True, "conv", "", [], {}, [0, 2**40], 4096, 100_000]
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(list(value))
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.95:
        place = rng.randrange(len(value))
        return [*value[:place], mutate(value[place], rng), *value[place + 1 :]]
    return rng.choice(nasty)


def test_hostile_files_with_a_right_checksum_do_no_harm(plan_file):
    meta, data = parts(plan_file)
    rng, refused = random.Random(2), 0
    for _ in range(600):
        changed = mutate(meta, rng)
        noise = bytearray(data)
        for _ in range(rng.randrange(3)):
            noise[rng.randrange(len(noise))] ^= 1 << rng.randrange(8)
        plan_file.write_bytes(sealed(changed, bytes(noise)))
        try:
            plan = load(plan_file, tune_seconds=0)
            if np.prod(plan.input_shape) < 1e5 and np.prod(plan.output_shape) < 1e6:
                plan(np.zeros((2, *plan.input_shape), np.float32))
        except (PlanError, MemoryError):
            refused += 1
    assert refused > 300


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"\xff\xfe", b"null", b'{"input":NaN}', b"1e999"])
def test_json_that_is_none(plan_file, text):
    plan_file.write_bytes(sealed(text))
    with pytest.raises(PlanError):
        read(plan_file)


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a device"])
def test_what_is_no_regular_file_is_refused_at_once(what, tmp_path):
    place = tmp_path / "net.dcil"
    if what == "a pipe":
        os.mkfifo(place)
    elif what == "a folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero")
    with pytest.raises(PlanError, match="not a regular file"):
        read(place)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"notes": {}', b'"notes": {"a": "\\ud800"}', "notes"),
        (b'"notes": {}', b'"notes": {"\\udfff": ""}', "notes"),
        (b'"notes": {}', b'"notes": {}, "notes": {}', "twice"),
        (b'"kind": "conv"', b'"kind": "conv", "kind": "conv"', "twice"),
        (b'"kind": "conv"', b'"kind": ["conv"]', "not a usable plan"),
        (b'"kind": "conv"', b'"kind": ' + b"9" * 5000, "not a usable plan"),
        (b'"notes": {}', b'"notes": {}' + b" " * (16 << 20), "description has"),
    ],
)
def test_descriptions_that_json_takes_and_a_plan_does_not(plan_file, old, new, why):
    meta, data = parts(plan_file)
    text = json.dumps({**meta, "notes": {}}).encode()
    assert old in text
    plan_file.write_bytes(sealed(text.replace(old, new, 1), data))
    with pytest.raises(PlanError, match=why) as found:
        read(plan_file)
    assert "\n" not in str(found.value)


def conv(**changes: object) -> Op:
    arrays = {"weight": np.ones((2, 3, 3, 3), np.float32), "bias": np.zeros(2, np.float32)}
    op = Op("conv", (0,), (3, 3, 1, 1, 1, 1, 1, 1, 1, 1), arrays=arrays)
    for name, value in changes.items():
        setattr(op, name, value)
    return op


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (conv(inputs=(1,)), "does not exist yet"),
        (conv(residual=0), "residual differs"),
        (conv(residual=5), "does not exist yet"),
        (conv(groups=5), "groups"),
        (conv(window=(99, 3, 1, 1, 1, 1, 1, 1, 1, 1)), "larger than its padded input"),
        (conv(window=(3, 3, 0, 1, 1, 1, 1, 1, 1, 1)), "stride"),
        (conv(arrays={"weight": np.ones(55, np.float32), "bias": np.zeros(2, np.float32)}), "out of range"),
        (
            conv(
                arrays={
                    "index": np.array([3, 2], np.uint32),
                    "weight": np.ones(2, np.float32),
                    "bias": np.zeros(2, np.float32),
                }
            ),
            "out of order",
        ),
        (conv(arrays={}), "no elements"),
        (conv(kind="linear"), "not flat"),
        (conv(twin=1), "twin"),
    ],
)
def test_operators_that_contradict_their_tensors_are_refused(op, why):
    with pytest.raises(PlanError, match=why):
        Plan(Network((3, 8, 8), [op]))


def test_sizes_beyond_reason_are_refused_before_memory_is_asked_for():
    with pytest.raises(PlanError, match=r"2\^28|65536"):
        Plan(Network((1 << 20, 1 << 14, 1 << 14), [Op("mean", (0,))]))


def test_without_the_native_module_the_error_says_what_to_install(tmp_path, monkeypatch):
    missing = tmp_path / "libdcil_runtime.so"
    with pytest.raises(NativeMissing, match=r"install a C\+\+17 compiler"):
        native.library(missing)
