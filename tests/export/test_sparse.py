"""The sparse file: round trips, size against the entropy bound, and nothing wrong gets in."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dcil import models
from dcil.errors import UserError
from dcil.export import export, load_sparse, mask_codec, read_sparse
from dcil.export.checksum import save_checked
from dcil.export.sparse import FORMAT, write_sparse
from dcil.runs.cost import entropy_bits, entropy_bound


def sparse_model(name: str = "resnet20", sparsity: float = 0.95) -> nn.Module:
    """Global magnitude pruning of the convolutions; norm layers as after training."""
    model = models.build(name).eval()
    convs = [m.weight.data for m in model.modules() if isinstance(m, nn.Conv2d)]
    level = torch.cat([w.abs().flatten() for w in convs]).sort().values
    for weight in convs:
        weight[weight.abs() < level[int(sparsity * len(level))]] = 0
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                values.uniform_(0.5, 1.5)
    return model


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# -- the code of a mask ----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), st.floats(0, 1), st.integers(-1, 24), st.integers(0, 2**32 - 1))
def test_any_mask_comes_back(n, density, k, seed):
    mask = np.random.default_rng(seed).random(n) < density
    low, unary = mask_codec.encode(mask, k)
    assert len(low) == mask_codec.low_size(int(mask.sum()), k)
    assert np.array_equal(mask_codec.decode(low, unary, k, int(mask.sum()), n), np.flatnonzero(mask))


@pytest.mark.parametrize("density", [0.5, 0.2, 0.1, 0.05, 0.01, 0.001])
def test_the_best_code_is_near_the_entropy(density):
    n = 200_000
    mask = np.random.default_rng(0).random(n) < density
    low, unary = mask_codec.encode(mask, mask_codec.best_k(mask))
    assert 8 * (len(low) + len(unary)) <= 1.05 * entropy_bits(n, int(mask.sum()))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(-1, 24), st.integers(0, 60), st.integers(0, 400))
def test_any_bytes_decode_within_bounds_or_are_refused(low, unary, k, kept, n):
    try:
        found = mask_codec.decode(np.frombuffer(low, np.uint8), np.frombuffer(unary, np.uint8), k, kept, n)
    except UserError:
        return
    assert len(found) == kept
    assert (np.diff(found) > 0).all()
    assert not kept or (found[0] >= 0 and found[-1] < n)


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "sparsity"), [("resnet20", 0.9), ("resnet20", 0.95), ("resnet20", 0.99), ("wrn-28-2", 0.95)]
)
def test_round_trip_and_size(name, sparsity, dtype, tmp_path):
    """Within 15 % of the bound that knows each layer's own density, which here go from 2 % to 60 % and more."""
    model = sparse_model(name, sparsity)
    written = export(model, "sparse", tmp_path / "m.dcil", dtype=dtype)
    other = load_sparse(written.file, models.build(name))
    if dtype == "fp32":
        assert same(other.state_dict(), model.state_dict())
    else:
        x = torch.randn(3, 3, 32, 32)
        torch.testing.assert_close(other.eval()(x), model(x), rtol=0.05, atol=0.05)
    assert written.size <= 1.15 * written.bound
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    if sparsity >= 0.95:
        assert written.size * 8 <= (tmp_path / "dense.safetensors").stat().st_size


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4), max_size=5)
TYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.floats(0, 1), st.data())
def test_any_state_dict_comes_back(tmp_path_factory, shapes, density, data):
    file = tmp_path_factory.mktemp("any") / "s"
    state = {}
    for i, shape in enumerate(shapes):
        kind = getattr(torch, data.draw(st.sampled_from(TYPES)))
        state[f"t{i}.é/x"] = (torch.randn(shape) * (torch.rand(shape) < density) * 100).to(kind)
    write_sparse(state, file, {"a": "ü"})
    assert same(read_sparse(file), state)
    assert same(read_sparse(file, {k: tuple(v.shape) for k, v in state.items()}), state)


def test_odd_numbers_survive(tmp_path):
    state = {"w": torch.tensor([0.0, float("inf"), 0.0, 1e-45, 0.0, -float("inf")] + [0.0] * 50)}
    write_sparse(state, tmp_path / "s", {})
    assert same(read_sparse(tmp_path / "s"), state)


def test_nothing_of_the_file_is_a_pickle(tmp_path):
    export(sparse_model("resnet8-digits"), "sparse", tmp_path / "m", {"method": "dcil"})
    with safe_open(tmp_path / "m", "pt") as opened:
        assert opened.metadata()["method"] == "dcil"
        assert opened.metadata()["format"] == FORMAT
    assert {k.split(".")[0] for k in load_file(tmp_path / "m")} == {"index", "masks", "values"}


# -- wrong files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    torch.manual_seed(0)
    state = {"a.weight": torch.randn(6, 40) * (torch.rand(6, 40) < 0.1), "a.bias": torch.randn(6), "n": torch.tensor(3)}
    file = tmp_path_factory.mktemp("sparse") / "s"
    write_sparse(state, file, {"method": "dcil"})
    return file, state


def test_flipped_bits_and_cuts_are_refused(small_file, tmp_path):
    file, state = small_file
    whole, bad = file.read_bytes(), tmp_path / "bad"
    for i in range(0, 8 * len(whole), 5):  # every byte, every place of a bit
        damaged = bytearray(whole)
        damaged[i // 8] ^= 1 << i % 8
        bad.write_bytes(damaged)
        with pytest.raises(UserError, match="refused") as error:
            read_sparse(bad)
        assert "\n" not in str(error.value)
    for end in range(0, len(whole), 7):
        bad.write_bytes(whole[:end])
        with pytest.raises(UserError, match="refused"):
            read_sparse(bad)
    bad.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="refused"):
        read_sparse(bad)
    assert same(read_sparse(file), state)


def forge(file, change):
    """A file with a right checksum and a wrong content."""
    parts = load_file(file)
    index = json.loads(zlib.decompress(parts["index"].numpy().tobytes()))
    text = change(index, parts)
    blob = zlib.compress(text if isinstance(text, bytes) else json.dumps(index).encode())
    parts["index"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8).clone()
    save_checked(parts, file.with_name("forged"), {"format": FORMAT})
    return file.with_name("forged")


def wrong_entry(field, value):
    def change(index, parts):
        index[0][field] = value

    return change


def wrong_part(key, value):
    def change(index, parts):
        parts[key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        wrong_entry(0, "n"),  # a name twice
        wrong_entry(0, 7),
        wrong_entry(1, "float128"),
        wrong_entry(1, "float16"),
        wrong_entry(2, [6, 39]),
        wrong_entry(2, [2**39, 2**39]),
        wrong_entry(2, [-6, -40]),
        wrong_entry(2, [6.0, 40.0]),
        wrong_entry(2, "640"),
        wrong_entry(2, None),
        wrong_entry(2, [1]),
        wrong_entry(3, 10**30),
        wrong_entry(3, 0),
        wrong_entry(3, -2),
        wrong_entry(3, True),
        wrong_entry(4, 25),
        wrong_entry(4, -5),
        wrong_entry(4, 0),
        wrong_entry(5, -1),
        wrong_entry(5, 2**60),
        wrong_part("masks", torch.zeros(0, dtype=torch.uint8)),
        wrong_part("masks", torch.full((200,), 255, dtype=torch.uint8)),
        wrong_part("masks", torch.zeros(4, 4, dtype=torch.uint8)),
        wrong_part("masks", torch.zeros(3)),
        wrong_part("values.float32", torch.zeros(1)),
        wrong_part("values.float16", torch.zeros(3).half()),
        wrong_part("surprise", torch.zeros(3)),
        lambda index, parts: index.append(["z", "float32", [2**35, 2**4], 0, 0, 0]),  # 2 TB out of nothing
        lambda index, parts: index.append([]),
        lambda index, parts: b"{}x",
        lambda index, parts: b"[" * 100_000,
        lambda index, parts: b"\xff\xfe",
        lambda index, parts: b'{"a": 1}',
        lambda index, parts: b"null",
    ],
)
def test_a_hostile_file_is_refused(small_file, change):
    with pytest.raises(UserError, match="refused") as error:
        read_sparse(forge(small_file[0], change))
    assert "\n" not in str(error.value)


def test_a_bomb_in_the_index_is_refused(small_file):
    parts = load_file(small_file[0])
    bomb = zlib.compress(b" " * (80 << 20), 9)
    parts["index"] = torch.frombuffer(bytearray(bomb), dtype=torch.uint8).clone()
    save_checked(parts, small_file[0].with_name("bomb"), {"format": FORMAT})
    with pytest.raises(UserError, match="refused"):
        read_sparse(small_file[0].with_name("bomb"))


def test_a_pickle_another_network_and_nothing_at_all_are_refused(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pickle")
    with pytest.raises(UserError, match="refused"):
        read_sparse(tmp_path / "pickle")
    with pytest.raises(UserError, match="is missing"):
        read_sparse(tmp_path / "nowhere")
    export(sparse_model("resnet8-digits"), "sparse", tmp_path / "m")
    other = models.build("resnet20")
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(UserError, match="the model's"):
        load_sparse(tmp_path / "m", other)
    assert same(before, other.state_dict())


def test_the_bound_by_hand():
    """100 weights, 50 kept: 100 bits of mask and 50 values; a dense tensor: its values."""
    half = torch.tensor([0.0, 1.0] * 50)
    assert entropy_bound({"half": half, "all": torch.ones(10)}) == (100 + 50 * 32 + 7) // 8 + 40


def test_numbers_that_half_precision_does_not_reach_are_refused(tmp_path):
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, 1e6)
    with pytest.raises(UserError, match="bf16"):
        export(model, "sparse", tmp_path / "m", dtype="fp16")
    assert list(tmp_path.iterdir()) == []
