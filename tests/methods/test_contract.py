"""One contract for every method and every granularity it supports: registering a method is being tested."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from networks import NETWORKS, batch
from sklearn.datasets import load_digits

from dcil import (
    ACDC,
    DCIL,
    DPF,
    ERK,
    GMP,
    LAMP,
    METHODS,
    NM,
    OBD,
    OBS,
    SRSTE,
    Diverged,
    Filter,
    Global,
    Gradient,
    OneShot,
    SparseNet,
    Taylor,
    Uniform,
    UserError,
    Weight,
)
from dcil.granularity import Granularity
from dcil.scope import UniformFloor

STEPS = 24
CASES = [(name, g()) for name, kind in METHODS.items() for g in kind.granularities]
EVERY = pytest.mark.parametrize(("name", "granularity"), CASES, ids=[f"{n}-{type(g).__name__}" for n, g in CASES])


def build(name: str, granularity: Granularity, steps: int = STEPS, **settings):
    kind = METHODS[name]
    if kind.prunes:
        settings = {"sparsity": min(0.6, granularity.max_sparsity), **settings}
    if kind.__dataclass_fields__["every"].default == 100:
        settings = {"every": 2, **settings}  # or nothing would happen in a run this short
    return kind(steps=steps, epoch_steps=4, granularity=granularity, seed=3, **settings)


def fresh(method, seed: int = 1, network: str = "residual"):
    torch.manual_seed(seed)
    net = SparseNet(NETWORKS[network][0](), method).train()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return net, opt


def whole_run(method) -> int:
    return sum(phase.steps for phase in method.phases())


def go(net, opt, steps, after=lambda net, update: None):
    """A user's loop, unmodified."""
    for step in steps:
        torch.manual_seed(1000 + step)
        x, y = batch((2, 8, 8), 12, torch.float)
        loss = net.loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        after(net, net.step(opt))


def dead_groups(net) -> tuple[int, int]:
    """Pruned groups and all groups, counted here and not by the library."""
    dead = all_ = 0
    for layer in filter(net.method.granularity.supports, net.layers):
        rows = layer.rows(layer.mask)
        alive = rows.any(1) if isinstance(net.method.granularity, Filter) else rows.flatten()
        dead, all_ = dead + int((~alive).sum()), all_ + alive.numel()
    return dead, all_


def wanted_dead(net, sparsity: float) -> int:
    """The groups that are to be pruned: exact over the network, or rounded down in every layer."""
    if not isinstance(net.method.scope, UniformFloor):
        return int(sparsity * dead_groups(net)[1])
    filters = [layer.rows(layer.mask).shape[0] for layer in net.layers]
    return sum(int(sparsity * number) for number in filters)


@EVERY
def test_exact_scheduled_sparsity_at_every_update(name, granularity):
    method = build(name, granularity)
    net, opt = fresh(method)
    updates = []

    def check(net, update):
        if update is not None:
            assert dead_groups(net)[0] == wanted_dead(net, method.sparsity_at(update.step)), update.step
            updates.append(update.step)

    go(net, opt, range(whole_run(method)), check)
    assert dead_groups(net)[0] == wanted_dead(net, method.sparsity)
    assert updates or not method.prunes
    exact = not isinstance(method.scope, UniformFloor)
    assert not exact or not [note for note in net.notes() if "asked for" in note]


@EVERY
def test_masks_are_bool_beside_their_weights_and_whole_groups(name, granularity):
    method = build(name, granularity)
    net, opt = fresh(method)
    go(net, opt, range(whole_run(method)))
    for layer in net.layers:
        assert layer.mask.dtype == torch.bool
        assert layer.mask.device == layer.weight.device
        assert layer.mask.shape == layer.weight.shape
        if isinstance(granularity, Filter):
            rows = layer.rows(layer.mask)
            assert torch.equal(rows.any(1), rows.all(1))


@EVERY
def test_same_seed_same_masks_and_resume_bit_for_bit(name, granularity):
    method = build(name, granularity)
    total = whole_run(method)
    whole, opt = fresh(method)
    go(whole, opt, range(total))
    again, opt = fresh(method)
    for start, stop in ((0, 3), (3, total // 2), (total // 2, total - 1), (total - 1, total)):
        go(again, opt, range(start, stop))
        other, fresh_opt = fresh(method, seed=99)  # other weights: everything must come from the state
        other.load_state_dict(copy.deepcopy(again.state_dict()))
        fresh_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        again, opt = other, fresh_opt
    for (key, a), b in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@EVERY
def test_finalize_is_the_pruned_path_with_exact_zeros(name, granularity):
    method = build(name, granularity)
    net, opt = fresh(method)
    go(net, opt, range(whole_run(method) - 1))
    sparse = net.finalize()
    net.eval()
    x, _ = batch((2, 8, 8), 12, torch.float)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), net(x), rtol=0, atol=0)
    for key, mask in net.masks.items():
        assert (sparse.get_parameter(key)[~mask] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_falls_on_digits(name):
    images = load_digits()
    x = torch.tensor(images.images[:256], dtype=torch.float)[:, None].expand(-1, 2, -1, -1) / 8 - 1
    y = torch.tensor(images.target[:256]) % 4
    kind = METHODS[name]
    method = build(name, kind.granularities[0](), steps=40, **({"sparsity": 0.5} if kind.prunes else {}))
    net, opt = fresh(method)
    losses = []
    for step in range(whole_run(method)):
        rows = torch.arange(step * 64, step * 64 + 64) % 256
        outputs = net(x[rows])
        losses.append(torch.nn.functional.cross_entropy(outputs["pruned"], y[rows]).item())
        opt.zero_grad()
        net.loss(outputs, y[rows]).backward()
        opt.step()
        net.step(opt)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])


@pytest.mark.parametrize("name", [n for n, kind in METHODS.items() if len(kind.granularities) == 1])
def test_an_unsupported_granularity_is_refused_by_name(name):
    kind = METHODS[name]
    wrong = Filter() if kind.granularities == (Weight,) else Weight()
    words = f"{kind.__name__}: granularity must be {kind.granularities[0].__name__}.*got {type(wrong).__name__}"
    with pytest.raises(UserError, match=words):
        kind(sparsity=0.0, steps=10, granularity=wrong)


@pytest.mark.parametrize("kind", [DCIL, DPF, GMP, OneShot])
@pytest.mark.parametrize("criterion", [LAMP(), Gradient(), Taylor(), OBD(), OBS(block=8, samples=12)])
@pytest.mark.parametrize("granularity", [Weight(), Filter()])
def test_every_criterion_in_every_magnitude_method(kind, criterion, granularity):
    method = kind(sparsity=0.6, steps=STEPS, every=5, criterion=criterion, granularity=granularity)
    net, opt = fresh(method, network="plain")
    go(net, opt, range(STEPS))
    dead, all_ = dead_groups(net)
    assert dead == int(0.6 * all_)


@EVERY
def test_every_network_can_be_trained(name, granularity):
    """Shared weights, no norm layers, a transformer: the method does not care."""
    for network in ("shared", "no-norm", "transformer", "transposed2d"):
        method = build(name, granularity, **({"inner": False} if name == "l1filter" else {}), stem=True)
        make, shape = NETWORKS[network]
        fits = method.classifier and network == "transposed2d"  # only its classifier has inputs in groups of four
        if isinstance(granularity, NM) and network in ("no-norm", "transposed2d") and not fits:
            with pytest.raises(UserError, match="fits no layer"):
                SparseNet(make(), method)
            continue
        net = SparseNet(make(), method).train()
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for _ in range(whole_run(method)):
            x, y = batch(shape, 6, torch.float)
            net.loss(net(x), y).backward()
            opt.step()
            net.step(opt)
        assert dead_groups(net)[0] == wanted_dead(net, method.sparsity)


def test_pruned_weights_stay_zero_where_the_method_says_so():
    """Neither momentum nor weight decay brings them back by accident."""
    for name in ("gmp", "rigl", "set", "fpgm", "oneshot", "rewind", "acdc", "granet"):
        method = build(name, METHODS[name].granularities[0]())
        net, opt = fresh(method)

        def check(net, update, opt=opt):
            for layer in net.layers:
                assert (layer.weight[~layer.mask] == 0).all()
                buffer = opt.state[layer.weight]["momentum_buffer"]
                assert (buffer[~layer.mask] == 0).all()

        go(net, opt, range(whole_run(method)), check)


@pytest.mark.parametrize("kind", [DCIL, DPF, GMP, ACDC, SRSTE])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (3, 8)])
def test_n_of_m(kind, n, m):
    method = kind(sparsity=1 - n / m, steps=STEPS, every=3, granularity=NM(n, m))
    net, opt = fresh(method)

    def check(net, update):
        if update is not None:
            fitting = [layer for layer in net.layers if layer.weight.shape[1] % m == 0]
            total = sum(layer.weight.numel() for layer in fitting)
            assert sum(int((~layer.mask).sum()) for layer in fitting) == int(method.sparsity_at(update.step) * total)
            for layer in fitting:  # never more than m - n of m, on the way there, too
                assert (~layer.mask).movedim(1, -1).reshape(-1, m).sum(1).max() <= m - n

    go(net, opt, range(STEPS), check)
    for layer in net.layers:
        if layer.weight.shape[1] % m:
            assert layer.mask.all()
        else:
            assert (layer.mask.movedim(1, -1).reshape(-1, m).sum(1) == n).all()
    misfits = [layer.name for layer in net.layers if layer.weight.shape[1] % m]
    notes = [note for note in net.notes() if "does not fit" in note]
    assert len(notes) == bool(misfits)
    assert all(name in notes[0] for name in misfits)


def test_n_of_m_ties_and_limits():
    net = SparseNet(
        torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 2)), DPF(sparsity=0.5, steps=1, granularity=NM())
    )
    with torch.no_grad():
        net.model[0].weight.fill_(1.0)
    net.step()
    assert net.masks["0.weight"].tolist() == [[True, True, False, False] * 2] * 3
    with pytest.raises(UserError, match=r"sparsity must be <= 0.5, got 0.9"):
        DPF(sparsity=0.9, steps=1, granularity=NM(2, 4))
    with pytest.raises(UserError, match="fits no layer"):
        SparseNet(
            torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)),
            DPF(sparsity=0.5, steps=1, granularity=NM()),
        )
    with pytest.raises(UserError, match="4:4"):
        NM(4, 4)


def test_the_method_in_the_documentation_works():
    """One file, as printed there, and it keeps the contract."""
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    (code,) = re.findall(r'```python\n("""Chance.*?)```', text, flags=re.S)
    assert len(code.strip().splitlines()) <= 15
    scope: dict = {"__name__": "chance"}
    exec(compile(code, "docs/methods.md", "exec"), scope)
    masks = []
    for granularity in (Weight(), Filter()):
        net, opt = fresh(scope["Chance"](sparsity=0.6, steps=STEPS, every=5, granularity=granularity))
        go(net, opt, range(STEPS))
        dead, all_ = dead_groups(net)
        assert dead == int(0.6 * all_)
        masks.append(net.masks)
    assert not torch.equal(masks[0]["conv1.weight"], masks[1]["conv1.weight"])


@EVERY
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_batch_or_weight_is_refused_and_masks_stay(name, granularity, poison):
    method = build(name, granularity)
    net, opt = fresh(method)
    go(net, opt, range(5))
    with torch.no_grad():
        layer = net.layers[-1]
        place = tuple(torch.where(~layer.mask, 1, 0).nonzero()[0]) if not layer.mask.all() else (0,) * layer.mask.dim()
        layer.weight[place] = poison  # a pruned one, if there is one
    before = {key: mask.clone() for key, mask in net.masks.items()}
    with pytest.raises(Diverged, match="NaN or infinite values"):
        go(net, opt, range(5, whole_run(method)))
        net.finalize()
    assert all(torch.equal(mask, before[key]) for key, mask in net.masks.items())


@pytest.mark.parametrize("criterion", [Gradient(), Taylor(), OBD(), OBS()])
def test_gradients_that_a_criterion_ranks_must_be_finite(criterion):
    net, opt = fresh(GMP(sparsity=0.5, steps=STEPS, every=1, criterion=criterion))
    go(net, opt, range(3))
    x, y = batch((2, 8, 8), 12, torch.float)
    net.loss(net(x), y).backward()
    opt.step()
    net.layers[0].weight.grad[0] = torch.nan
    before = {key: mask.clone() for key, mask in net.masks.items()}
    with pytest.raises(Diverged, match=net.layers[0].name):
        net.step(opt)
    assert all(torch.equal(mask, before[key]) for key, mask in net.masks.items())


@pytest.mark.parametrize("scope", [Global(), Uniform(), ERK()])
@pytest.mark.parametrize("min_kept", [0, 20, 30])
def test_n_of_m_whatever_the_scope_and_what_a_layer_keeps(scope, min_kept):
    """The layers' shares of the sparsity differ, but none may lose more than m - n of m."""
    layers = [torch.nn.Linear(12, 4), torch.nn.Linear(4, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)]
    net = SparseNet(
        torch.nn.Sequential(*layers),
        DPF(sparsity=0.5, steps=4, every=1, granularity=NM(), scope=scope, min_kept=min_kept),
    )
    net.update_masks()
    for _ in range(4):
        net.step()
        for mask in net.masks.values():
            assert (~mask).view(-1, 4).sum(1).max() <= 2
            assert mask.sum() >= min_kept
    wanted = [min(mask.numel() // 2, mask.numel() - min_kept) for mask in net.masks.values()]
    assert [int((~mask).sum()) for mask in net.masks.values()] == wanted


@pytest.mark.parametrize(("dtype", "size"), [(torch.half, 10.0), (torch.float, 1e37), (torch.double, 1e306)])
def test_momentum_whose_sum_is_not_representable(dtype, size):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 300), torch.nn.Linear(300, 300), torch.nn.Linear(300, 3)]
    net = SparseNet(torch.nn.Sequential(*layers).to(dtype), METHODS["sm"](sparsity=0.5, steps=8, every=1))
    opt = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) * size
    opt.step()
    net.step(opt)
    dead, all_ = dead_groups(net)
    assert dead == int(0.5 * all_)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
def test_small_gradients_have_a_rank(dtype):
    """Their squares underflow in half precision."""
    net = SparseNet(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)).to(dtype),
        DPF(sparsity=0.5, steps=1, criterion=OBD(), stem=True),
    )
    layer = net.layers[0]
    with torch.no_grad():
        layer.weight.fill_(1.0)
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter) * 1e-4
    net.step()
    ranked = layer.weight.grad.flatten().sort(stable=True).values
    assert layer.weight.grad[layer.mask].min() >= ranked[63]
    assert int(layer.mask.sum()) == 64


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_a_criterion_with_a_state_goes_on_in_another_dtype(dtype):
    for criterion in (OBD(), OBS(block=4)):
        net, _ = fresh(GMP(sparsity=0.5, steps=4, every=1, criterion=criterion), network="plain")
        net.to(dtype)
        for _ in range(4):
            x, y = batch((2, 8, 8), 12, dtype)
            net.loss(net(x), y).backward()
            net.step()
        dead, all_ = dead_groups(net)
        assert dead == int(0.5 * all_)


def test_a_singular_block_is_left_as_it_is():
    net, _ = fresh(GMP(sparsity=0.5, steps=1, criterion=OBS(block=4)), network="plain")
    net.state[f"inverse.{net.layers[0].name}"].zero_()
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter)
    net.step()
    assert all(layer.weight.isfinite().all() for layer in net.layers)


def test_no_gradients_pile_up_while_a_layer_is_frozen():
    net, opt = fresh(METHODS["autoprune"](sparsity=0.5, steps=STEPS))
    net.layers[0].weight.requires_grad_(False)
    go(net, opt, range(3))
    assert all(tensor.grad is None for tensor in net.state.values())


def test_an_update_with_every_layer_frozen_that_the_granularity_fits():
    layers = [torch.nn.Linear(5, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)]
    net = SparseNet(torch.nn.Sequential(*layers), DPF(sparsity=0.5, steps=2, every=1, granularity=NM()))
    layers[1].weight.requires_grad_(False)
    net.step()
    assert net.sparsity == 0


def test_dsr_does_not_exchange_everything_where_less_is_kept_than_is_to_be_moved():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)]
    net = SparseNet(torch.nn.Sequential(*layers), METHODS["dsr"](sparsity=0.99, steps=400, every=1, stem=True))
    changes = []
    for _ in range(200):
        with torch.no_grad():
            for layer in net.layers:
                layer.weight.copy_(torch.randn_like(layer.weight))
        update = net.step()
        changes += [int(update.changes[1])] if update else []
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    assert max(changes[-20:]) < 0.8 * kept
