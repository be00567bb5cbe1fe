"""Plans against torch: every operator, odd shapes, batches, threads and instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcil import UserError, models
from dcil.runtime import compile_plan, export_plan, instruction_set, load
from dcil.runtime.lower import lower
from dcil_runtime import Network, Op, Plan
from dcil_runtime.format import RELU
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
#: "wide" is AVX-512's layout in plain code, so that it is tested on a machine without it.
SETS = [name for name in ("portable", "wide", "avx2", "avx512") if LIBRARY.exists() and instruction_set(name)]
TOLERANCE = 1e-5


def pruned(module: nn.Module, keep: float = 0.3) -> nn.Module:
    """Random zeros, and norm layers that do something."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            part.weight.data.mul_(torch.rand_like(part.weight) < keep).mul_(keep**-0.5)
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 2)
            part.weight.data.uniform_(-1.5, 1.5)
            part.bias.data.normal_(0, 0.3)
    return module.eval()


def difference(got: np.ndarray, want: torch.Tensor) -> float:
    """The largest one, relative to the largest output."""
    assert got.shape == tuple(want.shape)
    return float(np.abs(got - want.numpy()).max() / max(want.abs().max().item(), 1e-20))


def quick(network: Network, threads: int = 1, isa: str = "", tune_seconds: float = 0.05) -> Plan:
    return Plan(network, threads, isa, tune_seconds)


@torch.no_grad()
def check(module: nn.Module, x: torch.Tensor, threads: int = 1, isa: str = "") -> None:
    plan = quick(lower(module, x), threads, isa)
    assert difference(plan(x.numpy()), module(x)) < TOLERANCE


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    spec = {
        "cin": groups * draw(st.integers(1, 12)),
        "cout": groups * draw(st.integers(1, 9)),
        "groups": groups,
        "kernel": (draw(st.sampled_from([1, 2, 3, 5, 7])), draw(st.sampled_from([1, 3, 4, 7]))),
        "stride": (draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3]))),
        "padding": (draw(st.integers(0, 4)), draw(st.integers(0, 4))),
        "dilation": (draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 3]))),
        "keep": draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        "batch": draw(st.integers(1, 20)),
    }
    span = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(spec["dilation"], spec["kernel"], spec["padding"], strict=True)]
    spec["size"] = tuple(draw(st.integers(max(1, s), max(1, s) + 20)) for s in span)
    return spec


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spec=convolutions(), isa=st.sampled_from(SETS or [""]), seed=st.integers(0, 99), threads=st.integers(1, 2))
def test_any_convolution(spec, isa, seed, threads):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(spec["cout"], spec["cin"] // spec["groups"], *spec["kernel"], generator=g)
    w *= torch.rand(w.shape, generator=g) < spec["keep"]
    b, x = torch.randn(spec["cout"], generator=g), torch.randn(spec["batch"], spec["cin"], *spec["size"], generator=g)
    window = (*spec["kernel"], *spec["stride"], *spec["padding"], *spec["padding"], *spec["dilation"])
    op = Op("conv", (0,), window, spec["groups"], act=RELU, arrays={"weight": w.numpy(), "bias": b.numpy()})
    got = quick(Network(tuple(x.shape[1:]), [op]), threads, isa)(x.numpy())
    want = F.relu(F.conv2d(x, w, b, spec["stride"], spec["padding"], spec["dilation"], spec["groups"]))
    assert difference(got, want) < TOLERANCE


class Everything(nn.Module):
    """All operators in one odd network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 7, 2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(10)
        self.left = nn.Conv2d(10, 6, 1)
        self.right = nn.Conv2d(10, 6, 3, padding="same", dilation=2)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.pre = nn.BatchNorm2d(12)
        self.down = nn.Conv2d(12, 12, (3, 5), stride=(2, 1), padding=(1, 2))
        self.fc1 = nn.Linear(12 * 4, 20)
        self.fc2 = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu6(self.bn(self.stem(x)))
        x = torch.cat([F.leaky_relu(self.left(x), 0.2), F.silu(self.right(x))], 1)
        x = F.max_pool2d(x, 3, 2, 1)
        x = x + F.hardswish(self.depth(x))
        y = torch.relu(self.pre(x))
        x = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) + y
        x = F.avg_pool2d(self.down(x), 2, 2, ceil_mode=True)
        return self.fc2(torch.relu(self.fc1(F.adaptive_avg_pool2d(x, 2).flatten(1))))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("size", [(64, 48), (63, 45)])
def test_every_operator(isa, size):
    torch.manual_seed(1)
    check(pruned(Everything()), torch.randn(3, 3, *size), 1, isa)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", ["resnet20", "wrn-10-1"])
def test_residual_networks(name, isa):
    torch.manual_seed(2)
    module, x = pruned(models.build(name)), torch.randn(2, 3, 29, 35)
    check(module, x, 1, isa)


@torch.no_grad()
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_batch_size(threads, isa):
    torch.manual_seed(3)
    module, x = pruned(models.build("resnet8-digits")), torch.randn(70, 3, 11, 9)
    plan, want = quick(lower(module, x), threads, isa), module(x)
    for n in range(1, 71):
        assert difference(plan(x[:n].numpy()), want[:n]) < TOLERANCE, n
    assert plan(x[:0].numpy()).shape == (0, 10)


@torch.no_grad()
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("size", [(64, 48), (63, 45)])
def test_nothing_is_left_of_an_earlier_call(isa, size):
    """Values share memory one after the other: halos included, each must write everything that anybody reads."""
    torch.manual_seed(8)
    module, x = pruned(Everything()), torch.randn(20, 3, *size)
    plan, want = quick(lower(module, x), 1, isa), module(x)
    for n in (1, 2, 5, 20):
        assert np.isnan(plan(np.full((n, 3, *size), np.nan, np.float32))).all()
        assert difference(plan(x[:n].numpy()), want[:n]) < TOLERANCE, n


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("isa", SETS)
def test_pools_of_negative_numbers_at_borders(pool, isa):
    class Pools(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if pool == "max":
                return F.max_pool2d(x, (3, 2), (2, 1), (1, 1), (1, 2), ceil_mode=True)
            return F.avg_pool2d(x, (3, 5), (2, 3), (1, 2), ceil_mode=True, count_include_pad=True)

    for size in ((7, 9), (12, 5), (23, 30)):
        check(Pools(), -1 - torch.rand(5, 3, *size), 1, isa)


def test_vectors_only_and_shared_modules():
    torch.manual_seed(4)
    shared = nn.Linear(12, 12)
    module = pruned(nn.Sequential(nn.Linear(9, 12), nn.ReLU(), shared, nn.SiLU(), shared, nn.Identity()), 0.1)
    check(module, torch.randn(5, 9))


class Branches(nn.Module):
    """Values that several operators read: nothing may be fused that somebody else still needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = torch.relu(y)
        w = self.bn(y) + self.b(z)
        v = self.bn(w)
        q = self.b(z)
        r = F.dropout(q, training=self.training)
        p = self.a(x)
        u = p + z
        p.relu_()
        return torch.cat([w + w, z + y, v, torch.relu(v), torch.relu(r), q, p, u], 1)


@pytest.mark.parametrize("size", [(8, 8), (5, 13)])
def test_fusion_keeps_what_others_read(size):
    torch.manual_seed(5)
    check(pruned(Branches()), torch.randn(2, 3, *size))


@torch.no_grad()
def test_two_threads_share_one_image_and_four_callers_share_a_plan():
    torch.manual_seed(6)
    module, x = pruned(models.build("resnet20"), 0.2), torch.randn(9, 3, 32, 32)
    plan, want = quick(lower(module, x), 2, tune_seconds=1.0), module(x)
    wrong: list[float] = []

    def caller(n: int) -> None:
        wrong.extend(difference(plan(x[:n].numpy()), want[:n]) for _ in range(10))

    callers = [threading.Thread(target=caller, args=(n,)) for n in (1, 1, 3, 9)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert len(wrong) == 40 and max(wrong) < TOLERANCE
    assert plan.memory > 0 and "conv" in plan.describe(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("threads", [1, 2])
def test_imagenet_networks(name, threads):
    torch.manual_seed(7)
    check(pruned(models.build(name, 1000), 0.1), torch.randn(2, 3, 224, 224), threads)


def test_an_unsupported_operator_is_named_with_its_module_before_anything_is_written(tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Softsign()), nn.Conv2d(4, 4, 3), nn.Softplus())
    with pytest.raises(UserError, match=r"abs in module '1.0' \(Softsign\), softplus in module '3' \(Softplus\)"):
        export_plan(module, torch.randn(1, 3, 9, 9), tmp_path / "net.dcil")
    assert not (tmp_path / "net.dcil").exists()


def test_wrong_arguments_are_explained():
    plan = compile_plan(pruned(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 9, 9))
    with pytest.raises(ValueError, match=r"takes \(n, 3, 9, 9\)"):
        plan(np.zeros((1, 3, 8, 9), np.float32))
    with pytest.raises(ValueError, match="threads"):
        compile_plan(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 9, 9), threads=0)
    with pytest.raises(ValueError, match="does not run 'neon9'"):
        compile_plan(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 9, 9), isa="neon9")


@torch.no_grad()
def test_a_deployment_needs_numpy_and_the_runtime_only(tmp_path):
    torch.manual_seed(8)
    module, x = pruned(models.build("resnet8-digits")), torch.randn(3, 3, 8, 8)
    export_plan(module, x, tmp_path / "net.dcil", {"method": "test"})
    np.save(tmp_path / "x.npy", x.numpy())
    script = """
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "dcil", "sklearn", "safetensors"):
                    raise ImportError(name + " is blocked")
        sys.meta_path.insert(0, Block())
        import numpy as np
        import dcil_runtime
        plan = dcil_runtime.load("net.dcil", threads=2)
        np.save("y.npy", plan(np.load("x.npy")))
        assert plan.notes == {"method": "test"} and "torch" not in sys.modules
    """
    path = os.pathsep.join([str(LIBRARY.parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, check=True, env=environment)
    assert difference(np.load(tmp_path / "y.npy"), module(x)) < TOLERANCE
    assert difference(load(tmp_path / "net.dcil")(x.numpy()), module(x)) < TOLERANCE
