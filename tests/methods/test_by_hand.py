"""What makes each method that method, against values worked out by hand on tiny tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from networks import NETWORKS, batch
from torch import nn

from dcil import (
    DNS,
    DSR,
    ERK,
    FPGM,
    GMP,
    MIL,
    OBD,
    OBS,
    SET,
    SFP,
    SM,
    AutoPrune,
    Filter,
    Gradient,
    L1Filter,
    Magnitude,
    OneShot,
    Rewind,
    RigL,
    SparseNet,
    Taylor,
    Uniform,
    models,
)
from dcil.method import StepContext
from dcil.methods.dsr import spread
from dcil.methods.mil import LowCost
from dcil.methods.sm import momentum_shares, redistribute
from dcil.schedule import Phase
from dcil.scope import apportion
from dcil.weight import PrunableWeight


def layer(values, mask=None, grad=None, name="w"):
    weight = nn.Parameter(torch.tensor(values, dtype=torch.float))
    if grad is not None:
        weight.grad = torch.tensor(grad, dtype=torch.float)
    kept = torch.ones_like(weight, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return PrunableWeight(name, weight, kept)


def moment(*layers, step=1, momentum=None, state=None):
    opt = torch.optim.SGD([one.weight for one in layers], lr=0.1, momentum=0.9)
    for one, buffer in zip(layers, momentum or [], strict=False):
        opt.state[one.weight]["momentum_buffer"] = torch.tensor(buffer, dtype=torch.float)
    return StepContext(layers, step, opt, state if state is not None else {}, nn.Module())


def update(method, now):
    with torch.no_grad():
        method.update(now)


# -- spreading over layers --------------------------------------------------------------------------------------------


def test_counts_are_exact_by_largest_remainder():
    assert apportion([0.5, 0.5, 0.5], [3, 3, 3], 4) == [2, 1, 1]  # 1.5 each: the first gets the one more
    assert apportion([0.9, 0.1], [10, 10], 10) == [9, 1]
    assert apportion([0.25, 0.75], [3, 3], 3) == [1, 2]  # 0.75 and 2.25
    assert apportion([1.0, 1.0], [2, 5], 7) == [2, 5]


def test_erk_densities():
    # raw: (2 + 2) / 4 = 1 and (8 + 8) / 64 = 0.25; scale = 0.5 * 68 / (1 * 4 + 0.25 * 64) = 1.7: the first would
    # have density 1.7, so it is dense and the second shares the rest: (34 - 4) / 64.
    small, large = layer([[1.0] * 2] * 2), layer([[1.0] * 8] * 8)
    assert ERK().sparsities([small, large], 0.5) == pytest.approx([0.0, 1 - 30 / 64])
    # No layer over 1: both by the formula. scale = 0.2 * 68 / 20 = 0.68
    assert ERK().sparsities([small, large], 0.8) == pytest.approx([1 - 0.68, 1 - 0.17])


def test_er_leaves_the_kernel_out():
    conv = PrunableWeight("c", nn.Parameter(torch.ones(4, 2, 3, 3)), torch.ones(4, 2, 3, 3, dtype=torch.bool))
    other = PrunableWeight("d", nn.Parameter(torch.ones(2, 2, 1, 1)), torch.ones(2, 2, 1, 1, dtype=torch.bool))
    er, erk = ERK(kernel=False).sparsities([conv, other], 0.9), ERK().sparsities([conv, other], 0.9)
    ratio = (1 - er[0]) / (1 - er[1])
    assert ratio == pytest.approx((6 / 8) / (4 / 4))
    assert (1 - erk[0]) / (1 - erk[1]) == pytest.approx((12 / 72) / (6 / 4))


def test_uniform_masks_are_the_same_in_every_layer():
    method = GMP(sparsity=0.5, steps=1, stem=True)
    small, large = layer([[1.0, 2.0]]), layer([[10.0, 20.0]])
    update(method, moment(small, large))
    assert small.mask.tolist() == [[False, True]]
    assert large.mask.tolist() == [[False, True]]
    assert small.weight.tolist() == [[0.0, 2.0]]


# -- gmp, oneshot, rewind ---------------------------------------------------------------------------------------------


def test_gmp_never_brings_a_weight_back_and_stops_at_the_target():
    method = GMP(sparsity=0.5, steps=1000, ramp=0.5, every=100)
    assert [s for s in range(1, 1001) if method.due(s)] == [100, 200, 300, 400, 500]
    one = layer([[3.0, 1.0, 2.0, 4.0]], mask=[[True, False, True, True]])
    with torch.no_grad():
        one.weight[0, 1] = 0.7  # something moved it, say momentum
    now = moment(one, momentum=[[[1.0, 1.0, 1.0, 1.0]]])
    with torch.no_grad():
        method.after_step(now)
    assert one.weight.tolist() == [[3.0, 0.0, 2.0, 4.0]]
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[1.0, 0.0, 1.0, 1.0]]


def test_defaults_say_which_layers():
    net = SparseNet(models.build("resnet8-digits"), GMP(sparsity=0.5, steps=10))
    assert "conv1.weight" not in net.masks
    assert "fc.weight" in net.masks
    net = SparseNet(models.build("resnet8-digits"), DSR(sparsity=0.5, steps=10))
    assert not [name for name in net.masks if "shortcut" in name or name in ("conv1.weight", "fc.weight")]
    assert len(net.masks) == 6
    net = SparseNet(models.build("resnet8-digits"), L1Filter(sparsity=0.5, steps=10))
    assert list(net.masks) == [f"layer{i}.0.conv1.weight" for i in (1, 2, 3)]


def test_oneshot_prunes_in_rounds_of_equal_ratio():
    method = OneShot(sparsity=0.75, steps=100, ramp=0.6, rounds=2)
    assert [s for s in range(1, 101) if method.due(s)] == [60, 80]
    assert [method.sparsity_at(s) for s in (59, 60, 79, 80)] == pytest.approx([0.0, 0.5, 0.5, 0.75])
    assert method.phases() == (Phase("train", 60), Phase("fine-tune", 20, None), Phase("fine-tune", 20, None))
    plain = OneShot(sparsity=0.5, steps=100, ramp=0.6, constant=False)
    assert plain.phases() == (Phase("train", 60, 0), Phase("fine-tune", 40, 60))


def test_oneshot_starts_the_fine_tuning_with_an_empty_optimizer():
    one = layer([[3.0, 1.0]])
    now = moment(one, step=8, momentum=[[[5.0, 5.0]]])
    now = StepContext(now.layers, 8, now.optimizer, {}, nn.ParameterList([one.weight]))
    update(OneShot(sparsity=0.5, steps=10), now)
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[0.0, 0.0]]
    assert one.weight.tolist() == [[3.0, 0.0]]


def test_rewind_goes_back_to_the_early_weights_and_learning_rate():
    torch.manual_seed(0)
    method = Rewind(sparsity=0.5, steps=10, to=0.3, weights=True, classifier=False)
    assert method.phases() == (Phase("train", 10), Phase("retrain", 7, start=3))
    net = SparseNet(NETWORKS["plain"][0](), method).train()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 11):
        x, y = batch((2, 8, 8), 6, torch.float)
        opt.zero_grad()
        net.loss(net(x), y).backward()
        opt.step()
        before = {n: t.clone() for n, t in net.model.state_dict().items()}
        net.step(opt)
        if step == 3:
            early = before
    for name, tensor in net.model.state_dict().items():
        mask = net.masks.get(name)
        assert torch.equal(tensor, early[name] * mask if mask is not None else early[name]), name
    # The choice was made by the final weights.
    scores = torch.cat([before[n].abs().flatten() for n in net.masks])
    flat = torch.cat([m.flatten() for m in net.masks.values()])
    assert scores[flat].min() >= scores[~flat].max()


def test_rewind_keeps_the_weights_by_default_and_counts_its_rounds():
    method = Rewind(sparsity=0.75, steps=100, to=0.2, rounds=2)
    assert [s for s in range(1, 400) if method.due(s)] == [100, 180]
    assert [method.sparsity_at(s) for s in (99, 100, 180)] == pytest.approx([0.0, 0.5, 0.75])
    assert sum(phase.steps for phase in method.phases()) == 100 + 2 * 80
    one = layer([[3.0, 1.0, 2.0, 4.0]])
    update(Rewind(sparsity=0.5, steps=10), moment(one, step=10))
    assert one.weight.tolist() == [[3.0, 0.0, 0.0, 4.0]]


# -- drop and grow ----------------------------------------------------------------------------------------------------


def test_rigl_drops_small_weights_and_grows_large_gradients():
    method = RigL(sparsity=0.5, steps=1000, drop=0.5, scope=Uniform())
    assert method.drop_at(0) == 0.5
    assert method.drop_at(375) == pytest.approx(0.25)
    assert [s for s in range(1, 1001) if method.due(s)] == [100, 200, 300, 400, 500, 600, 700]
    one = layer([[5.0, 1.0, 0.0, 0.0]], mask=[[True, True, False, False]], grad=[[9.0, 0.1, 0.2, -0.7]])
    update(RigL(sparsity=0.5, steps=10_000, drop=0.6, scope=Uniform()), moment(one, step=100))
    assert one.mask.tolist() == [[True, False, False, True]]
    assert one.weight.tolist() == [[5.0, 0.0, 0.0, 0.0]]


def test_rigl_keeps_value_and_momentum_of_a_weight_dropped_and_regrown():
    one = layer([[5.0, 1.0, 0.0, 0.0]], mask=[[True, True, False, False]], grad=[[0.0, 8.0, 0.2, -0.7]])
    now = moment(one, step=100, momentum=[[[1.0, 2.0, 3.0, 4.0]]])
    update(RigL(sparsity=0.5, steps=10_000, drop=0.6, scope=Uniform()), now)
    assert one.mask.tolist() == [[True, True, False, False]]
    assert one.weight.tolist() == [[5.0, 1.0, 0.0, 0.0]]
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[1.0, 2.0, 0.0, 0.0]]


def test_rigl_moves_as_much_of_a_nearly_dense_layer_as_of_others():
    """Three of five go, though one place only is empty: what is grown again keeps its value."""
    values, gradient = [[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]], [[0.0, 0.0, 0.5, 9.0, 0.1, 8.0]]
    one = layer(values, mask=[[True] * 5 + [False]], grad=gradient)
    method = RigL(sparsity=1 / 6, steps=10_000, drop=0.7, scope=Uniform())
    assert method.moved(moment(one, step=1)) == [(5, 3)]
    update(method, moment(one, step=1))
    assert one.mask.tolist() == [[True, True, True, True, False, True]]  # 3, 2 and 1 go; 2, the new one and 3 come
    assert one.weight.tolist() == [[5.0, 4.0, 3.0, 2.0, 0.0, 0.0]]


def test_rigl_leaves_a_dense_layer_as_it_is():
    one = layer([[3.0, 2.0, 1.0, 0.5]], grad=[[1.0, 2.0, 3.0, 4.0]])
    now = moment(one, step=1, momentum=[[[1.0, 2.0, 3.0, 4.0]]])
    update(RigL(sparsity=0.0, steps=10_000, drop=0.5), now)
    assert one.mask.all() and one.weight.tolist() == [[3.0, 2.0, 1.0, 0.5]]
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_set_drops_on_both_sides_and_grows_at_random():
    values = [[4.0, 0.1, 3.0, 2.0, -0.2, -5.0, -6.0, -7.0] + [0.0] * 8]
    one = layer(values, mask=[[True] * 8 + [False] * 8])
    update(SET(sparsity=0.5, steps=100, zeta=0.25), moment(one, step=4))
    survivors = [0, 2, 3, 5, 6, 7]
    assert int(one.mask.sum()) == 8
    assert one.mask[0, survivors].all()
    assert one.weight[0, survivors].tolist() == [4.0, 3.0, 2.0, -5.0, -6.0, -7.0]
    fresh = one.mask.clone()
    fresh[0, survivors] = False
    assert int(fresh.sum()) == 2
    assert (one.weight[fresh] == 0).all()


def test_set_draws_from_seed_and_step_only():
    def grown(seed, step):
        one = layer([[1.0, 2.0, 3.0, 4.0] + [0.0] * 60], mask=[[True] * 4 + [False] * 60])
        update(SET(sparsity=0.5, steps=100, zeta=0.5, seed=seed), moment(one, step=step))
        return one.mask.tolist()

    assert grown(1, 5) == grown(1, 5)
    assert grown(1, 5) != grown(1, 6)
    assert grown(1, 5) != grown(2, 5)


def test_dsr_threshold_control():
    method = DSR(sparsity=0.5, steps=100, move=0.25)
    assert method.factor(12, 10) == 0.5
    assert method.factor(8, 10) == 2.0
    assert method.factor(11, 10) == 1.0
    assert method.factor(9, 10) == 1.0


def test_dsr_moves_weights_between_layers_but_not_back_at_once():
    a = layer([[5.0, 0.1, 0.1, 0.1, 0.0, 0.0]], mask=[[True] * 4 + [False] * 2], name="a")
    b = layer([[5.0, 6.0, 7.0] + [0.0] * 3], mask=[[True] * 3 + [False] * 3], name="b")
    state = {"threshold": torch.tensor(0.5, dtype=torch.double)}
    # 3 dropped of N = 0.25 * 12 = 3: the threshold stays. Left: 1 and 3, so a gets 0.75 and b 2.25 places.
    update(DSR(sparsity=0.5, steps=1000, move=0.25), moment(a, b, step=100, state=state))
    assert float(state["threshold"]) == 0.5
    assert int(a.mask.sum()) == 2
    assert int(b.mask.sum()) == 5
    assert not a.mask[0, 1:4].any()  # just dropped
    assert a.weight.tolist() == [[5.0, 0, 0, 0, 0, 0]]


def test_dsr_leaves_one_weight_in_a_layer_and_offers_what_does_not_fit_again():
    a = layer([[0.1, 0.2]], name="a")
    b = layer([[5.0, 0.0, 0.0, 0.0]], mask=[[True, False, False, False]], name="b")
    state = {"threshold": torch.tensor(1.0, dtype=torch.double)}
    update(DSR(sparsity=0.5, steps=1000, move=0.5), moment(a, b, step=100, state=state))
    assert a.mask.tolist() == [[False, True]]
    assert int(b.mask.sum()) == 2
    assert float(state["threshold"]) == 2.0  # 1 dropped, 3 wanted
    assert spread([10, 10], [1, 100], 6) == [1, 5]
    assert spread([1, 1], [50, 50], 20) == [10, 10]


def test_dsr_period_stretches():
    method = DSR(sparsity=0.5, steps=100_000)
    due = [s for s in range(1, 100_001) if method.due(s)]
    gaps = {b - a for a, b in itertools.pairwise(due)}
    assert {100, 200, 400, 800} <= gaps
    assert max(due) < 95_000


def test_sm_shares_follow_the_mean_momentum_of_active_weights():
    directions = [torch.tensor([1.0, 3.0, 100.0]), torch.tensor([6.0, 6.0])]
    masks = [torch.tensor([True, True, False]), torch.tensor([True, True])]
    assert momentum_shares(directions, masks) == pytest.approx([0.25, 0.75])


def test_sm_redistribution_and_caps():
    assert redistribute([0.25, 0.75], [100, 100], 40) == [10, 30]
    # The second layer wants 90 but holds 0.99 * 50 = 49; its overflow of 41 goes to the first.
    assert redistribute([0.1, 0.9], [1000, 50], 100) == [51, 49]
    # Overflow spread evenly over two layers.
    assert redistribute([0.0, 0.0, 1.0], [100, 100, 10], 29) == [10, 10, 9]
    # Hardly anything empty: the cap of 0.99 cannot hold, the places must be enough.
    assert redistribute([0.5, 0.5], [3, 3], 6) == [3, 3]


def test_sm_update_by_hand():
    method = SM(sparsity=0.5, steps=1_000_000, drop=0.5, drop_end=0.5)
    a = layer([[4.0, 1.0, 0.0, 0.0]], mask=[[True, True, False, False]], name="a")
    b = layer([[3.0, 2.0, 0.0, 0.0]], mask=[[True, True, False, False]], name="b")
    # mean momentum of active: a 1, b 3: shares 0.25, 0.75. One dropped in each; both grow in b? wanted 0.5 and 1.5,
    # b has 3 empty places (cap 2): rounded down 0 and 1, the larger remainder is the first of the equals.
    now = moment(a, b, step=1, momentum=[[[1.0, 1.0, 0.5, 0.9]], [[3.0, 3.0, 0.1, 7.0]]])
    update(method, now)
    assert a.mask.tolist() == [[True, True, False, False]]  # regrown where momentum is largest: its old place
    assert b.mask.tolist() == [[True, False, False, True]]
    assert a.weight.tolist() == [[4.0, 0.0, 0.0, 0.0]]
    assert now.optimizer.state[b.weight]["momentum_buffer"][0, 1] == 3.0  # momentum is never cleared


def test_sm_a_nearly_dense_layer_gives_up_little():
    method = SM(sparsity=0.5, steps=100)
    assert method.dropped(0, share=0.9, nnz=90, size=100, mean=0.5) == math.ceil(0.1 * 90)
    assert method.dropped(0, share=0.1, nnz=90, size=100, mean=0.5) == 45
    assert method.dropped(0, share=0.9, nnz=70, size=100, mean=0.5) == 35
    assert method.drop_at(0) == 0.5
    assert method.drop_at(100) == pytest.approx(0.005)


@pytest.mark.parametrize("scope", [Uniform(), ERK()])
def test_sparse_start_is_random_exact_and_zero(scope):
    net = SparseNet(models.build("resnet8-digits"), SET(sparsity=0.9, steps=100, scope=scope))
    total = sum(m.numel() for m in net.masks.values())
    assert sum(int((~m).sum()) for m in net.masks.values()) == int(0.9 * total)
    for one in net.layers:
        assert (one.weight[~one.mask] == 0).all()
    if isinstance(scope, Uniform):
        for mask in net.masks.values():
            assert abs(int(mask.sum()) - 0.1 * mask.numel()) <= 1


# -- filters ----------------------------------------------------------------------------------------------------------


def test_sfp_zeroes_but_trains_on():
    method = SFP(sparsity=0.5, steps=100, epoch_steps=10)
    assert [s for s in range(1, 101) if method.due(s)] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    one = layer([[3.0, 3.0], [1.0, 1.0]])
    now = moment(one, step=10, momentum=[[[1.0, 1.0], [1.0, 1.0]]])
    update(method, now)
    assert one.mask.tolist() == [[True, True], [False, False]]
    assert one.weight.tolist() == [[3.0, 3.0], [0.0, 0.0]]
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    (method.view("pruned", one, {}) * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert one.weight.grad.tolist() == [[1.0, 2.0], [3.0, 4.0]]  # the zeroed filter still learns


@pytest.mark.parametrize("kind", [SFP, FPGM])
def test_filters_are_counted_by_layer_and_rounded_down_unless_the_total_is_to_be_exact(kind):
    """ResNet-32 at 30 %: 4 of 16, 9 of 32 and 19 of 64 filters, 28.5 % in all; shortcuts are left alone."""
    net = SparseNet(models.build("resnet32"), kind(sparsity=0.3, steps=10))
    assert {len(mask): int((~mask[:, 0, 0, 0]).sum()) for mask in net.masks.values()} == {16: 4, 32: 9, 64: 19}
    dead = [int((~mask[:, 0, 0, 0]).sum()) for mask in net.masks.values()]
    assert sum(dead) / sum(map(len, net.masks.values())) == pytest.approx(0.2852, abs=1e-4)
    assert len(net.masks) == 31  # the stem and two for each of 15 blocks
    exact = SparseNet(models.build("resnet32"), kind(sparsity=0.3, steps=10, scope=Uniform(), shortcuts=True))
    assert len(exact.masks) == 33
    dead = [int((~mask[:, 0, 0, 0]).sum()) for mask in exact.masks.values()]
    assert sum(dead) == int(0.3 * sum(map(len, exact.masks.values())))


def test_fpgm_distances_by_hand():
    # Points 0, 1, 2, 10 on a line: sums of distances 13, 11, 11, 27. The two in the middle go, not the small one.
    one = layer([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [10.0, 0.0]])
    method = FPGM(sparsity=0.5, steps=10)
    assert method.group_scores(one, {}).tolist() == [13.0, 11.0, 11.0, 27.0]
    update(method, moment(one, step=10))
    assert one.mask[:, 0].tolist() == [True, False, False, True]


def test_l1_scores_are_sums_of_magnitudes():
    one = layer([[3.0, 0.0], [2.0, -2.0], [-1.0, 1.0]])
    method = L1Filter(sparsity=0.4, steps=10, inner=False)
    assert method.group_scores(one, {}).tolist() == [3.0, 4.0, 2.0]
    squares = Filter().groups(one, Magnitude().score(one, {}), Magnitude.power) ** 2 * 2
    assert squares.tolist() == pytest.approx([9.0, 8.0, 2.0])  # L2 would put the first before the second
    update(method, moment(one, step=8))
    assert one.mask[:, 0].tolist() == [True, True, False]


# -- dns, autoprune, mil ----------------------------------------------------------------------------------------------


def test_dns_hysteresis_by_hand():
    """|w| of 1: thresholds 0.9 and 1.1. In between, a weight stays what it was."""
    values = [[0.85, 0.95, 1.05, 1.15, 0.85, 0.95, 1.05, 1.15]]
    one = layer(values, mask=[[True] * 4 + [False] * 4])
    state = {"threshold.w": torch.tensor(1.0)}
    update(DNS(sparsity=0.5, steps=100, c=3.0), moment(one, step=30, state=state))
    assert one.mask.tolist() == [[False, True, True, True, False, False, False, True]]


def test_dns_thresholds_are_mean_plus_c_std_and_stay():
    one = layer([[1.0, 3.0, -1.0, -3.0]])
    state = {"threshold.w": torch.tensor(torch.nan)}
    method = DNS(sparsity=0.5, steps=100, c=0.5)
    update(method, moment(one, step=30, state=state))
    assert float(state["threshold.w"]) == pytest.approx(2 + 0.5 * 1)
    with torch.no_grad():
        one.weight.mul_(100)
    update(method, moment(one, step=31, state=state))
    assert float(state["threshold.w"]) == pytest.approx(2.5)


def test_dns_solved_for_a_sparsity_respects_the_hysteresis():
    # Scores: kept 1.0 / 0.9 = 1.11, cut 1.2 / 1.1 = 1.09: the cut one is larger but not by enough.
    one = layer([[1.0, 1.2, 5.0, 0.1]], mask=[[True, False, True, False]])
    update(DNS(sparsity=0.5, steps=100), moment(one, step=30))
    assert one.mask.tolist() == [[True, False, True, False]]
    with torch.no_grad():
        one.weight[0, 1] = 1.3
    update(DNS(sparsity=0.5, steps=100), moment(one, step=30))
    assert one.mask.tolist() == [[False, True, True, False]]


def test_dns_surgery_becomes_rare():
    method = DNS(sparsity=0.5, steps=40_000, begin=0.0, until=1.0, gamma=1e-2)
    due = [method.due(s) for s in range(1, 40_000)]
    early, late = sum(due[:2000]), sum(due[-2000:])
    assert early > 5 * late > 0
    assert due == [method.due(s) for s in range(1, 40_000)]
    expected = sum(1 / (1 + 1e-2 * s) for s in range(2000))
    assert early == pytest.approx(expected, rel=0.3)


def test_dns_with_c_says_what_it_reached():
    torch.manual_seed(0)
    net = SparseNet(NETWORKS["plain"][0](), DNS(sparsity=0.9, steps=20, c=0.0, begin=0.1))
    for _ in range(20):
        net.step()
    (note,) = [n for n in net.notes() if "asked for" in n]
    assert "0.9" in note
    assert f"{net.sparsity:.4f}" in note


def test_autoprune_gradients_by_hand():
    method = AutoPrune(sparsity=0.5, steps=10, rate=0.1)
    one = layer([[2.0, -3.0]], mask=[[True, False]])
    state = {"indicator.w": torch.tensor([[0.0, 1.0]])}
    seen = method.view("pruned", one, state)
    assert seen.tolist() == [[2.0, -0.0]]
    (seen * torch.tensor([[5.0, 7.0]])).sum().backward()
    assert one.weight.grad.tolist() == [[5.0, 0.0]]
    sigmoid = [0.5, 1 / (1 + math.exp(-1))]
    want = [5.0 * sigmoid[0], -7.0 * sigmoid[1]]
    assert state["indicator.w"].grad.tolist()[0] == pytest.approx(want)
    with torch.no_grad():
        method.after_step(moment(one, state=state))
    assert state["indicator.w"].tolist()[0] == pytest.approx([0 - 0.1 * want[0], 1 - 0.1 * want[1]])
    assert state["indicator.w"].grad is None


def test_autoprune_with_mu_prunes_below_zero():
    one = layer([[2.0, -3.0, 1.0]])
    state = {"indicator.w": torch.tensor([[0.1, -0.1, 0.0]])}
    update(AutoPrune(sparsity=0.5, steps=10, mu=0.05), moment(one, state=state))
    assert one.mask.tolist() == [[True, False, False]]


def test_mil_wraps_copies_and_counts():
    model = models.build("resnet8-digits", 4, 2)
    net = SparseNet(model, MIL())
    wrapped = [n for n, m in net.model.named_modules() if isinstance(m, LowCost)]
    assert wrapped == [f"layer{i}.0.conv{j}" for i in (1, 2, 3) for j in (1, 2)]
    assert not [m for m in model.modules() if isinstance(m, LowCost)]  # the user's model is as it was
    pair = LowCost(nn.Conv2d(2, 3, 3, padding=1, bias=False)).eval()
    with torch.no_grad():
        pair.cheap.weight.zero_()
        pair.norm.bias.copy_(torch.tensor([-1.0, 1.0, 1.0]))  # a third of the outputs is skipped
        x = torch.randn(5, 2, 4, 4)
        out = pair(x)
        torch.testing.assert_close(out[:, 1:], pair.conv(x)[:, 1:])
    assert (out[:, 0] == 0).all()
    saved, dense = pair.saving()
    assert dense == 5 * 3 * 16 * 18
    assert saved == 5 * 3 * 16 * (18 / 3 - 2)


def test_mil_says_what_it_skips():
    net = SparseNet(models.build("resnet8-digits", 4, 2), MIL()).eval()
    with torch.no_grad():
        net(torch.randn(3, 2, 8, 8))
    (note,) = net.notes()
    assert "% of the multiply-adds" in note


# -- criteria ---------------------------------------------------------------------------------------------------------


def test_first_order_scores():
    one = layer([[2.0, -3.0]], grad=[[-4.0, 1.0]])
    assert Gradient().score(one, {}).tolist() == [[4.0, 1.0]]
    assert Taylor().score(one, {}).tolist() == [[8.0, 3.0]]


def test_obd_is_half_fisher_times_square():
    criterion = OBD(decay=0.5)
    one = layer([[2.0, 3.0]], grad=[[1.0, 2.0]])
    state = criterion.init_state([one])
    criterion.observe([one], state)
    assert criterion.score(one, state).tolist() == [[0.5 * 0.5 * 1 * 4, 0.5 * 0.5 * 4 * 9]]
    one.weight.grad.zero_()
    criterion.observe([one], state)
    assert criterion.score(one, state).tolist() == [[0.5, 4.5]]


def observed(block, size, count=40, damp=1e-2):
    torch.manual_seed(4)
    one = layer(torch.randn(1, size).tolist())
    criterion = OBS(block=block, damp=damp, samples=count)
    state = criterion.init_state([one])
    grads = torch.randn(count, size)
    for g in grads:
        one.weight.grad = g[None]
        criterion.observe([one], state)
    fisher = grads.double().T @ grads.double() / count + damp * torch.eye(size, dtype=torch.double)
    return criterion, one, state, fisher


def test_obs_inverse_scores_and_compensation_against_the_exact_inverse():
    """On the quadratic 0.5 w^T H w: the loss that a deleted and compensated weight costs is its score."""
    criterion, one, state, fisher = observed(block=6, size=6)
    exact = torch.linalg.inv(fisher)
    torch.testing.assert_close(state["inverse.w"][0].double(), exact, rtol=1e-3, atol=1e-3)
    w = one.weight.detach()[0].double()
    scores = criterion.score(one, state)[0].double()
    torch.testing.assert_close(scores, w**2 / (2 * exact.diagonal()), rtol=1e-3, atol=1e-4)
    q = 2
    dropped = torch.zeros(1, 6, dtype=torch.bool)
    dropped[0, q] = True
    with torch.no_grad():
        criterion.compensate(one, dropped, state)
    want = w - w[q] / exact[q, q] * exact[:, q]
    want[q] = w[q]  # left for the method to zero
    torch.testing.assert_close(one.weight.detach()[0].double(), want, rtol=1e-3, atol=1e-3)
    delta = one.weight.detach()[0].double() - w
    delta[q] = -w[q]
    torch.testing.assert_close(0.5 * delta @ fisher @ delta, scores[q], rtol=1e-2, atol=1e-3)


def test_obs_several_weights_of_a_block_and_a_block_filled_up():
    criterion, one, state, fisher = observed(block=4, size=6)  # blocks of 4 and 2 (+ 2 of padding)
    w = one.weight.detach()[0].double()
    dropped = torch.tensor([[True, False, True, False, False, True]])
    with torch.no_grad():
        criterion.compensate(one, dropped, state)
    h = fisher[:4, :4]  # the exact answer: minimise over the kept ones with the dropped at zero
    kept, gone = [1, 3], [0, 2]
    best = w[:4][kept] + torch.linalg.solve(h[kept][:, kept], h[kept][:, gone] @ w[:4][gone])
    torch.testing.assert_close(one.weight.detach()[0, kept].double(), best, rtol=1e-2, atol=1e-2)


def test_obs_compensation_is_used_where_weights_become_zero():
    criterion, one, state, _ = observed(block=6, size=6)
    before = one.weight.detach().clone()
    update(GMP(sparsity=0.5, steps=1, criterion=criterion, scope=Uniform()), moment(one, state=state))
    kept = one.mask
    assert int(kept.sum()) == 3
    assert (one.weight[~kept] == 0).all()
    assert not torch.equal(one.weight[kept], before[kept])


def test_obs_starts_again_after_its_samples():
    criterion, one, state, _ = observed(block=6, size=6, count=5)
    assert float(state["seen.w"]) == 5
    criterion.observe([one], state)
    assert float(state["seen.w"]) == 1


def test_filter_scores_average_a_criterion():
    one = layer([[1.0, 3.0], [2.0, 2.0]], grad=[[1.0, 1.0], [1.0, 5.0]])
    method = GMP(sparsity=0.5, steps=1, criterion=Taylor(), granularity=Filter(), scope=Uniform())
    assert method.group_scores(one, {}).tolist() == [2.0, 6.0]
