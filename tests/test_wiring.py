"""Mistakes in the wiring of a training are refused where they are made, or made right."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from networks import batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcil
from dcil import DCIL, DPF, GMP, RigL, SparseNet, UserError


def model(hidden=12):
    return nn.Sequential(
        nn.Conv2d(2, hidden, 3), nn.BatchNorm2d(hidden), nn.ReLU(), nn.Conv2d(hidden, 8, 3), nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def make(method=None, **settings):
    torch.manual_seed(3)
    return SparseNet(model(), method or DCIL(sparsity=0.5, steps=8, every=1, warmup=0.0), **settings)


def sgd(net, **settings):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **settings)


def backward(net):
    x, y = batch((2, 8, 8), dtype=torch.float)
    loss = net.loss(net(x), y)
    loss.backward()
    return loss


def one_step(net, opt):
    opt.zero_grad()
    backward(net)
    opt.step()


# -- counting steps ------------------------------------------------------------------------------------------------


def test_attach_counts_what_the_optimizer_does():
    net = make()
    opt = sgd(net)
    net.attach(opt)
    for micro in range(12):  # gradients accumulated over 3 micro-batches
        backward(net)
        if micro % 3 == 2:
            opt.step()
            opt.zero_grad()
    assert net.steps_done == 4
    for _ in range(4):
        one_step(net, opt)
    total = sum(mask.numel() for mask in net.masks.values())
    assert net.sparsity == int(0.5 * total) / total


def test_attached_and_stepped_by_hand_train_alike():
    one, two = make(GMP(sparsity=0.6, steps=8, every=2)), make(GMP(sparsity=0.6, steps=8, every=2))
    a, b = sgd(one), sgd(two)
    one.attach(a)
    for step in range(8):
        torch.manual_seed(step)
        one_step(one, a)
        torch.manual_seed(step)
        one_step(two, b)
        two.step(b)
    for (name, x), y in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_skipped_steps_of_a_scaler_do_not_count():
    net = make()
    opt = sgd(net)
    net.attach(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        opt.zero_grad()
        x, y = batch((2, 8, 8), dtype=torch.float)
        scaler.scale(net.loss(net(x), y)).backward()
        if step % 3 == 0:
            net.model[0].weight.grad[0] = torch.inf
        scaler.step(opt)
        scaler.update()
    assert net.steps_done == 4


def test_a_fused_optimizer_that_skips_by_itself():
    """Fused optimizers step always and are told by the scaler to change nothing."""
    net = make()
    opt = torch.optim.AdamW(net.parameters(), fused=True)
    net.attach(opt)
    backward(net)
    opt.grad_scale, opt.found_inf = torch.ones(()), torch.ones(())
    opt.step()
    assert net.steps_done == 0
    opt.found_inf = torch.zeros(())
    opt.step()
    assert net.steps_done == 1


def test_steps_that_were_not_taken_do_not_count_by_hand_either():
    net = make()
    opt = sgd(net)
    for micro in range(12):
        backward(net)
        if micro % 3 == 0:
            opt.step()
            opt.zero_grad()
        net.step(opt)  # after every micro-batch, as a loop under accelerate has it
    assert net.steps_done == 4
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batch((2, 8, 8), dtype=torch.float)
    scaler.scale(net.loss(net(x), y)).backward()
    net.model[0].weight.grad[0] = torch.inf
    scaler.step(opt)
    net.step(opt)
    assert net.steps_done == 4


def test_attached_nets_refuse_step():
    net = make()
    opt = sgd(net)
    net.attach(opt)
    with pytest.raises(UserError, match=r"after net\.attach"):
        net.step(opt)


def test_attaching_again_replaces():
    net = make()
    first, second = sgd(net), sgd(net)
    net.attach(first)
    net.attach(second)
    one_step(net, first)
    assert net.steps_done == 0
    one_step(net, second)
    assert net.steps_done == 1


def test_several_optimizers_count_once_and_both_states_are_seen():
    net = make(GMP(sparsity=0.5, steps=8, every=1))
    weights = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    a, b = torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.AdamW(others)
    net.attach(a, b)
    for _ in range(8):
        backward(net)
        a.step()
        b.step()
    assert net.steps_done == 8
    for layer in net.layers:  # the first one's momentum of pruned weights is cleared
        assert (a.state[layer.weight]["momentum_buffer"][~layer.mask] == 0).all()
    with pytest.raises(UserError, match="lacks"):
        net.attach(a)


@pytest.mark.parametrize("attach", [True, False])
def test_an_optimizer_of_the_model_alone_is_refused(attach):
    net = make()
    opt = torch.optim.SGD(net.model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"lacks 6 \(super.1.weight.*net.parameters\(\)"):
        (net.attach if attach else net.step)(opt)
    assert net.steps_done == 0
    for parameter in net.super.parameters():
        parameter.requires_grad_(False)
    net.step(opt)


@pytest.mark.parametrize("attach", [True, False])
def test_a_loss_that_forgets_a_path_is_refused(attach):
    net = make()
    opt = sgd(net)
    if attach:
        net.attach(opt)
    x, y = batch((2, 8, 8), dtype=torch.float)
    nn.functional.cross_entropy(net(x)["pruned"], y).backward()
    with pytest.raises(UserError, match="the super path has no part in"):
        opt.step()
        net.step(opt)


def test_something_else_than_an_optimizer():
    with pytest.raises(UserError, match=r"must be a torch\.optim\.Optimizer, got 'adam'"):
        make().attach("adam")


# -- the model -----------------------------------------------------------------------------------------------------


def test_wrapped_models_are_refused():
    with pytest.raises(UserError, match=r"DataParallel\(SparseNet\(model"):
        SparseNet(nn.DataParallel(model()), DCIL(sparsity=0.5, steps=8))


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.head, self.reentrant = nn.Linear(5, 8), nn.Linear(8, 4), reentrant
        self.on = True

    def forward(self, x):
        x = x.clone().requires_grad_()
        hidden = checkpoint(self.body, x, use_reentrant=self.reentrant) if self.on else self.body(x)
        return self.head(hidden)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside_the_model_is_refused_in_both_forms(reentrant):
    net = SparseNet(Recomputed(reentrant), DCIL(sparsity=0.5, steps=8))
    with pytest.raises((UserError, RuntimeError), match="checkpoints its activations"):
        net(torch.randn(6, 5))


def test_checkpointing_switched_on_later_is_found_in_the_next_training_phase():
    net = SparseNet(Recomputed(True), DCIL(sparsity=0.5, steps=8))
    net.model.on = False
    net(torch.randn(6, 5))
    net.eval()
    net.model.on = True
    net.train()
    with pytest.raises(UserError, match="checkpoints its activations"):
        net(torch.randn(6, 5))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_the_net_works(reentrant):
    net, x = make(), torch.randn(6, 2, 8, 8, requires_grad=True)
    y = torch.randint(4, (6,))
    net.model.eval()  # or batch norms would count the batch twice
    net.loss(net(x), y).backward()
    want = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    out = checkpoint(lambda x: tuple(net(x).values()), x, use_reentrant=reentrant)
    net.loss(dict(zip(net.method.paths, out, strict=True)), y).backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, want[name])


# -- weights loaded later --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["load_model", "model.load_state_dict"])
def test_weights_loaded_after_wrapping_reach_every_path(way):
    net, other = make(), model()
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    if way == "load_model":
        net.load_model(other.state_dict())
    else:
        net.model.load_state_dict(other.state_dict())
    for name, tensor in (*net.super.named_parameters(), *net.super.named_buffers()):
        assert torch.equal(tensor, other.state_dict()[name])
    x = torch.randn(6, 2, 8, 8)
    assert torch.equal(net(x)["super"], other.train()(x))


def test_a_net_of_its_own_state_keeps_both_paths_apart():
    net, again = make(), make()
    opt = sgd(net)
    for _ in range(3):
        one_step(net, opt)
        net.step(opt)
    again.load_state_dict(net.state_dict())
    for (name, a), b in zip(net.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_copy_of_the_net_loads_into_its_own_paths():
    net, other = make(), model()
    twin = copy.deepcopy(net)
    before = net.super.get_parameter("1.weight").clone()
    with torch.no_grad():
        other[1].weight.fill_(3.0)
    twin.model.load_state_dict(other.state_dict())
    assert (twin.super.get_parameter("1.weight") == 3).all()
    assert torch.equal(net.super.get_parameter("1.weight"), before)


def test_a_net_in_training_is_copied_and_pickled():
    net = make()
    opt = sgd(net)
    one_step(net, opt)
    net.step(opt)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        other = sgd(twin)
        twin.attach(other)
        one_step(twin, other)
        assert twin.steps_done == 2
    assert net.steps_done == 1


def test_averages_of_masks_are_refused():
    net = make()
    opt = sgd(net)
    net.attach(opt)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    right = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average)
    wrong = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average, use_buffers=True)
    x, _ = batch((2, 8, 8), dtype=torch.float)
    for _ in range(8):
        one_step(net, opt)
        right.update_parameters(net)
        wrong.update_parameters(net)
        right.eval()(x)
    with pytest.raises(UserError, match=r"buffers were averaged; use dcil\.EMA"):
        wrong.eval()(x)
    with pytest.raises(UserError, match="averaged"):
        wrong.module.finalize()
    assert right.module.sparsity == net.sparsity
    torch.testing.assert_close(right.module.finalize()(x), right(x))
    copy.deepcopy(net).eval()(x)
    copy.deepcopy(net).finalize()


def test_what_is_handed_back_is_free_of_dcil():
    sparse = make(DPF(sparsity=0.0, steps=8)).finalize()
    assert not sparse._load_state_dict_post_hooks
    file = io.BytesIO()
    torch.save(sparse, file)
    assert b"dcil" not in file.getvalue()


# -- state dicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [{"sparsity": 0.6}, {"steps": 9}, {"every": 2}, {"kl": 0.5}, {"distill": "mse"}, {"begin": 0.1}]
)
def test_a_state_dict_of_other_settings_is_refused(other):
    net = make()
    settings = {"sparsity": 0.5, "steps": 8, "every": 1, "warmup": 0.0} | other
    with pytest.raises(UserError, match=r"same training.*0.5 over 8.*load_model"):
        SparseNet(model(), DCIL(**settings)).load_state_dict(net.state_dict())


def test_weights_reach_every_path_after_a_refused_state_dict_too():
    net, other = SparseNet(model(), DPF(sparsity=0.5, steps=8)).state_dict(), make()
    with pytest.raises(UserError, match="same training"):
        other.load_state_dict(net)
    weights = {name: torch.ones_like(tensor) for name, tensor in model().state_dict().items()}
    other.load_model(weights)
    assert all(bool((tensor == 1).all()) for tensor in (*other.super.parameters(), *other.super.buffers()))


def test_the_state_dict_that_holds_the_nets_own_tensors_changes_nothing():
    """As torch.distributed.checkpoint loads: into the tensors of net.state_dict(), then with load_state_dict."""
    net = make()
    with torch.no_grad():
        for parameter in net.super.parameters():
            parameter.add_(1)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(net.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_state_dict_of_another_method_is_refused():
    dpf = make(DPF(sparsity=0.5, steps=8))
    with pytest.raises(UserError, match="same training"):
        make(GMP(sparsity=0.5, steps=8, every=16)).load_state_dict(dpf.state_dict())


def test_state_dicts_of_version_0_1_load():
    net = make()
    state = net.state_dict()

    def old(key):
        head, _, rest = key.partition(".")
        if head == "super":
            module, _, leaf = rest.rpartition(".")
            return f"_private.super.{module.replace('.', '/')}.{leaf}"
        return f"{head}.{rest.replace('.', '/')}" if head in ("_masks", "_state") else key

    was = {old(key): value for key, value in state.items() if key != "_kept"}
    assert "_masks.0/weight" in was
    was["_extra_state"] = torch.tensor(5)
    fresh = make()
    fresh.load_state_dict(was)
    assert fresh.steps_done == 5
    assert int(fresh._kept) == int(fresh.kept.sum())


def test_names_are_the_users_own():
    names = [name for name, _ in make().named_parameters()]
    assert "super.1.weight" in names
    assert "super.7.bias" in names
    assert not any("/" in key for key in make().state_dict())


def test_memory_that_was_never_written_is_refused():
    with torch.device("meta"):
        net = make()
    with pytest.raises(UserError, match=r"net.reset\(\)"):
        net(torch.randn(6, 2, 8, 8, device="meta"))
    net.to_empty(device="cpu")
    with pytest.raises(UserError, match="to_empty"):
        net(torch.randn(6, 2, 8, 8))
    with pytest.raises(UserError, match="to_empty"):
        net.step()
    good = make()
    net.load_state_dict(good.state_dict())
    assert net.eval()(torch.randn(6, 2, 8, 8)).shape == (6, 4)
    net.to_empty(device="cpu")
    net.load_model(model().state_dict())
    net.reset()
    assert net.sparsity == 0
    net(torch.randn(6, 2, 8, 8))


def test_masks_follow_a_model_that_was_materialised_without_them():
    with torch.device("meta"):
        net = make(DPF(sparsity=0.5, steps=8, every=1))
    net.model.to_empty(device="cpu")
    net.load_model(model().state_dict())
    net.reset()
    opt = sgd(net)
    for _ in range(8):
        one_step(net, opt)
        net.step(opt)
    assert int(net._kept) == int(net.kept.sum())
    assert net.sparsity == pytest.approx(0.5, abs=1e-3)


# -- layers frozen after wrapping --------------------------------------------------------------------------------


def test_a_layer_frozen_midway_keeps_its_mask_and_its_weights():
    net = make(GMP(sparsity=0.9, steps=8, every=1, stem=True))
    opt = sgd(net)
    for step in range(8):
        if step == 4:
            net.model[0].weight.requires_grad_(False)
            mask, weight = net.masks["0.weight"].clone(), net.model[0].weight.clone()
        opt.zero_grad()
        backward(net)
        opt.step()
        net.step(opt)
    assert torch.equal(net.masks["0.weight"], mask)
    assert torch.equal(net.model[0].weight, weight)
    assert 1 - net.masks["3.weight"].float().mean() == pytest.approx(0.9, abs=0.01)


def test_a_method_that_counts_on_every_layer_refuses_to_lose_one():
    net = make(RigL(sparsity=0.5, steps=8, every=1, until=1.0))
    opt = sgd(net)
    backward(net)
    net.model[0].weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"0\.weight"):
        for _ in range(2):
            opt.step()
            net.step(opt)


def test_norms_frozen_in_the_model_are_frozen_on_every_path():
    net = make()
    opt = sgd(net)
    net.model[1].eval()
    for parameter in net.model[1].parameters():
        parameter.requires_grad_(False)
    before = {n: t.clone() for n, t in net.super.get_submodule("1").state_dict().items()}
    for _ in range(3):
        one_step(net, opt)
        net.step(opt)
    for name, tensor in net.super.get_submodule("1").state_dict().items():
        assert torch.equal(tensor, before[name]), name


# -- layers that lose every weight -------------------------------------------------------------------------------


def test_the_update_that_empties_a_layer_warns_once():
    net = make(DPF(sparsity=0.9, steps=8, every=1, ramp=0.5))
    with torch.no_grad():
        net.model[0].weight.mul_(1e-3)
    with pytest.warns(UserWarning, match=r"layer 0.weight lost every weight at step .*min_kept") as caught:
        for _ in range(8):
            net.step()
    assert len(caught) == 1


@pytest.mark.parametrize("scope", ["Global", "Uniform"])
@pytest.mark.parametrize("kept", [1, 5])
def test_min_kept_keeps_some_of_every_layer_and_the_count_exact(scope, kept):

    net = make(DPF(sparsity=0.9, steps=8, every=1, ramp=0.5, min_kept=kept, scope=getattr(dcil, scope)()))
    with torch.no_grad():
        net.model[0].weight.mul_(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            net.step()
    total = sum(mask.numel() for mask in net.masks.values())
    assert net.sparsity == int(0.9 * total) / total
    assert min(int(mask.sum()) for mask in net.masks.values()) >= kept
    if scope == "Global":  # those with the largest magnitudes
        size = net.model[0].weight.abs().flatten()
        assert set(size.topk(kept).indices.tolist()) == set(net.masks["0.weight"].flatten().nonzero()[:, 0].tolist())


def test_more_than_there_is_cannot_be_kept():
    net = make(DPF(sparsity=0.9, steps=8, every=1, ramp=0.5, min_kept=10**6))
    for _ in range(8):
        net.step()
    assert net.sparsity == 0
    with pytest.raises(UserError, match="min_kept must be 0"):
        RigL(sparsity=0.5, steps=8, min_kept=1)


# -- found in review ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_first", [True, False])
def test_every_optimizers_state_is_seen_in_any_order_and_after_loading(weights_first):
    net = make(GMP(sparsity=0.5, steps=8, every=1, stem=True))
    weights = torch.optim.SGD([p for p in net.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
    others = torch.optim.SGD([p for p in net.parameters() if p.dim() <= 1], lr=0.1, momentum=0.9)
    order = (weights, others) if weights_first else (others, weights)
    net.attach(*order)
    for step in range(8):
        net.zero_grad()
        backward(net)
        for optimizer in order:
            optimizer.step()
        if step == 3:
            weights.load_state_dict(weights.state_dict())  # which replaces the state
    for name, mask in net.masks.items():
        assert not weights.state[net.model.get_parameter(name)]["momentum_buffer"][~mask].any()
    assert len(others.state_dict()["state"]) == len(others.param_groups[0]["params"])


def test_weights_loaded_into_a_part_of_the_model_reach_every_path():
    net = make()
    net.model[1].load_state_dict({**net.model[1].state_dict(), "weight": torch.full((12,), 3.0)})
    assert net.get_submodule("super.1").weight.eq(3).all()


def test_a_refused_state_dict_leaves_the_way_out_open():
    net, other = make(), make(DCIL(sparsity=0.7, steps=8))
    with pytest.raises(UserError, match="same training"):
        net.load_state_dict(other.state_dict())
    with torch.no_grad():
        other.model[7].weight.fill_(2)
    net.load_model(other.model.state_dict())
    assert net.get_submodule("super.7").weight.eq(2).all()


def test_an_attached_net_is_saved_whole_and_the_copy_is_attached_to_nothing():
    net = make()
    opt = sgd(net)
    net.attach(opt)
    one_step(net, opt)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(net)):
        own = sgd(other)
        one_step(other, own)
        other.step(own)
        assert (net.steps_done, other.steps_done) == (1, 2)


@pytest.mark.parametrize("method", [DCIL, GMP])
def test_steps_count_on_when_every_prunable_layer_is_frozen(method):
    net = make(method(sparsity=0.5, steps=8, every=1))
    opt = sgd(net)
    net.attach(opt)
    one_step(net, opt)
    before = {name: mask.clone() for name, mask in net.masks.items()}
    for name in net.masks:
        net.model.get_parameter(name).requires_grad_(False)
    one_step(net, opt)
    assert net.steps_done == 2
    assert all(torch.equal(mask, before[name]) for name, mask in net.masks.items())
