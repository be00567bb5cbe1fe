"""Starting from something: pre-trained weights, later beginnings, zeros that are there, fixed masks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dcil
from dcil import DCIL, DPF, EMA, GMP, Cubic, Filter, Never, OneShot, RigL, SparseNet, UserError
from dcil.identity import checksum


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 20), nn.Linear(20, 4))


def thinned(part=0.9):
    found = model()
    with torch.no_grad():
        for index in (0, 3):
            weight = found[index].weight
            weight.masked_fill_(weight.abs() <= weight.abs().flatten().kthvalue(int(part * weight.numel())).values, 0)
    return found


def train(net, steps=8):
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    net.attach(opt)
    seen = []
    for _ in range(steps):
        opt.zero_grad()
        net.loss(net(torch.randn(16, 10)), torch.randint(4, (16,))).backward()
        opt.step()
        seen.append(net.sparsity)
    return seen


def test_a_sparse_network_goes_on_from_its_sparsity():
    net = SparseNet(thinned(0.8), DCIL(sparsity=0.95, steps=8, every=1, min_kept=1), masks="zeros")
    assert net.sparsity == 0.8
    assert net.method.initial_sparsity == 0.8
    for layer in net.layers:
        assert torch.equal(layer.mask, layer.weight != 0)
    seen = train(net)
    assert seen == sorted(seen)
    assert min(seen) >= 0.8 - 1e-9
    assert seen[-1] == 570 / 600


def test_the_beginning_travels_with_the_state():
    net = SparseNet(thinned(0.8), DCIL(sparsity=0.95, steps=8, every=1, min_kept=1), masks="zeros")
    train(net, 3)
    fresh = SparseNet(model(), DCIL(sparsity=0.95, steps=8, every=1, min_kept=1))
    fresh.load_state_dict(net.state_dict())
    assert fresh.method == net.method
    assert fresh.hooks is fresh.method


def test_fine_tuning_under_fixed_masks():
    net = SparseNet(
        thinned(0.9), GMP(sparsity=0.9, steps=8, schedule=Never(), stem=True, classifier=False), masks="zeros"
    )
    masks = {name: mask.clone() for name, mask in net.masks.items()}
    assert set(train(net)) == {0.9}
    for name, mask in net.masks.items():
        assert torch.equal(mask, masks[name])
        assert (net.model.get_parameter(name)[~mask] == 0).all()
    assert all((layer.weight[layer.mask] != 0).all() for layer in net.layers)


def test_masks_of_ones_own():
    mask = torch.rand(20, 10) < 0.3
    net = SparseNet(model(), DPF(sparsity=0.9, steps=8), masks={"0.weight": mask})
    assert torch.equal(net.masks["0.weight"], mask)
    assert net.masks["3.weight"].all()
    for wrong, words in [
        ({"0.wieght": mask}, "'0.weight'"),
        ({"0.weight": mask.float()}, "bool tensor"),
        ({"0.weight": mask[:5]}, r"shape \(20, 10\)"),
        ("ones", "zeros"),
    ]:
        with pytest.raises(UserError, match=words):
            SparseNet(model(), DPF(sparsity=0.9, steps=8), masks=wrong)
    with pytest.raises(UserError, match="draws its own"):
        SparseNet(model(), RigL(sparsity=0.9, steps=8), masks="zeros")


def test_groups_decide_how_sparse_the_beginning_is():
    found = model()
    found[0].weight.data[:10] = 0
    net = SparseNet(found, DPF(sparsity=0.9, steps=8, granularity=Filter()), masks="zeros")
    assert net.method.initial_sparsity == 10 / 40


def test_begin_and_initial_sparsity():
    method = DCIL(sparsity=0.9, steps=100, every=10, begin=0.2, initial_sparsity=0.5, ramp=0.8)
    assert [step for step in range(1, 101) if method.due(step)] == [20, 30, 40, 50, 60, 70, 80, 90]
    assert method.sparsity_at(20) == 0.5
    assert method.sparsity_at(50) == pytest.approx(0.9 - 0.4 * 0.5**3)
    assert method.sparsity_at(80) == 0.9
    assert OneShot(sparsity=0.75, steps=10, initial_sparsity=0.5, rounds=2).sparsity_at(8) == pytest.approx(
        1 - 0.5 * 0.5**0.5
    )
    assert Cubic(final=0.8, steps=10)(0) == 0.0
    for wrong, words in [
        ({"begin": 0.8}, "begin must be >= 0 and < ramp"),
        ({"begin": -0.1}, "begin must be"),
        ({"initial_sparsity": 0.95}, "<= sparsity, 0.9"),
        ({"min_kept": -1}, "min_kept must be >= 0"),
    ]:
        with pytest.raises(UserError, match=words):
            DCIL(**{"sparsity": 0.9, "steps": 100} | wrong)


# -- EMA ---------------------------------------------------------------------------------------------------------------


def test_an_average_of_weights_under_the_present_masks():
    net = SparseNet(model(), DCIL(sparsity=0.8, steps=8, every=1, warmup=0.0))
    ema = EMA(net, decay=0.75)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    net.attach(opt)
    want = {n: t.clone() for n, t in (*net.named_parameters(), *net.named_buffers())}
    for _ in range(8):
        opt.zero_grad()
        net.loss(net(torch.randn(16, 10)), torch.randint(4, (16,))).backward()
        opt.step()
        ema.update()
        for name, value in (*net.named_parameters(), *net.named_buffers()):
            exact = value.is_floating_point()
            want[name] = 0.75 * want[name] + 0.25 * value.detach() if exact else value.clone()
    for name, value in (*ema.net.named_parameters(), *ema.net.named_buffers()):
        torch.testing.assert_close(value, want[name])
    assert ema.net.sparsity == net.sparsity
    assert all(torch.equal(mask, net.masks[name]) for name, mask in ema.net.masks.items())
    sparse, x = ema.finalize(), torch.randn(6, 10)
    torch.testing.assert_close(sparse(x), ema(x))
    assert all((sparse.get_parameter(name)[~mask] == 0).all() for name, mask in net.masks.items())
    assert not ema.train().training
    assert all(not p.requires_grad for p in ema.parameters())


def test_an_average_is_saved_and_goes_on():
    net = SparseNet(model(), DPF(sparsity=0.0, steps=8))
    ema = EMA(net, decay=0.9, warmup=True)
    net.model[0].weight.data.add_(1.0)
    start = ema.net.model[0].weight.clone()
    ema.update()
    torch.testing.assert_close(ema.net.model[0].weight, torch.lerp(start, net.model[0].weight, 1 - 2 / 11))
    again = EMA(SparseNet(model(), DPF(sparsity=0.0, steps=8)), decay=0.9, warmup=True)
    again.load_state_dict(ema.state_dict())
    assert int(again.updates) == 1
    assert torch.equal(again.net.model[0].weight, ema.net.model[0].weight)
    assert not [key for key in ema.state_dict() if key.startswith("source")]


def test_what_cannot_be_averaged():
    net = SparseNet(model(), DPF(sparsity=0.0, steps=8))
    with pytest.raises(UserError, match="decay must be"):
        EMA(net, decay=1.5)
    with pytest.raises(UserError, match="must average a SparseNet"):
        EMA(net.model)


# -- starting from weights that are loaded after wrapping ------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [dcil.AutoPrune(sparsity=0.5, steps=8), dcil.FPGM(sparsity=0.5, steps=8),
     dcil.Rewind(sparsity=0.5, steps=8, to=0, weights=True)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_methods_start_from_loaded_weights(method):
    """Indicators, first masks and early weights are those of the loaded weights, not of the random ones before."""
    trained = model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    want = SparseNet(copy.deepcopy(trained), method)
    net = SparseNet(model(), method)
    net.load_model(trained.state_dict())
    for (name, value), other in zip(want.state_dict().items(), net.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_zeros_of_loaded_weights_are_found():
    net = SparseNet(model(), DCIL(sparsity=0.95, steps=8, every=1), masks="zeros")
    net.load_model(thinned(0.8).state_dict())
    assert net.sparsity == net.method.initial_sparsity == 0.8


def test_loading_later_leaves_the_masks():
    net = SparseNet(model(), DCIL(sparsity=0.5, steps=8, every=1))
    train(net, 8)
    before = {name: mask.clone() for name, mask in net.masks.items()}
    net.load_model(model().state_dict())
    assert all(torch.equal(mask, before[name]) for name, mask in net.masks.items())


def test_an_average_may_be_wider_than_the_net():
    net = SparseNet(model().bfloat16(), DCIL(sparsity=0.5, steps=8))
    ema = dcil.EMA(net, decay=0.999).float()
    with torch.no_grad():
        net.model[0].weight.add_(1)
    before = ema.net.model[0].weight.clone()
    ema.update()
    assert (ema.net.model[0].weight - before).mean() == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("masks", [3, [1], {0: 1}, {"0.weight": 1}])
def test_what_are_no_masks(masks):
    with pytest.raises(UserError, match=r"masks"):
        SparseNet(model(), DCIL(sparsity=0.5, steps=8), masks=masks)


@pytest.mark.parametrize(
    "wrong",
    [{"sparsity": "0.9"}, {"steps": None}, {"every": "x"}, {"schedule": "cubic"}, {"scope": dcil.ERK},
     {"criterion": "l1"}, {"kl": None}, {"begin": "a"}, {"class_dim": 1.5}],
)  # fmt: skip
def test_settings_of_a_wrong_type(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))} must be"):
        DCIL(**{"sparsity": 0.5, "steps": 8} | wrong)


def test_masks_that_are_drawn_have_no_initial_sparsity():
    with pytest.raises(UserError, match="initial_sparsity must be 0"):
        dcil.RigL(sparsity=0.5, steps=8, initial_sparsity=0.2)


def test_a_distance_is_recognised_in_another_process():
    """Neither a partial function nor an object has its address in the checksum."""

    class Distance:
        def __call__(self, student, teacher):
            return (student - teacher).abs().mean()

    one, two = (DCIL(sparsity=0.5, steps=8, distill=Distance()) for _ in range(2))
    assert checksum(one) == checksum(two)


def test_single_zeros_under_whole_filters_are_announced():
    with pytest.warns(UserWarning, match=r"single weights of 0\.weight, 3\.weight"):
        SparseNet(thinned(0.8), DPF(sparsity=0.9, steps=8, granularity=Filter()), masks="zeros")
