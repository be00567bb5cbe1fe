"""2:4: what counts as it, how it is packed, why a layer stays dense. What needs a GPU is measured, not tested."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from dcil.errors import UserError
from dcil.export import export, load_semi, read_semi, to_semi_structured
from dcil.export.checksum import save_checked
from dcil.export.semi import FORMAT, order_of, pack, unpack, why_not


@torch.no_grad()
def two_four(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.view(-1, 4)
    groups.scatter_(1, groups.abs().argsort(1)[:, :2], 0)
    return weight


def test_what_is_two_four():
    assert order_of(two_four(torch.randn(8, 16))) == "stored"
    assert order_of(torch.randn(8, 16)) is None
    assert order_of(two_four(torch.randn(8, 16)).reshape(8, 16)[:, :14]) is None  # 14 is no multiple of 4
    by_channel = two_four(torch.randn(8, 3, 3, 16)).movedim(-1, 1)
    assert order_of(by_channel) == "channels"
    assert order_of(torch.zeros(5)) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from([(), (1, 1), (3, 3)]), st.integers(0, 3), st.booleans())
def test_packing_comes_back(outputs, quads, kernel, kept, by_channel):
    weight = torch.randn(outputs, *kernel, 4 * quads)
    groups = weight.view(-1, 4)
    groups[:, torch.randperm(4)[: max(2, 4 - kept)]] = 0  # two, one or none kept
    weight = weight.movedim(-1, 1).contiguous() if by_channel or not kernel else weight
    if weight.shape[1:] and (order := order_of(weight)):
        values, meta = pack(weight, order)
        assert values.numel() * 2 == weight.numel()
        assert torch.equal(unpack(values, meta, tuple(weight.shape), order), weight)


def model_of_two_four():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    two_four(model[0].weight)
    return model


def test_the_file_comes_back_and_is_smaller(tmp_path):
    model = model_of_two_four()
    written = export(model, "semi-structured", tmp_path / "m", {"method": "gmp"}, torch.randn(2, 64))
    assert written.error == 0
    other = load_semi(tmp_path / "m", model_of_two_four())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert written.size < 0.65 * written.dense
    with pytest.raises(UserError, match="another network"):
        load_semi(tmp_path / "m", nn.Linear(3, 3))


def test_a_network_without_two_four_is_refused(tmp_path):
    with pytest.raises(UserError, match="2:4"):
        export(nn.Linear(64, 64), "semi-structured", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_wrong_files_are_refused(tmp_path):
    export(model_of_two_four(), "semi-structured", tmp_path / "m")
    whole = (tmp_path / "m").read_bytes()
    for i in range(0, len(whole), 97):
        (tmp_path / "bad").write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        with pytest.raises(UserError, match="refused"):
            read_semi(tmp_path / "bad")
    parts = load_file(tmp_path / "m")
    for note, key, value in [
        ('{"0.weight": [[64, 65], "stored"]}', None, None),
        ('{"0.weight": [[64, 64], "sideways"]}', None, None),
        ('{"0.weight": [[-64, -64], "stored"]}', None, None),
        ('{"0.weight": 3}', None, None),
        ("{}", None, None),
        ('{"0.weight": [[64, 64], "stored"]}', "0.weight/2:4", torch.zeros(512, dtype=torch.uint8)),
        ('{"0.weight": [[64, 64], "stored"]}', "0.weight", torch.zeros(3)),
    ]:
        forged = {**parts, **({key: value} if key else {})}
        save_checked(forged, tmp_path / "forged", {"format": FORMAT, "2:4": note})
        with pytest.raises(UserError, match="refused"):
            read_semi(tmp_path / "forged")


def test_why_a_layer_stays_dense():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(60, 64)).half()
    two_four(model[2].weight)
    two_four(model[3].weight)
    left = to_semi_structured(model).left
    assert "Conv2d" in left["0"]
    assert "not 2:4" in left["1"]
    assert "GPU" in left["2"]
    assert "multiple of 32 x 64" in left["3"]
    assert why_not(model[2], model[2].weight, device=False) is None
    assert "float32" in why_not(model[2].float(), model[2].weight)
