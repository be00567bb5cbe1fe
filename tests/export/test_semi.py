"""2:4: what counts as it, how it is packed, why a layer stays dense. What needs a GPU is run here with a stand-in."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from dcil.bench import semi
from dcil.cli.bench_infer import bench_infer
from dcil.errors import UserError
from dcil.export import SemiStructured, export, load_semi, read_semi, to_semi_structured
from dcil.export.checksum import save_checked
from dcil.export.semi import BACKENDS, FORMAT, Pointwise, coverage, order_of, pack, unpack, why_not


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
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(72, 64)).half()
    two_four(model[2].weight)
    two_four(model[3].weight)
    left = to_semi_structured(model).left
    assert "not in a 3 x 3 Conv2d" in left["0"]
    assert "not 2:4" in left["1"]
    assert "GPU" in left["2"]
    assert "multiple of 16 x 16" in left["3"]
    assert "multiple of 32 x 64" in to_semi_structured(model, "cutlass").left["3"]
    assert why_not(model[2], model[2].weight, device=False) is None
    assert "float32" in why_not(model[2].float(), model[2].weight)


def dense_in_place_of(backend, monkeypatch):
    """Stands for the GPU's tensors: the weights as they are, if they are what the GPU would take."""

    class Backend(BACKENDS[backend]):
        @classmethod
        def from_dense(cls, weight):
            assert weight.ndim == 2
            assert weight.is_contiguous()
            return weight.clone()

    monkeypatch.setitem(BACKENDS, backend, Backend)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_linear_and_one_by_one_layers_are_converted(backend, monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(64, 64, 1, stride=2),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Conv2d(64, 32, 1, bias=False)),
        nn.Flatten(),
        nn.Linear(128, 64),
    ).to(torch.bfloat16)
    for layer in (model[0], model[2][1], model[4]):
        two_four(layer.weight)
    x = torch.randn(3, 64, 3, 4).to(torch.bfloat16)
    want = model(x)
    dense_in_place_of(backend, monkeypatch)
    made = to_semi_structured(model, backend)
    assert made.converted == ["0", "2.1", "4"]
    assert list(made.left) == ["2.0"]
    torch.testing.assert_close(made.model(x), want)
    assert made.model.state_dict().keys() == model.state_dict().keys()
    assert coverage(model) == (made.converted, {})
    with pytest.raises(UserError, match="did you mean 'cutlass'"):
        to_semi_structured(model, "cutlas")


def test_a_single_layer_is_converted(monkeypatch):
    conv = nn.Conv2d(64, 64, 1).half()
    two_four(conv.weight)
    dense_in_place_of("cusparselt", monkeypatch)
    assert isinstance(to_semi_structured(conv).model, Pointwise)


class Clock:
    """In place of torch.cuda.Event: every pair is 3 ms apart."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 3.0


def without_a_gpu(monkeypatch):
    """The benchmark with stand-ins for what only a GPU has; CUTLASS refuses to run and cuSPARSELt to be recorded."""

    def made(dense, backend):
        model = copy.deepcopy(dense)
        if backend == "cutlass":
            model.forward = lambda x: 1 / 0
        return SemiStructured(model, [""], {})

    def graphs(actions, notes):
        notes["cusparselt"] = "no CUDA graph: no"
        return {"dense": lambda: 0.1}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(semi, "to_semi_structured", made)
    monkeypatch.setattr(semi, "_graphs", graphs)


def test_the_benchmark_says_where_it_pays_and_what_did_not_run(monkeypatch, capsys):
    without_a_gpu(monkeypatch)
    rows = semi.measure_semi([(64, 32)], [2], 1, ["bf16"], device="cpu")
    dense, lt, cutlass = rows
    assert (dense.call_us, dense.kernel_us, dense.error) == (150.0, 100.0, 0.0)
    assert (lt.call_faster, lt.kernel_faster, lt.error) == (1.0, None, 0.0)
    assert (cutlass.call_us, cutlass.note) == (None, "division by zero")
    said = semi.verdict(rows)
    assert said[0].startswith("cusparselt, call time: faster in 0 of 1 cases, slower in 0; best 1.00 x (64 -> 32")
    assert said[1:] == ["cusparselt: no CUDA graph: no (1 cases)", "cutlass: division by zero (1 cases)"]

    monkeypatch.setattr(semi, "measure_semi", lambda shapes, batches, rounds: rows)
    monkeypatch.setattr("dcil.cli.bench_infer.environment", lambda device: {"gpu": "none"})
    assert bench_infer(["--semi-structured", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timings"][1]["form"] == "cusparselt"
    assert bench_infer(["--semi-structured"]) == 0
    assert "64 -> 32" in capsys.readouterr().out


def test_the_benchmark_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="GPU"):
        semi.measure_semi()


def test_the_layers_of_the_benchmark_are_two_four():
    layer = semi.two_four_layer(64, 32, torch.float16, "cpu")
    assert order_of(layer.weight) == "stored"
    assert int(layer.weight.count_nonzero()) == 32 * 32
