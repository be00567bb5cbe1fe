"""The layers before the first branch, computed for both paths at once: the numbers of the paths by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from digit_engines import Late, engine_of
from torch import nn

from dcil import DCIL
from dcil.engine import EagerEngine, EngineSettings
from dcil.engine.cuda import choose
from dcil.engine.cuda.fused_executor import FusedExecutor
from dcil.engine.cuda.graph import GraphEngine
from dcil.engine.cuda.ops import Conv, Norm, Pool

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Branching(nn.Module):
    """Begins as a residual network for large images does."""

    def __init__(self, width: int = 16, pool: bool = True) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else None
        self.long, self.short = nn.Conv2d(width, 24, 3, padding=1, bias=False), nn.Conv2d(width, 24, 1, bias=False)
        self.long_bn, self.short_bn = nn.BatchNorm2d(24), nn.BatchNorm2d(24)
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x)))
        x = x if self.pool is None else self.pool(x)
        x = torch.relu(self.long_bn(self.long(x)) + self.short_bn(self.short(x)))
        return self.fc(x.mean((2, 3)))


def on_streams(model: nn.Module, method: DCIL, device: str, steps: int) -> GraphEngine:
    engine = engine_of(copy.deepcopy(model), method, "streams", device, steps, rate=0.02, precision="fp32")
    assert isinstance(engine.executor, FusedExecutor)
    return engine


def found(engine: GraphEngine) -> dict[str, torch.Tensor]:
    gradients = {f"gradient {name}": p.grad for name, p in engine.net.named_parameters()}
    return {key: value.clone() for key, value in (engine.net.state_dict() | gradients).items() if value is not None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [DCIL, Late])
@pytest.mark.parametrize("stem", [True, False])
def test_a_shared_stem_computes_what_the_paths_do(kind, stem, device, monkeypatch):
    """With a stem that is pruned or not, and with a path that leaves the loss."""
    torch.manual_seed(0)
    model, method = Branching(), kind(sparsity=0.8, steps=1000, every=2, warmup=0.0, stem=stem)
    apart = on_streams(model, method, device, 5)
    monkeypatch.setattr(choose, "NARROW", 0)
    together = on_streams(model, method, device, 5)
    assert apart.executor.stem is None
    assert [type(layer) for layer in together.executor.stem.run] == [Conv, Norm, Pool]
    a, b = found(apart), found(together)
    assert a.keys() == b.keys() and any(key.startswith("super.") for key in a)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_behind_a_shared_stem(device, monkeypatch):
    monkeypatch.setattr(choose, "NARROW", 0)
    engine = on_streams(Branching(), DCIL(sparsity=0.8, steps=1000, every=2), device, 4)
    assert engine.executor.stem is not None
    before = found(engine)
    images = engine.loader.test_size
    plain = EagerEngine(engine.net, engine.optimizer, engine.loader, EngineSettings("eager", "fp32")).evaluate()
    engine.source.rewind()
    x = engine.source.test_batch(50)[0]
    with torch.no_grad():
        outputs = engine.executor.evaluate(x)
        engine.net.eval()
        for path in engine.net.method.paths:
            torch.testing.assert_close(outputs[path], engine.net.path(path, x), rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, before[key]) for key, value in found(engine).items())
    assert {path: pytest.approx(both, abs=100.1 / images) for path, both in plain.items()} == engine.evaluate()


class Single(nn.Module):
    """Has one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(torch.max_pool2d(torch.relu(self.bn(self.conv(x))), 2).mean((2, 3)))


def test_a_network_of_one_convolution_learns(monkeypatch):
    torch.manual_seed(0)
    model, method = nn.Sequential(Single()), DCIL(sparsity=0.5, steps=1000, every=2)
    a = found(on_streams(model, method, "cpu", 3))
    monkeypatch.setattr(choose, "NARROW", 0)
    b = found(on_streams(model, method, "cpu", 3))
    assert b["gradient model.0.conv.weight"].any()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize(
    "model", [Branching(width=12), Branching(pool=False), nn.Sequential(nn.MaxPool2d(2), Branching())]
)
def test_paths_without_a_stem_to_share_stay_apart(model, monkeypatch):
    """12 channels of two paths are not next to each other in memory, a norm with two readers ends the stem before it,
    and pooling of the images has no weights."""
    monkeypatch.setattr(choose, "NARROW", 0)
    assert on_streams(model, DCIL(sparsity=0.8, steps=1000), "cpu", 1).executor.stem is None


def test_a_share_of_the_batch_is_seen_apart(monkeypatch):
    monkeypatch.setattr(choose, "NARROW", 0)
    assert on_streams(Branching(), DCIL(sparsity=0.8, steps=1000, super_share=0.5), "cpu", 1).executor.stem is None
