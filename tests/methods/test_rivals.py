"""AC/DC, Top-KAST, ST-3, Feather, GraNet, SR-STE and LAMP against values worked out by hand on tiny tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS, batch
from torch import nn

from dcil import (
    ACDC,
    DPF,
    EMA,
    ERK,
    LAMP,
    NM,
    SRSTE,
    ST3,
    Constant,
    Cubic,
    Feather,
    GraNet,
    Magnitude,
    SparseNet,
    Taylor,
    TopKAST,
    UserError,
    Weight,
)
from dcil.method import Method, StepContext
from dcil.schedule import Stretched, Thinned
from dcil.weight import PrunableWeight


def layer(values, mask=None, grad=None, name="w"):
    weight = nn.Parameter(torch.tensor(values, dtype=torch.float))
    if grad is not None:
        weight.grad = torch.tensor(grad, dtype=torch.float)
    kept = torch.ones_like(weight, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return PrunableWeight(name, weight, kept)


def context(method: Method, *layers: PrunableWeight, step: int, momentum=None) -> StepContext:
    opt = torch.optim.SGD([one.weight for one in layers], lr=0.1, momentum=0.9)
    for one, buffer in zip(layers, momentum or [], strict=False):
        opt.state[one.weight]["momentum_buffer"] = torch.tensor(buffer, dtype=torch.float)
    model = nn.ParameterList([one.weight for one in layers])
    return StepContext(layers, step, opt, method.init_state(layers, model), model)


def updated(method: Method, *layers: PrunableWeight, step: int = 1, momentum=None) -> StepContext:
    now = context(method, *layers, step=step, momentum=momentum)
    with torch.no_grad():
        method.update(now)
    return now


def gradient(method: Method, one: PrunableWeight, state, upstream) -> list[list[float]]:
    view = method.view("pruned", one, state)
    (found,) = torch.autograd.grad(view, one.weight, torch.tensor(upstream, dtype=torch.float))
    return found.tolist()


# -- st3, feather -----------------------------------------------------------------------------------------------------


def test_st3_by_hand():
    method = ST3(sparsity=0.5, steps=10, begin=0.0, ramp=0.1, rescale=False)
    one = layer([[3.0, -1.0, 0.5, -2.0]])
    now = updated(method, one)
    assert now.state["threshold"] == 1
    assert one.mask.tolist() == [[True, False, False, True]]
    assert method.view("pruned", one, now.state).tolist() == [[2.0, 0.0, 0.0, -1.0]]
    assert gradient(method, one, now.state, [[1.0, 2.0, 3.0, 4.0]]) == [[1.0, 2.0, 3.0, 4.0]]
    with torch.no_grad():
        one.weight[0, 3], one.weight[0, 2] = -0.25, 5.0  # until the next mask update the one is 0, the other stays 0
    assert method.view("pruned", one, now.state).tolist() == [[2.0, 0.0, 0.0, 0.0]]


def test_st3_scales_each_filter():
    method = ST3(sparsity=0.5, steps=10, begin=0.0, ramp=0.1)
    one = layer([[3.0, -1.0, 0.5, -2.0], [4.0, 4.0, 0.1, 0.2]])
    now = updated(method, one)
    scales = [1.01 / (0.01 + kept / all_) for kept, all_ in ((5 / 4, 6.5 / 4), (8 / 4, 8.3 / 4))]
    want = torch.tensor([[2.0, 0.0, 0.0, -1.0], [3.0, 3.0, 0.0, 0.0]]) * torch.tensor(scales)[:, None]
    torch.testing.assert_close(method.product(one, now.state), want, rtol=1e-5, atol=0)
    assert gradient(method, one, now.state, [[1.0] * 4] * 2) == [[1.0] * 4] * 2  # the scale has none


def test_st3_sigma_ranks_by_the_size_of_the_layer():
    small, large = layer([[1.0, 1.5]], name="small"), layer([[0.7] * 4 + [0.8] * 4] * 8, name="large")
    method = ST3(sparsity=33 / 66, steps=10, begin=0.0, ramp=0.1, sigma=True, rescale=False)
    now = updated(method, small, large)
    # |w| sqrt(sum of dimensions): 1.73 and 2.60 beside 2.8 and 3.2, so both of the small layer go.
    assert not small.mask.any()
    assert now.state["threshold"] == pytest.approx(0.7 * 4)
    assert method.product(large, now.state)[0, 7] == pytest.approx(0.8 - 0.7)


def test_feather_by_hand():
    method = Feather(sparsity=0.5, steps=10, ramp=0.1)
    one = layer([[3.0, -2.0, 1.0, 0.5]])
    now = updated(method, one)
    assert now.state["threshold"] == 1
    want = torch.tensor([[26 ** (1 / 3), -(7 ** (1 / 3)), 0.0, 0.0]])
    torch.testing.assert_close(method.product(one, now.state), want)
    assert gradient(method, one, now.state, [[1.0, 2.0, 3.0, 4.0]]) == [[1.0, 2.0, 3.0, 4.0]]
    halved = Feather(sparsity=0.5, steps=10, ramp=0.1, theta=0.5)
    assert gradient(halved, one, now.state, [[1.0, 2.0, 3.0, 4.0]]) == [[1.0, 2.0, 1.5, 2.0]]
    assert [Feather(sparsity=s, steps=10).part for s in (0.5, 0.95, 0.98)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("kind", [ST3, Feather])
def test_nothing_is_shrunk_before_something_is_pruned(kind):
    method = kind(sparsity=0.5, steps=10)
    one = layer(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).tolist())
    assert torch.equal(method.product(one, method.init_state([one], nn.Module())), one.weight)


@pytest.mark.parametrize("kind", [ST3, Feather])
def test_thresholds_need_a_ranking_of_all_weights_by_size(kind):
    for settings, words in (
        ({"scope": ERK()}, "scope must be Global"),
        ({"criterion": Taylor()}, "criterion must be Magnitude"),
        ({"min_kept": 1}, "min_kept must be 0"),
    ):
        with pytest.raises(UserError, match=words):
            kind(sparsity=0.5, steps=10, **settings)


@pytest.mark.parametrize("schedule", [Cubic(), Constant(), Thinned(power=9.0), Stretched((0.0,))])
@pytest.mark.parametrize("every", [1, 5, 7, 20])
def test_the_masks_are_updated_after_the_last_step_too(schedule, every):
    method = Feather(sparsity=0.5, steps=10, every=every, ramp=0.6, schedule=schedule)
    assert method.due(10) and not any(method.due(step) for step in (11, 14, 15, 20))


def test_regular_updates_of_a_thresholded_method():
    assert [step for step in range(1, 12) if Feather(sparsity=0.5, steps=10, every=4).due(step)] == [4, 8, 10]


@pytest.mark.parametrize("method", [ST3(sparsity=0.6, steps=12), Feather(sparsity=0.6, steps=12, theta=0.5)])
def test_training_evaluation_average_and_finalized_net_compute_with_thresholded_weights(method):
    torch.manual_seed(0)
    net = SparseNet(NETWORKS["residual"][0](), method)
    opt, average = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), EMA(net, 0.5)
    for _ in range(12):
        x, y = batch((2, 8, 8), 12, torch.float)
        opt.zero_grad()
        net.loss(net(x), y).backward()
        opt.step()
        net.step(opt)
        average.update()
    trained = [net.method.view("pruned", one, net.state) for one in net.layers]
    assert all(map(torch.equal, trained, [net.method.product(one, net.state) for one in net.layers]))
    for owner in (net.eval(), average):
        sparse = owner.finalize()
        assert torch.equal(sparse(x), owner(x))
    shrunk = next(one for one in net.layers if one.mask.any())
    written = net.finalize().get_parameter(shrunk.name)
    assert not torch.equal(written[shrunk.mask], shrunk.weight[shrunk.mask])


# -- srste ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [Weight(), NM()])
def test_srste_adds_its_decay_to_the_gradient_of_pruned_weights(granularity):
    torch.manual_seed(0)
    method = SRSTE(sparsity=0.5, steps=10, decay=0.25, granularity=granularity)
    net = SparseNet(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)), method)
    (one,) = net.layers
    assert int(one.mask.sum()) == 16  # from the first step on
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    loss = net.loss(net(x), y)
    loss.backward()
    masked = (one.weight * one.mask).detach().requires_grad_()
    hidden = nn.functional.linear(x, masked, net.model[0].bias)
    plain = nn.functional.cross_entropy(net.model[1](hidden), y)
    plain.backward()
    assert loss.item() == plain.item()
    torch.testing.assert_close(one.weight.grad, masked.grad + 0.25 * one.weight.detach() * ~one.mask)


# -- acdc -------------------------------------------------------------------------------------------------------------


def test_acdc_phases_are_those_of_the_original_on_cifar10():
    method = ACDC(sparsity=0.9, steps=200)
    due = [step for step in range(1, 201) if method.due(step)]
    assert due == [10, 30, 50, 70, 90, 110, 130, 150, 170]
    assert [method.sparsity_at(step) for step in (9, 10, 29, 30, 49, 50, 169, 170, 200)] == [
        0.0, 0.9, 0.9, 0.0, 0.0, 0.9, 0.0, 0.9, 0.9,
    ]  # fmt: skip


def test_a_dense_phase_begins_at_zero_with_an_empty_momentum():
    method = ACDC(sparsity=0.5, steps=200, classifier=True)
    one = layer([[3.0, 1.0, -2.0, 0.5]])
    now = updated(method, one, step=10, momentum=[[[1.0, 1.0, 1.0, 1.0]]])
    assert one.weight.tolist() == [[3.0, 0.0, -2.0, 0.0]]
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[1.0, 0.0, 1.0, 0.0]]
    now = updated(method, one, step=30, momentum=[[[1.0, 1.0, 1.0, 1.0]]])
    assert one.mask.all()
    assert one.weight.tolist() == [[3.0, 0.0, -2.0, 0.0]]
    assert now.optimizer.state[one.weight]["momentum_buffer"].tolist() == [[0.0] * 4]


def test_a_training_of_few_steps_ends_compressed():
    for steps in range(1, 12):
        method = ACDC(sparsity=0.5, steps=steps)
        assert (method.sparsity_at(0), method.sparsity_at(steps)) == (0.0, 0.5)
        assert any(method.due(step) for step in range(1, steps + 1))


def test_the_first_phase_of_acdc_is_dense_and_may_be_long():
    method = ACDC(sparsity=0.5, steps=100, begin=0.8, ramp=0.1)
    assert method.sparsity_at(79) == 0.0 and min(step for step in range(101) if method.due(step)) == 80
    with pytest.raises(UserError, match=r"ACDC: initial_sparsity must be 0, got 0.25 \(the first phase is dense\)"):
        ACDC(sparsity=0.5, steps=100, initial_sparsity=0.25)


# -- topkast ----------------------------------------------------------------------------------------------------------


def test_topkast_computes_with_a_trains_b_and_penalises_the_difference():
    method = TopKAST(sparsity=0.75, steps=10, penalty=0.1)
    one = layer([[4.0, -3.0, 2.0, 1.0, 0.8, 0.6, 0.4, 0.2]])
    now = updated(method, one)
    view = method.view("pruned", one, now.state)
    assert view.tolist() == [[4.0, -3.0, 0, 0, 0, 0, 0, 0]]  # 2 of 8
    assert gradient(method, one, now.state, [[1.0] * 8]) == [[1, 1, 1, 1, 0, 0, 0, 0]]  # 4 of 8: twice as many
    penalty = method.added_gradient(one, now.state)
    torch.testing.assert_close(penalty, torch.tensor([[0, 0, 0.1 * 2 / 0.25, 0.1 * 1 / 0.25, 0, 0, 0, 0]]))
    wide = TopKAST(sparsity=0.75, steps=10, backward=0.25)
    now = updated(wide, one)
    assert gradient(wide, one, now.state, [[1.0] * 8]) == [[1, 1, 1, 1, 1, 1, 0, 0]]
    with pytest.raises(UserError, match=r"backward must be None, or from 0 to sparsity, 0.75"):
        TopKAST(sparsity=0.75, steps=10, backward=0.8)


def test_topkast_is_sparse_from_the_first_step():
    net = SparseNet(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)), TopKAST(sparsity=0.75, steps=10))
    assert list(net.masks) == ["1.weight"]  # the stem and the classifier are dense
    assert net.sparsity == 0.75


# -- granet -----------------------------------------------------------------------------------------------------------


def test_granet_prunes_across_layers_then_exchanges_within_each():
    method = GraNet(sparsity=0.5, steps=100, ramp=0.1, drop=0.5, drop_end=0.5)
    a = layer([[4.0, 3.0, 2.0, 0.1]], grad=[[0.0, 0.0, 1.0, 2.0]], name="a")
    b = layer([[0.2, 0.3, 0.4, 5.0]], grad=[[3.0, 1.0, 2.0, 0.0]], name="b")
    now = updated(method, a, b, step=50, momentum=[[[1.0] * 4], [[1.0] * 4]])
    # Pruned across both: 0.1, 0.2, 0.3, 0.4. Of a's three half, rounded up, is exchanged: 2 and 3 go, and of the empty
    # places 0.1 and 2 have the largest gradients; b's only one goes, and 0.2 has the largest.
    assert a.mask.tolist() == [[True, False, True, True]]
    assert b.mask.tolist() == [[True, False, False, False]]
    assert a.weight.tolist() == [[4.0, 0.0, 2.0, 0.0]]  # 2 was dropped and grown at once: it keeps value and momentum
    assert b.weight.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert now.optimizer.state[a.weight]["momentum_buffer"].tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_granet_does_not_prune_what_has_just_grown_once_the_target_is_reached():
    method = GraNet(sparsity=0.5, steps=100, ramp=0.1, drop=0.0, drop_end=0.0)
    one = layer([[0.0, 3.0, 0.0, 0.0]], mask=[[False, True, False, True]], grad=[[1.0, 1.0, 1.0, 1.0]])
    updated(method, one, step=50)
    assert one.mask.tolist() == [[False, True, False, True]]


def test_the_exchange_falls_along_a_cosine():
    method = GraNet(sparsity=0.5, steps=100)
    assert [method.drop_at(step) for step in (0, 50, 100)] == pytest.approx([0.5, 0.2525, 0.005])


# -- lamp -------------------------------------------------------------------------------------------------------------


def test_lamp_scores_by_hand():
    found = LAMP().score(layer([[1.0, -3.0, 2.0]]), {})
    assert found.tolist() == [pytest.approx([1 / 14, 1.0, 4 / 13])]
    assert LAMP().score(layer([[0.0, 0.0]]), {}).tolist() == [[0.0, 0.0]]
    assert LAMP().score(layer([[2.0, 2.0]]), {}).tolist() == [pytest.approx([1.0, 0.5])]  # of equal ones the first


def test_lamp_keeps_the_largest_of_every_layer():
    layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)]
    with torch.no_grad():
        layers[1].weight.mul_(1e-6)
    for criterion, alive in ((LAMP(), True), (Magnitude(), False)):
        method = DPF(sparsity=0.9, steps=1, every=1, criterion=criterion)
        net = SparseNet(nn.Sequential(*copy.deepcopy(layers)), method)
        net.step()
        assert bool(net.masks["1.weight"].any()) is alive
