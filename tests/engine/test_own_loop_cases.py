"""make_step where more than the network is the user's: scalers, processes, shapes, hooks, settings that change."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path

import pytest
import torch
from processes import in_group, said, together
from test_own_loop import (
    CUDA,
    WAYS,
    adamw,
    assert_close,
    assert_same,
    batches,
    by_hand,
    images,
    is_chaotic,
    method_of,
    own,
    pair,
    recorded_ways,
    sgd,
    tokens,
    ways,
)  # fmt: skip
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcil
from dcil import DCIL, SparseNet, UserError
from dcil.engine.process_group import ProcessGroup


def fused_sgd(net):
    return torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, fused=True)


def fused_adamw(net):
    return torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.1, fused=True)


def scalers(device):
    """Scales that overflow in the first steps, which are skipped."""
    return [torch.amp.GradScaler(device, init_scale=2.0**30, growth_interval=3) for _ in range(2)]


def scaled_by_hand(net, opt, data, scaler, clip):
    """A loop in float16; attached to the optimizer, the net counts the steps that are not skipped."""
    net.attach(opt)
    losses = []
    for (x, y), _ in data:
        with torch.autocast(x.device.type, torch.float16, cache_enabled=False):
            loss = net.loss(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses)


@ways
@pytest.mark.parametrize("optimizer", [fused_sgd, fused_adamw, sgd])
@pytest.mark.parametrize(("kind", "clip"), [("gpt", 0.0), ("gpt", 0.5), ("wrn-10-1", 0.5)])
def test_float16_with_a_scaler(kind, clip, optimizer, way):
    device, settings = WAYS[way]
    settings = settings | ({"compiler": None} if device == "cpu" else {})
    nets, opts, make = pair(kind, method_of("dcil"), optimizer, device)
    # The scale grows until it overflows. (If the first step were skipped, torch's fused SGD would go on with momentum
    # that was never written.)
    by, mine = (torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=2) for _ in range(2))
    data = batches(make, device, 24)
    want = scaled_by_hand(nets[0], opts[0], data, by, clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an optimizer which is not fused steps eagerly
        step, got = own(nets[1], opts[1], data, scaler=mine, clip=clip, autocast=torch.float16, **settings)
    assert step.how.startswith("recorded" if settings.get("record", True) else "eager"), step.how
    done, scale = nets[0].steps_done, by.get_scale()
    assert 0 < done < 24 and scale > 2.0**14
    if is_chaotic(nets[0]):  # which steps overflow depends on rounding in the end
        assert_close(got[:8], want[:8], nets[0], 2e-2)
        assert scale / 16 <= mine.get_scale() <= scale * 16
        return
    assert_close(got, want, nets[0], 2e-2)
    assert mine.get_scale() == scale
    if device == "cpu":
        assert nets[1].steps_done == done and nets[1].sparsity == nets[0].sparsity > 0
    else:  # the last steps may not have been heard of yet
        assert done - 8 <= nets[1].steps_done <= done


# -- several processes ------------------------------------------------------------------------------------------------


def half_of(group: ProcessGroup, data):
    return [((x[group.rank :: 2], y[group.rank :: 2]), kwargs) for (x, y), kwargs in data]


def in_two_processes(group: ProcessGroup, folder: Path, kind: str, parts: int, low_memory: bool) -> None:
    (net, other), (opt, other_opt), make = pair(kind, method_of("dcil"), sgd, "cpu")
    data = half_of(group, batches(make, "cpu", 9))
    ddp, step = DistributedDataParallel(net), None
    if parts == 1 and not low_memory:  # the loop by hand
        for (x, y), _ in data:
            loss = net.loss(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            net.step(opt)
        torch.save(net.state_dict(), folder / f"hand-{group.rank}.pt")
    step = dcil.make_step(
        DistributedDataParallel(other), other_opt, record=True, accumulate=parts, low_memory=low_memory
    )
    for (x, y), _ in data:
        step(x, y)
    assert step.how.startswith("recorded"), step.how
    torch.save(other.state_dict(), folder / f"{group.rank}.pt")


@pytest.mark.parametrize("kind", ["gpt", "resnet8-digits"])
def test_ddp(kind, tmp_path):
    assert together(2, tmp_path, in_group, in_two_processes, tmp_path, kind, 1, False) == [0, 0], said(tmp_path)
    for rank in (0, 1):  # the last norm statistics are each process's own
        state = torch.load(tmp_path / f"{rank}.pt")
        for key, value in torch.load(tmp_path / f"hand-{rank}.pt").items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(("parts", "low_memory"), [(3, False), (1, True)])
def test_ddp_with_parts_or_one_path_at_a_time(parts, low_memory, tmp_path):
    codes = together(2, tmp_path, in_group, in_two_processes, tmp_path, "gpt", parts, low_memory)
    assert codes == [0, 0], said(tmp_path)
    (a, _), (opt, _), make = pair("gpt", method_of("dcil"), sgd, "cpu")
    by_hand(a, opt, batches(make, "cpu", 9), parts=parts)  # one process, the whole batches
    for rank in (0, 1):
        state = torch.load(tmp_path / f"{rank}.pt")
        for key, value in a.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


# -- what a recording cannot follow -----------------------------------------------------------------------------------


@recorded_ways
def test_more_shapes_than_there_are_recordings_for(way):
    device, settings = WAYS[way]
    nets, opts, _ = pair("tagger", method_of("dcil"), adamw, device)
    torch.manual_seed(3)
    data = [tokens(device, 2, 12 + i % 11) for i in range(25)]
    want = by_hand(nets[0], opts[0], data)
    with pytest.warns(UserWarning, match="takes some steps as they are: inputs have more than 8 shapes") as said_so:
        step, got = own(nets[1], opts[1], data, **settings)
    assert len([w for w in said_so if "some steps" in str(w.message)]) == 1
    assert step.how.startswith("recorded")
    assert_close(got, want, nets[0])
    assert_same(*nets)


def hooked(net):
    net.model.get_submodule("body").register_forward_hook(lambda module, inputs, output: output * 0.5)


def gradient_hook(net):
    net.model.embed.weight.register_hook(lambda grad: grad * 0.5)


def drawing(net):
    def scaled(x, forward=net.model.norm.forward):
        return forward(x) * (1 + random.random())

    net.model.norm.forward = scaled


@recorded_ways
@pytest.mark.parametrize(
    ("change", "reason"), [(hooked, "has hooks"), (gradient_hook, "has gradient hooks"), (drawing, "random numbers")]
)
def test_what_would_be_frozen_is_taken_as_it_is(change, reason, way):
    device, settings = WAYS[way]
    nets, opts, make = pair("tagger", method_of("dcil"), adamw, device)
    for net in nets:
        change(net)
    data = batches(make, device, 6)
    random.seed(0)
    want = by_hand(nets[0], opts[0], data)
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, got = own(nets[1], opts[1], data, **settings)
    assert step.how.startswith("eager") and reason in step.how, step.how
    assert_close(got, want, nets[0])
    assert_same(*nets)


@recorded_ways
def test_an_optimizer_that_counts_on_the_host_steps_outside_of_the_recording(way):
    class Slowing(torch.optim.SGD):
        """Halves its steps with every one."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["taken"] = group.get("taken", 0) + 1
                group["lr"] = 0.05 / group["taken"]
            return super().step(closure)

    device, settings = WAYS[way]
    nets, opts, make = pair("gpt", method_of("dcil"), lambda net: Slowing(net.parameters(), 0.05, 0.9), device)
    data = batches(make, device, 7)
    want = by_hand(nets[0], opts[0], data)
    step, got = own(nets[1], opts[1], data, **settings)
    assert "the optimizer steps eagerly: Slowing counts on the host ('taken' of group 0)" in step.how
    assert_close(got, want, nets[0])
    assert_same(*nets)


@recorded_ways
@pytest.mark.parametrize("change", ["weight decay", "mode", "frozen", "loaded", "again and again"])
@pytest.mark.parametrize("kind", ["gpt", "resnet8-digits"])
def test_settings_that_change_between_steps(kind, change, way):
    device, settings = WAYS[way]
    nets, opts, make = pair(kind, method_of("dcil"), adamw, device)
    data = batches(make, device, 14)
    saved = [copy.deepcopy(net.state_dict()) for net in nets]

    def alter(i, net, opt):
        if change == "weight decay" and i == 6:
            opt.param_groups[0]["weight_decay"] = 0.9
        elif change == "again and again":
            opt.param_groups[0]["weight_decay"] = 0.1 * i
        elif change == "mode" and i == 6:
            next(m for m in net.model.modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm2d))).eval()
        elif change == "frozen" and i == 6:
            next(p for p in net.model.parameters() if p.dim() == 1).requires_grad_(False)
        elif change == "loaded" and i == 6:
            net.load_state_dict(saved[0])

    step = dcil.make_step(nets[1], opts[1], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, ((x, y), _) in enumerate(data):
            alter(i, nets[0], opts[0])
            alter(i, nets[1], opts[1])
            want = by_hand(nets[0], opts[0], [((x, y), {})])[0]
            assert_close(step(x, y), want, nets[0], 1e-3)
    assert_same(*nets)
    assert ("again and again" in step.how) == (change == "again and again"), step.how


@ways
@pytest.mark.parametrize("where", ["compile", "call"])
def test_a_compiler_that_fails(where, way, monkeypatch):
    device, settings = WAYS[way]
    if settings.get("compiler", "inductor") is None or settings.get("record") is False:
        pytest.skip("compiles nothing")

    def failing(*args, **kwargs):
        if where == "compile":
            raise RuntimeError("no such compiler")
        return lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no such operator"))

    nets, opts, make = pair("gpt", method_of("dcil"), adamw, device)
    data = batches(make, device, 6)
    want = by_hand(nets[0], opts[0], data)
    monkeypatch.setattr(torch, "compile", failing)
    step, got = own(nets[1], opts[1], data, **settings | {"compiler": "aot_eager"})
    assert step.how == "recorded, as it is"
    assert_close(got, want, nets[0])
    assert_same(*nets)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line():
    net = SparseNet(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), DCIL(sparsity=0.5, steps=10))
    opt = sgd(net)
    x, y = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(UserError, match="must get a SparseNet, or DDP around one, got a Sequential"):
        dcil.make_step(net.model, opt)
    with pytest.raises(UserError, match="step must get a target, got keywords alone"):
        dcil.make_step(net, opt)(input=x)
    with pytest.raises(UserError, match="clip_norm must be >= 0, got -1"):
        dcil.make_step(net, opt, clip_norm=-1.0)
    with pytest.raises(UserError, match="accumulate must be >= 1, got 0"):
        dcil.make_step(net, opt, accumulate=0)
    with pytest.raises(UserError, match=r"scaler must be a torch\.amp\.GradScaler"):
        dcil.make_step(net, opt, scaler=2.0)
    with pytest.raises(UserError, match="task must be a function or a module"):
        dcil.make_step(net, opt, nn.CrossEntropyLoss)
    with pytest.raises(UserError, match="optimizer"):
        dcil.make_step(net, torch.optim.SGD(net.model[0].parameters(), 0.1))
    step = dcil.make_step(net, opt)
    with pytest.raises(UserError, match=r"call net\.train"):
        net.eval()
        step(x, y)


@pytest.mark.parametrize("way", ["as recorded", pytest.param("cuda", marks=CUDA)])
def test_an_error_in_forward_is_the_users(way):
    """What forward raises comes through, and the next batch is trained on."""
    device, settings = WAYS[way]
    nets, opts, _ = pair("resnet8-digits", method_of("dcil"), sgd, device)
    data = batches(images, device, 6)
    step = dcil.make_step(nets[1], opts[1], **settings)
    by_hand(nets[0], opts[0], data)
    for i, ((x, y), _) in enumerate(data):
        if i in (1, 4):
            with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError)):
                warnings.simplefilter("ignore")
                step(x[:, :2], y)
        step(x, y)
    if device == "cpu":
        assert_same(*nets)
    assert nets[1].steps_done == 6
