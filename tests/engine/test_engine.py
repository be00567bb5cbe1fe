"""The fast engine against the plain one: the same numbers, whatever way the paths take.

On the CPU nothing is recorded, but all else runs: flat parameters, views, fused networks, stacking, updates.
The tests marked cuda repeat it on the GPU, with the graphs.
"""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from digit_engines import Late, engine_of
from safetensors.torch import load_file
from torch import nn

from dcil import DCIL, DPF, METHODS, OBS, SparseNet, Weight, data, models
from dcil.engine import PROCESS_LOCK, Diverged, EagerEngine, EngineSettings, kernels, obstacle
from dcil.engine.cuda import graph
from dcil.engine.cuda.batches import make_source
from dcil.engine.cuda.choose import choose
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.fused_executor import FusedExecutor
from dcil.engine.cuda.graph import GraphEngine
from dcil.engine.cuda.ops import Pool
from dcil.engine.cuda.path_executor import PathExecutor
from dcil.engine.cuda.ranking import Ranking, is_global_magnitude
from dcil.engine.cuda.sgd import SGD
from dcil.errors import UserError
from dcil.train import Config, RunFolder, Trainer, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
SHORT = Config(epochs=2, target_epoch=1, milestones=(1,), batch=200)


def built(method: str, device: str, speed: EngineSettings, model: str) -> Trainer:
    method, _, share = method.partition(" ")
    settings = {"every": 2} | ({"warmup": 0.0} if method == "dcil" else {})
    settings |= {"super_share": float(share)} if share else {}
    config = replace(SHORT, method=method, model=model, settings=settings, sparsity=0.8)
    trainer = Trainer.build(config, data.load("digits", Path("data")), torch.device(device), speed)
    trainer.net.train()
    return trainer


def go(trainer: Trainer, steps: int, epoch: int = 0) -> Trainer:
    """Train for the first few steps of an epoch."""
    for i, _ in enumerate(trainer.engine.epoch(epoch, lambda i: 0.05 + 0.001 * i)):
        if i + 1 == steps:
            break
    return trainer


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that a step moves, the gradient included."""
    found = {key: value.detach().clone() for key, value in trainer.net.state_dict().items()}
    for name, parameter in trainer.net.named_parameters():
        found[f"gradient {name}"] = parameter.grad.clone()
        found[f"momentum {name}"] = trainer.optimizer.state[parameter]["momentum_buffer"].clone()
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of any tensor of the two."""
    assert list(a) == list(b)
    pairs = [(a[key].double(), b[key].double()) for key in a]
    return max(float((x - y).norm() / (y.norm() + 1e-3)) for x, y in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["wrn-10-1", "resnet8-digits"])
@pytest.mark.parametrize("route", ["plain", "streams", "stacked", "low memory"])
@pytest.mark.parametrize("method", ["dense", "dpf", "dcil", "dcil 0.3", "rigl", "feather"])
def test_engine_and_plain_loop_agree(method, route, model, device):
    """float32, one step from a state with pruned weights and momentum.

    Only one, because training is chaotic: initial weights that differ by 1e-6 are 1e-3 apart after two steps and
    0.2 after twelve, in the plain loop too. The plain route, which does the same sums, agrees far longer.
    """
    speed = (
        EngineSettings("graph", "fp32", executor="auto")
        if route == "low memory"
        else EngineSettings("graph", "fp32", executor=route)
    )
    speed = replace(speed, low_memory=route == "low memory")
    plain = go(built(method, device, EngineSettings("eager", "fp32"), model), 5)
    fast = built(method, device, speed, model)
    fast.net.load_state_dict(plain.net.state_dict())
    for ours, theirs in zip(fast.net.parameters(), plain.net.parameters(), strict=True):
        buffer = plain.optimizer.state[theirs]["momentum_buffer"].clone()
        fast.optimizer.state[ours]["momentum_buffer"] = buffer
    assert isinstance(plain.engine, EagerEngine)
    assert isinstance(fast.engine, GraphEngine)
    a, b = tensors(go(plain, 1, epoch=1)), tensors(go(fast, 1, epoch=1))
    assert isinstance(fast.engine.executor, PathExecutor if route == "plain" else FusedExecutor)
    masks = [key for key, value in a.items() if value.dtype == torch.bool]
    assert len(masks) == len(plain.net.masks)
    other = sum(int((a.pop(key) ^ b.pop(key)).sum()) for key in masks)
    # Gradients may tie but for rounding, above all those near 0, and RigL grow the one or the other: 18 seen on a GPU.
    assert other <= (0.001 * sum(a_mask.numel() for a_mask in plain.net.masks.values()) if method == "rigl" else 2)
    assert distance(a, b) < 2e-2  # a ReLU at zero may fall to the other side: 1.1e-2 seen with two threads
    if isinstance(fast.engine.executor, FusedExecutor) and "dcil" in method:
        # The other model has 12 channels, not a multiple of 8, and a stack has one input.
        stacked = method == "dcil" and route == "stacked" and model == "wrn-10-1"
        assert len(fast.engine.executor.programs) == (1 if stacked else 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["srste", "topkast"])
def test_a_gradient_beside_the_losss_is_not_lost(method, device):
    """It is added to the weights themselves, past the views that a fused network would collect gradients from."""
    plain = go(built(method, device, EngineSettings("eager", "fp32"), "wrn-10-1"), 1)
    fast = go(built(method, device, EngineSettings("graph", "fp32"), "wrn-10-1"), 1)
    assert isinstance(fast.engine.executor, PathExecutor)
    assert distance(tensors(plain), tensors(fast)) < 1e-3


def config_for(method: str) -> Config:
    """Some methods prune filters only."""
    granularity = "weight" if Weight in METHODS[method].granularities else "filter"
    return replace(SHORT, method=method, model="wrn-10-1", sparsity=0.5, granularity=granularity)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "mil"])
def test_the_plain_route_stays_equal(method, device):
    """Every method, through mask updates: the same sums in the same order, so the same bits (on the CPU)."""
    config, dataset = config_for(method), data.load("digits", Path("data"))
    speeds = EngineSettings("eager", "fp32"), EngineSettings("graph", "fp32", executor="plain")
    plain, fast = (Trainer.build(config, dataset, torch.device(device), speed) for speed in speeds)
    for trainer in (plain, fast):
        trainer.net.train()
    # On a GPU the order of sums may differ, and training is chaotic: one step can be compared, not six.
    a, b = (go(trainer, 6 if device == "cpu" else 1).net.state_dict() for trainer in (plain, fast))
    assert distance(a, b) < (1e-6 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["wrn-10-1", "resnet8-digits"])
@pytest.mark.parametrize(("method", "route"), [("dcil", "streams"), ("dcil", "stacked"), ("dcil 0.3", "streams")])
def test_evaluation_by_the_fused_network_is_the_networks(method, route, model, device):
    trainer = go(built(method, device, EngineSettings("graph", "tf32", executor=route), model), 5)
    engine, net = trainer.engine, trainer.net
    assert isinstance(engine.fused_evaluator, FusedExecutor)
    engine.source.rewind()
    x = engine.source.test_batch(50)[0]
    net.eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torch.no_grad():
        found = engine.fused_evaluator.evaluate(x)
        for path in net.method.paths:
            torch.testing.assert_close(found[path], net.path(path, x), rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    own = EagerEngine(net, trainer.optimizer, trainer.loader, EngineSettings("eager", "tf32")).evaluate()
    one_image = 100.1 / trainer.loader.test_size  # two logits may tie but for rounding: seen on a GPU
    assert {path: pytest.approx(both, abs=one_image) for path, both in own.items()} == engine.evaluate()


class Modes(nn.Module):
    """Does something in evaluation that it does not do in training; pools first."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.first = nn.MaxPool2d(2) if pool else None
        self.conv, self.bn, self.fc = nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x):
        x = x if self.first is None else self.first(x)
        x = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.fc(x if self.training or self.first is not None else x.flip(1))


def test_a_forward_that_asks_for_the_mode_is_evaluated_by_the_network_itself():
    engine = engine_of(Modes(pool=False), DPF(sparsity=0.5, steps=1000), "streams")
    assert isinstance(engine.executor, FusedExecutor) and engine.fused_evaluator is None
    plain = EagerEngine(engine.net, engine.optimizer, engine.loader, EngineSettings("eager", "tf32"))
    assert engine.evaluate() == plain.evaluate()
    assert engine_of(Modes(pool=True), DPF(sparsity=0.5, steps=1000), "streams").fused_evaluator is not None


def test_what_cannot_be_stacked_goes_on_streams():
    """The paths get the same images, so what stands before the first convolution is not twice as wide."""
    route = engine_of(Modes(pool=True), DCIL(sparsity=0.5, steps=1000), "stacked").executor
    assert isinstance(route, FusedExecutor) and list(route.programs) == [("pruned",), ("super",)]


def test_a_path_outside_of_the_loss_has_no_gradient():
    """Not the one of the step before; what momentum then does to it is the optimizer's affair."""
    torch.manual_seed(0)
    model = Modes(pool=True)
    plain, fused = (engine_of(copy.deepcopy(model), Late(sparsity=0.5, steps=1000), r) for r in ("plain", "streams"))
    assert isinstance(fused.executor, FusedExecutor)
    for (name, a), b in zip(plain.net.named_parameters(), fused.net.parameters(), strict=True):
        if name.startswith("super."):
            assert a.grad is None and not b.grad.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["dcil", "dcil 0.3"])
def test_low_memory_is_the_same_step(method, device):
    plain, low = (
        built(method, device, EngineSettings("eager", "fp32", low_memory=m), "wrn-10-1") for m in (False, True)
    )
    assert distance(tensors(go(plain, 1)), tensors(go(low, 1))) < 1e-5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_flat_sgd_is_torchs(momentum, nesterov, decay):
    if nesterov and not momentum:
        return
    theirs = nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.SGD([theirs], 0.1, momentum, weight_decay=decay, nesterov=nesterov)
    w, v = theirs.detach().clone(), torch.zeros(1000)
    for i in range(5):
        lr = 0.1 / (i + 1)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = torch.randn(1000)
        SGD.from_optimizer(optimizer).step(w, theirs.grad, v, torch.tensor(-lr), torch.tensor(0))
        optimizer.step()
        assert torch.allclose(w, theirs, rtol=1e-6, atol=1e-7)
    SGD.from_optimizer(optimizer).step(w, torch.full((1000,), torch.nan), v, torch.tensor(-0.1), torch.tensor(7))
    assert torch.allclose(w, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_is_not_finite_touches_no_weight_and_is_found(device):
    trainer = go(built("dcil", device, EngineSettings("graph", "fp32"), "wrn-10-1"), 3)
    before = {k: v.clone() for k, v in trainer.net.named_parameters()}
    trainer.engine.source.loader.normalize.shift.fill_(torch.nan)
    go(trainer, 2, epoch=1)
    assert all(torch.equal(before[k], v) for k, v in trainer.net.named_parameters())
    with pytest.raises(Diverged, match=r"nan at step 4\b"):
        trainer.engine.totals()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["dense", "dpf", "dcil"])
def test_resume_under_the_engine(tmp_path, method, device, monkeypatch):
    """A run that is stopped and resumed by the engine ends as one that was not."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    config = replace(SHORT, method=method, epochs=3, batch=300)
    speed = EngineSettings("graph", "fp32")
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")

    class Stop(Exception):
        pass

    def stop(epoch, part, row):
        if epoch == 1 and part > 0.5:
            raise Stop

    args = (Path("data"), torch.device(device))
    train(config, whole, *args, settings=speed)
    with pytest.raises(Stop):
        train(config, broken, *args, stop, speed)
    train(config, broken, *args, settings=speed)
    one, two = (load_file(f.path / "checkpoint.safetensors") for f in (whole, broken))
    for key in one:
        assert torch.equal(one[key], two[key]), key
    summary = json.loads((whole.path / "summary.json").read_text())
    assert summary["environment"]["engine"] == "graph"
    assert summary["environment"]["precision"] == "fp32"


class Odd(nn.Module):
    """Weights whose sizes leave gaps in the flat tensor, a transposed convolution among them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 5, 3, bias=False)
        self.two = nn.ConvTranspose2d(5, 3, 2, bias=False)
        self.last = nn.Linear(3, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.6, 0.95])
def test_the_ranking_moves_masks_as_the_method_does(sparsity, device):
    """Half of the weights tie, so which of them stay is decided by their place, not by how they lie in memory."""
    torch.manual_seed(0)
    net = SparseNet(Odd().to(device), DPF(sparsity=sparsity, steps=100, ramp=0.01))
    net.set_extra_state(torch.tensor(50))
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.copy_(torch.randint(-2, 3, layer.weight.shape))
            layer.mask.copy_(torch.rand(layer.mask.shape) < 0.5)
    other = copy.deepcopy(net)
    assert is_global_magnitude(net, net.method.update_key(net.steps_done))
    ranking = Ranking(net, FlatParameters(net, torch.optim.SGD(net.parameters(), 0.1)))
    got, want = ranking(net.context(None)), other.method.update_masks(other.context(None))
    assert got.tolist() == want.tolist()
    assert all(torch.equal(net.masks[name], mask) for name, mask in other.masks.items())
    assert net.groups()[0] == int(sparsity * net.groups()[1])


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_updates_are_the_eager_ones(device):
    """The first of a form is made, the second recorded, the others replayed, and each counts its own changes."""
    fast, plain = (built("dpf", device, EngineSettings("graph", "fp32"), "wrn-10-1") for _ in range(2))
    go(fast, 1), go(plain, 1)
    plain.net.hooks = plain.net.method
    plain.net.load_state_dict(fast.net.state_dict())
    for trainer in (fast, plain):
        trainer.net.set_extra_state(torch.tensor(fast.net.method.steps - 1))
    kept = []
    for i in range(5):
        for trainer in (fast, plain):
            torch.manual_seed(i)
            with torch.no_grad():
                for layer in trainer.net.layers:
                    layer.weight.add_(torch.randn(layer.weight.shape).to(device), alpha=0.05)
        a, b = (trainer.net.update_masks(trainer.optimizer) for trainer in (fast, plain))
        kept.append((a, b))
        assert all(torch.equal(fast.net.masks[name], mask) for name, mask in plain.net.masks.items())
    assert all(a.changes.tolist() == b.changes.tolist() and a.changes.sum() > 0 for a, b in kept)
    assert fast.net.hooks.recording is not None


def test_an_update_does_not_wait_for_another_run_that_is_recording():
    trainer = go(built("dpf", "cpu", EngineSettings("graph", "fp32"), "wrn-10-1"), 1)
    trainer.net.set_extra_state(torch.tensor(trainer.net.method.steps - 1))
    recording, done = threading.Event(), threading.Event()

    def other() -> None:
        with PROCESS_LOCK:
            recording.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    recording.wait(60)
    for _ in range(3):
        trainer.net.update_masks(trainer.optimizer)
    assert trainer.net.hooks.recording is None
    done.set()
    thread.join()
    trainer.net.update_masks(trainer.optimizer)
    assert trainer.net.hooks.recording is not None


class Noisy(DPF):
    def group_scores(self, layer, state):
        return torch.rand(layer.weight.numel(), generator=torch.Generator().manual_seed(self.seed))


def test_only_one_run_at_a_time_chooses_its_way(monkeypatch):
    """cuDNN may look for the best algorithm then, and waits for the device; that would spoil another's recording."""
    seen = []
    monkeypatch.setattr(graph, "choose", lambda *args: seen.append(PROCESS_LOCK._is_owned()) or choose(*args))
    go(built("dcil", "cpu", EngineSettings("graph", "fp32"), "wrn-10-1"), 1)
    assert seen == [True]


def test_only_updates_that_stay_on_the_device_are_recorded():
    plan = {"sparsity": 0.5, "steps": 100}
    for method in (DPF(**plan), METHODS["dcil"](**plan), METHODS["gmp"](**plan)):
        assert method.update_key(75) == method.update_key(80) != method.update_key(50)
    for method in (Noisy(**plan), DPF(**plan, criterion=OBS()), METHODS["set"](**plan), METHODS["rigl"](**plan)):
        assert method.update_key(50) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_batches_made_by_the_kernel_are_the_loaders():
    loader = data.load("digits", Path("data")).loader(100, torch.device("cuda"), 0)
    one, two = make_source(loader, exact=True), make_source(loader, exact=False)
    assert two.kernel and not one.kernel
    for size, _ in zip(one.train(3), two.train(3), strict=True):
        (x, y), (other_x, other_y) = one.batch(size), two.batch(size)
        assert torch.equal(y, other_y)
        assert (x - other_x).abs().max() < 1e-6


def test_only_small_windows_are_pooled_by_the_kernel():
    """It numbers the pixels of a window in a byte."""
    fast = [Pool(nn.MaxPool2d(k, s)).fast for k, s in ((3, 2), (8, 8), (9, 2), (28, 28), ((3, 3), 2))]
    assert fast == [kernels.AVAILABLE, kernels.AVAILABLE, False, False, False]
    assert not Pool(nn.MaxPool2d(3, 2, ceil_mode=True)).fast and not Pool(nn.MaxPool2d(3, 2, dilation=2)).fast


def test_choosing():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (EngineSettings().on(cpu).engine, EngineSettings().on(cpu).precision) == ("eager", "fp32")
    assert (EngineSettings().on(gpu).engine, EngineSettings().on(gpu).precision) == ("graph", "bf16")
    assert (EngineSettings("eager", "tf32").on(gpu).engine, EngineSettings("eager", "tf32").on(gpu).precision) == (
        "eager",
        "tf32",
    )
    with pytest.raises(UserError, match="did you mean 'graph'"):
        EngineSettings("grap")


def test_a_method_that_exchanges_layers_without_a_word_is_trained_eagerly():
    @dataclass(frozen=True, kw_only=True)
    class Quiet(METHODS["mil"]):
        def prepare(self, model):
            return super().prepare(model)

    net = SparseNet(models.build("resnet8-digits"), Quiet(steps=10))
    assert "without declaring its loss_key" in (obstacle(net, EngineSettings("graph")) or "")
    assert (
        obstacle(SparseNet(models.build("resnet8-digits"), METHODS["mil"](steps=10)), EngineSettings("graph")) is None
    )
