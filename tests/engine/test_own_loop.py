"""make_step against the loop by hand: the same numbers, for whatever is trained and however.

On the CPU nothing is recorded, but with ``record=True`` all else runs as on CUDA: slots, flat parameters, paths as
functions, fused networks, compiled ones, updates. The tests marked cuda repeat it with the recordings.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcil
from dcil import EMA, METHODS, SparseNet, models

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
#: device, arguments of make_step
WAYS = {
    "eager": ("cpu", {}),
    "as recorded": ("cpu", {"record": True}),
    "as compiled": ("cpu", {"record": True, "compiler": "aot_eager"}),
    "as it is": ("cpu", {"record": True, "compiler": None}),
    "cuda": ("cuda", {}),
    "cuda as it is": ("cuda", {"compiler": None}),
    "cuda eager": ("cuda", {"record": False}),
}
ON_CUDA = [pytest.param(way, marks=CUDA) for way in WAYS if "cuda" in way]
ways = pytest.mark.parametrize("way", ["as recorded", *ON_CUDA])
not_eager = [way for way in ON_CUDA if "eager" not in way.values[0]]
recorded_ways = pytest.mark.parametrize("way", ["as recorded", *not_eager])
all_ways = pytest.mark.parametrize("way", [*(way for way in WAYS if "cuda" not in way), *ON_CUDA])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Counted(nn.LayerNorm):
    """Assigns its buffer anew."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.detach().mean()
        return super().forward(x)


class Tagger(nn.Module):
    """Tokens, keyword arguments, a structured output, a tied head, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = Counted(16)

    def forward(self, tokens, *, mask=None, scale=1.0):
        hidden = self.norm(self.body(self.embed(tokens) * scale))
        hidden = hidden if mask is None else hidden * mask[..., None]
        return Output(self.head(hidden), hidden)


def images(device, n=8, size=8):
    x = torch.randn(n, 3, size, size, device="cpu").to(device)
    return (x, torch.randint(10, (n,)).to(device)), {}


def tokens(device, n=4, length=8):
    ids = torch.randint(11, (n, length))
    return (ids.to(device), ids.roll(-1, 1).to(device)), {}


def network(kind, device):
    torch.manual_seed(1)
    if kind == "tagger":
        return Tagger().to(device), tokens
    if kind == "gpt":
        return models.build("gpt-2-32", classes=11, size=16).to(device), tokens
    return models.build(kind).to(device), images


def batches(make, device, count):
    torch.manual_seed(2)
    return [make(device) for _ in range(count)]


def by_hand(net, opt, data, *, task=F.cross_entropy, autocast=None, clip=0.0, parts=1, schedule=None, ema=None,
            scaler=None, logits=None):  # fmt: skip
    """The loop of the README, with whatever may be in it; returns the losses."""
    losses = []
    for i, (args, kwargs) in enumerate(data):
        *inputs, target = args
        kind = net.first_mask.device.type
        with torch.autocast(kind, autocast, cache_enabled=False) if autocast else contextlib.nullcontext():
            loss = net.loss(net(*inputs, **kwargs), target, task, logits)
        if i % parts == 0:
            opt.zero_grad()
        part = loss / parts
        (scaler.scale(part) if scaler else part).backward()
        losses.append(loss.detach())
        if (i + 1) % parts:
            continue
        if scaler and clip:
            scaler.unscale_(opt)
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        (scaler.step(opt), scaler.update()) if scaler else opt.step()
        net.step(opt)
        if schedule:
            schedule.step()
        if ema:
            ema.update()
    return torch.stack(losses)


def own(net, opt, data, *, schedule=None, parts=1, clip=0.0, **settings):
    """The same with make_step."""
    step = dcil.make_step(net, opt, accumulate=parts, clip_norm=clip, **settings)
    losses = []
    for i, (args, kwargs) in enumerate(data):
        losses.append(step(*args, **kwargs))
        if schedule and (i + 1) % parts == 0:
            schedule.step()
    return step, torch.stack(losses)


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.1)


def grouped(net):
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    return torch.optim.SGD([{"params": matrices}, {"params": others, "weight_decay": 0.0}], 0.05, 0.9, weight_decay=0.1)


def method_of(name, steps=40):
    settings = {"warmup": 0.125} if name == "dcil" else {}
    return METHODS[name](sparsity=0.5, steps=steps, every=2, ramp=0.5, **settings)


def pair(kind, method, optimizer, device):
    """Two nets with an optimizer each, equal."""
    model, make = network(kind, device)
    net = SparseNet(model, method)
    nets = [net, copy.deepcopy(net)]
    return nets, [optimizer(net) for net in nets], make


def is_chaotic(net):
    """Whether another order of sums is another training after some steps: ReLUs at zero, small batches to norm."""
    return net.first_mask.is_cuda and any(isinstance(module, nn.Conv2d) for module in net.modules())


def assert_close(got, want, net, tolerance=1e-4):
    """The losses of both loops are equal to rounding."""
    tolerance = max(tolerance, 2e-2) if is_chaotic(net) else tolerance
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_same(a, b):
    """Masks bit for bit, all else to rounding.

    Fused networks round otherwise, which ReLU and AdamW's division magnify: two weights may nearly tie.
    """
    convolutional = any(isinstance(module, nn.Conv2d) for module in a.modules())
    tolerance, flips = (2e-3, 2) if convolutional else (1e-4, 0)
    if is_chaotic(a):
        tolerance, flips = 5e-2, 0.01 * sum(mask.numel() for mask in a.masks.values())
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        if x.dtype == torch.bool:
            assert int((x ^ y).sum()) <= flips, name
        elif not x.is_floating_point():
            assert torch.equal(x, y), name
        else:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "optimizer", "way"),
    [
        *[(kind, optimizer, "as recorded") for kind in ("wrn-10-1", "gpt") for optimizer in (sgd, adamw, grouped)],
        *[("gpt", adamw, way) for way in ("eager", "as compiled", "as it is")],
        *[("tagger", sgd, way) for way in ("eager", "as compiled", "as recorded")],
        ("resnet8-digits", sgd, "as it is"),
        *[
            pytest.param(kind, optimizer, way, marks=CUDA)
            for kind in ("resnet8-digits", "wrn-10-1", "gpt", "tagger")
            for optimizer in (sgd, adamw, grouped)
            for way in ("cuda", "cuda as it is")
        ],
    ],
)
def test_equal_to_the_loop_by_hand(kind, optimizer, way):
    device, settings = WAYS[way]
    (a, b), (opt_a, opt_b), make = pair(kind, method_of("dcil"), optimizer, device)
    data = batches(make, device, 9)
    want = by_hand(a, opt_a, data)
    step, got = own(b, opt_b, data, **settings)
    assert_close(got, want, a)
    assert_same(a, b)
    assert a.steps_done == b.steps_done == 9 and 0 < b.sparsity < 0.5
    assert step.how.startswith("eager" if "eager" in way else "recorded"), step.how
    for parameter, state in opt_b.state.items():  # torch's fused optimizers require it
        assert all(v.stride() == parameter.stride() for v in state.values() if v.shape == parameter.shape)
    assert a.metrics().keys() == b.metrics().keys()
    for name, value in a.metrics().items():
        assert b.metrics()[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@ways
@pytest.mark.parametrize("name", ["dense", "dpf", "gmp", "rigl", "sfp", "autoprune", "mil", "feather", "srste"])
def test_every_kind_of_method(name, way):
    device, settings = WAYS[way]
    unpruned = name in ("dense", "mil")
    method = (
        METHODS[name](steps=40) if unpruned else method_of(name) if name != "sfp" else dcil.SFP(sparsity=0.5, steps=40)
    )
    (a, b), opts, make = pair("wrn-10-1", method, sgd, device)
    data = batches(make, device, 5 if name == "mil" else 7)  # mil's products of ReLUs magnify rounding
    want, (step, got) = by_hand(a, opts[0], data), own(b, opts[1], data, **settings)
    assert_close(got, want, a)
    assert_same(a, b)
    assert step.how.startswith("eager" if "eager" in way else "recorded"), step.how


@all_ways
@pytest.mark.parametrize("kind", ["wrn-10-1", "gpt"])
def test_clipping_accumulation_schedule_and_average(kind, way):
    device, settings = WAYS[way]
    nets, opts, make = pair(kind, method_of("dcil"), adamw, device)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12) for opt in opts]
    averages = [EMA(net, 0.9, warmup=True) for net in nets]
    data = batches(make, device, 15)
    want = by_hand(nets[0], opts[0], data, parts=3, clip=0.5, schedule=schedules[0], ema=averages[0])
    _, got = own(nets[1], opts[1], data, parts=3, clip=0.5, schedule=schedules[1], ema=averages[1], **settings)
    assert_close(got, want, nets[0])
    assert_same(*nets)
    assert_same(*(average.net for average in averages))
    assert nets[1].steps_done == 5 and int(averages[1].updates) == 5
    assert opts[0].param_groups[0]["lr"] == opts[1].param_groups[0]["lr"] != 1e-3


@all_ways
@pytest.mark.parametrize("kind", ["wrn-10-1", "gpt", "tagger"])
def test_a_share_of_the_batch(kind, way):
    device, settings = WAYS[way]
    nets, opts, make = pair(kind, dataclasses.replace(method_of("dcil"), super_share=0.3), sgd, device)
    data = batches(make, device, 7)
    want = by_hand(nets[0], opts[0], data)
    step, got = own(nets[1], opts[1], data, **settings)
    assert_close(got, want, nets[0])
    assert_same(*nets)
    assert step.how.startswith("eager" if "eager" in way else "recorded"), step.how
    rows = [len(getattr(output, "logits", output)) for output in step.outputs.values()]
    assert rows == [len(data[-1][0][0]), math.ceil(0.3 * len(data[-1][0][0]))]
    assert nets[0].metrics()["loss/kl"] == pytest.approx(nets[1].metrics()["loss/kl"], rel=1e-3)


@ways
@pytest.mark.parametrize("kind", ["wrn-10-1", "gpt"])
def test_bfloat16(kind, way):
    device, settings = WAYS[way]
    nets, opts, make = pair(kind, method_of("dcil"), adamw, device)
    data = batches(make, device, 6)
    want = by_hand(nets[0], opts[0], data, autocast=torch.bfloat16)
    _, got = own(nets[1], opts[1], data, autocast=torch.bfloat16, **settings)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    assert nets[0].sparsity == nets[1].sparsity


@ways
def test_a_context_of_the_users_own_decides_the_precision(way):
    device, settings = WAYS[way]
    nets, opts, make = pair("gpt", method_of("dcil"), adamw, device)
    data = batches(make, device, 6)
    want = by_hand(nets[0], opts[0], data, autocast=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        step, got = own(nets[1], opts[1], data, **settings)
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    assert step.outputs["pruned"].dtype == torch.bfloat16


@ways
def test_keywords_structures_several_shapes_and_ignored_targets(way):
    device, settings = WAYS[way]
    nets, opts, _ = pair("tagger", method_of("dcil"), adamw, device)
    data = []
    torch.manual_seed(3)
    for i in range(14):
        (ids, labels), _ = tokens(device, 3, 5 + i % 3)
        mask = (torch.rand(ids.shape) < 0.8).float().to(device)
        data.append(((ids, labels.masked_fill(mask == 0, -100)), {"mask": mask, "scale": 0.5 if i % 2 else 1.0}))
    want = by_hand(nets[0], opts[0], data)
    step, got = own(nets[1], opts[1], data, **settings)
    assert_close(got, want, nets[0])
    assert_same(*nets)
    assert isinstance(step.outputs["super"], Output) and not step.outputs["super"].logits.requires_grad


@ways
def test_one_path_at_a_time(way):
    device, settings = WAYS[way]
    nets, opts, make = pair("wrn-10-1", method_of("dcil"), sgd, device)
    data = batches(make, device, 7)
    want = by_hand(nets[0], opts[0], data)
    _, got = own(nets[1], opts[1], data, low_memory=True, **settings)
    assert_close(got, want, nets[0])
    assert_same(*nets)
