"""The two contracts inside: masks are updated in SparseNet alone, and a method declares what may be recorded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcil
from dcil import DCIL, DPF, GMP, METHODS, AtSteps, Constant, Method, SparseNet
from dcil.distillation import MutualDistillation
from dcil.engine import EngineSettings, obstacle
from dcil.identity import checksum

PLAN = {"sparsity": 0.5, "steps": 100}


def small(method: Method) -> SparseNet:
    return SparseNet(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), method)


@dataclass(frozen=True, kw_only=True)
class OtherLoss(DCIL):
    def loss(self, outputs, target, task, step):
        return 2 * super().loss(outputs, target, task, step)


@dataclass(frozen=True, kw_only=True)
class DeclaredLoss(OtherLoss):
    def loss(self, outputs, target, task, step):
        return 3 * super().loss(outputs, target, task, step)

    def loss_key(self, step):
        return "three times"


@dataclass(frozen=True, kw_only=True)
class OtherScores(GMP):
    def group_scores(self, layer, state):
        return -super().group_scores(layer, state)


@dataclass(frozen=True, kw_only=True)
class OtherView(DPF):
    def view(self, path, layer, state):
        return layer.weight * 2


def test_a_hook_without_its_key_is_not_recorded():
    assert OtherLoss(**PLAN).loss_key(0) is None
    assert OtherLoss(**PLAN).update_key(80) == DCIL(**PLAN).update_key(80)  # the mask update is still the base's
    assert DeclaredLoss(**PLAN).loss_key(0) == "three times"
    assert GMP(**PLAN).update_key(80) is not None and OtherScores(**PLAN).update_key(80) is None
    assert OtherView(**PLAN).view_key("pruned") is None and OtherView(**PLAN).loss_key(0) is None
    assert "loss_key" in (obstacle(small(OtherLoss(**PLAN)), EngineSettings("graph")) or "")
    assert obstacle(small(DeclaredLoss(**PLAN)), EngineSettings("graph")) is None


def test_the_loss_key_says_when_the_kl_terms_begin():
    method = DCIL(**PLAN, warmup=0.5)
    assert method.loss_key(49) == MutualDistillation(0.0, 2.0) != method.loss_key(50) == MutualDistillation(1.0, 2.0)


class Observer:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def before_update(self, step: int) -> None:
        self.seen.append(("before", step))

    def after_update(self, update: dcil.Update) -> None:
        self.seen.append(("after", update.step))


def test_observers_are_told_of_every_update_and_of_nothing_else():
    net, observer = small(DPF(**PLAN, every=4)), Observer()
    net.add_observer(observer)
    for _ in range(9):
        net.step()
    net.update_masks()
    assert observer.seen == [("before", 4), ("after", 4), ("before", 8), ("after", 8), ("before", 9), ("after", 9)]
    assert net.steps_done == 9


def test_the_sparsity_grows_by_epoch_unless_it_is_smooth():
    by_epoch, smooth = (DPF(**PLAN, epoch_steps=10, smooth=smooth) for smooth in (False, True))
    assert by_epoch.sparsity_at(19) == by_epoch.sparsity_at(10) == smooth.sparsity_at(10) < smooth.sparsity_at(19)


def test_criteria_observe_every_step():
    net = small(DPF(**PLAN, criterion=dcil.OBD()))
    for _ in range(2):
        before = {name: tensor.clone() for name, tensor in net.state.items()}
        net.zero_grad()
        net.loss(net(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
        net.step()
        assert before and all(not torch.equal(before[name], net.state[name]) for name in before)


def test_the_count_of_kept_weights_follows_the_updates():
    net = small(DPF(**PLAN, every=4))
    for _ in range(80):
        net.model[0].weight.data.normal_()
        net.step()
    assert int(net._kept) == int(net.masks["0.weight"].sum()) == 16


def test_the_weight_of_the_kl_terms_is_a_factor():
    p, s = torch.randn(2, 6, 3)
    outputs, target = {"pruned": p, "super": s}, torch.tensor([0, 1, 2, 0, 1, 2])
    none, half, whole = (
        DCIL(**PLAN, warmup=0.0, kl=kl).loss(outputs, target, F.cross_entropy, 0) for kl in (0.0, 0.5, 1.0)
    )
    assert whole > none
    torch.testing.assert_close(half - none, (whole - none) / 2)


def test_a_schedule_is_a_setting_like_any_other():
    method = DPF(**PLAN, schedule=Constant())
    assert method.sparsity_at(1) == 0.5 and DPF(**PLAN).sparsity_at(1) < 0.1
    rounds = METHODS["oneshot"](sparsity=0.75, steps=100, ramp=0.5, rounds=2)
    assert isinstance(rounds.schedule, AtSteps)
    assert [step for step in range(1, 101) if rounds.due(step)] == [50, 75]
    assert [rounds.sparsity_at(step) for step in (49, 50, 75)] == pytest.approx([0.0, 0.5, 0.75])


def test_a_masks_update_without_a_gradient_is_refused_in_one_line():
    net = small(DPF(**PLAN, criterion=dcil.Taylor()))
    with pytest.raises(dcil.UserError, match="must have a gradient"):
        net.update_masks()


def test_the_old_name_of_the_step_context_still_works():
    with pytest.warns(DeprecationWarning, match="StepContext"):
        assert dcil.Moment is dcil.StepContext
    assert torch.is_tensor(small(DPF(**PLAN)).context(None).layers[0].mask)


@pytest.mark.parametrize("kind", [DCIL, DPF])
def test_the_target_step_has_an_update_of_its_own_only_if_no_regular_one_follows(kind):
    """The paper's recipe: 225 of 300 epochs of 391 steps, masks every 16: 87,975 is no multiple, 87,984 is the next."""
    method = kind(sparsity=0.9, steps=300 * 391, ramp=0.75, epoch_steps=391)
    assert method.target_step % 16 == 7
    assert [step for step in range(87_960, 88_000) if method.due(step)] == [87_968, 87_984]
    assert method.sparsity_at(87_968) < 0.9 == method.sparsity_at(87_984)
    late = kind(sparsity=0.9, steps=100, ramp=0.98)
    assert [step for step in range(1, 101) if late.due(step)] == [16, 32, 48, 64, 80, 96, 98]
    assert [step for step in range(1, 11) if kind(sparsity=0.9, steps=10).due(step)] == [8]  # every 16, target 8
    assert [step for step in range(1, 11) if kind(sparsity=0.9, steps=10, ramp=1.0).due(step)] == [10]


def test_masks_that_stay_from_the_target_on_are_updated_there():
    for method in (DPF(sparsity=0.9, steps=100, freeze=True), METHODS["gmp"](sparsity=0.9, steps=100, every=16)):
        assert [step for step in range(1, 101) if method.due(step)] == [16, 32, 48, 64, 75]


def test_state_dicts_from_before_a_default_changed_are_recognised():
    """The numbers are those that the version with these settings as defaults wrote."""
    now = {"scope": dcil.Uniform(), "shortcuts": True}
    assert checksum(dcil.SFP(sparsity=0.3, steps=10, **now)) == 2536583309 != checksum(dcil.SFP(sparsity=0.3, steps=10))
    assert checksum(dcil.FPGM(sparsity=0.3, steps=10, gradual=True, **now)) == 3095339118
    assert checksum(dcil.GMP(sparsity=0.9, steps=10)) == 3847084216
    assert checksum(DCIL(sparsity=0.95, steps=100)) == 3873205558
