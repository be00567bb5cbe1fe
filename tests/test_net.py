"""SparseNet against independent plain models: gradients, statistics, finalize, state."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, Counting, Shared, batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dcil import DCIL, DPF, METHODS, Dense, Filter, SparseNet, UserError, models, views
from dcil.distillation import distill

EVERY = pytest.mark.parametrize("name", NETWORKS)


def build(name, method, **settings):
    make, shape = NETWORKS[name]
    net = SparseNet(make().double(), method, **settings)
    return net, shape


def scatter_masks(net, density=0.5):
    for mask in net.masks.values():
        mask.copy_(torch.rand(mask.shape) < density)


def private_names(net):
    return list(net._partition.private)


def independent(net, path):
    """A plain copy of the model that computes what ``path`` computes, sharing no tensor with ``net``."""
    model = copy.deepcopy(net.model)
    with torch.no_grad():
        if path == "pruned":
            for name, mask in net.masks.items():
                model.get_parameter(name).mul_(mask)
        else:
            for key in private_names(net):
                model.get_submodule(key).load_state_dict(net.super.get_submodule(key).state_dict())
    return model.train()


def perturb_private(net):
    """The two paths' private layers must differ, or mixing them up would go unnoticed."""
    with torch.no_grad():
        for parameter in net.super.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


@EVERY
@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_gradient_identity(name, kl):
    """w.grad = M * grad of the P-loss + (1 - M) * grad of the S-loss, from two independent plain models."""
    net, shape = build(name, DCIL(sparsity=0.5, steps=100, kl=kl, warmup=0.0))
    scatter_masks(net)
    perturb_private(net)
    p, s = independent(net, "pruned"), independent(net, "super")
    x, y = batch(shape)
    out_p, out_s = p(x), s(x)
    (F.cross_entropy(out_p, y) + kl * distill(out_p, out_s, 2.0)).backward()
    (F.cross_entropy(out_s, y) + kl * distill(out_s, out_p, 2.0)).backward()
    net.train()
    outputs = net(x)
    torch.testing.assert_close(outputs["pruned"], out_p, rtol=0, atol=1e-14)
    torch.testing.assert_close(outputs["super"], out_s, rtol=0, atol=1e-14)
    net.loss(outputs, y).backward()
    grads_p = {n: q.grad for n, q in p.named_parameters()}
    grads_s = {n: q.grad for n, q in s.named_parameters()}
    owned = private_names(net)
    for n, w in net.model.named_parameters():
        if not w.requires_grad:
            assert w.grad is None
            continue
        want = grads_p[n]
        if n in net.masks:
            want = torch.where(net.masks[n], grads_p[n], grads_s[n])
        torch.testing.assert_close(w.grad, want, rtol=1e-12, atol=1e-14)
    for n, w in net.super.named_parameters():
        torch.testing.assert_close(w.grad, grads_s[n], rtol=1e-12, atol=1e-14)
    assert owned


@EVERY
def test_running_statistics_stay_apart(name):
    net, shape = build(name, DCIL(sparsity=0.5, steps=100))
    scatter_masks(net)
    p, s = independent(net, "pruned"), independent(net, "super")
    net.train()
    for _ in range(3):
        x, _ = batch(shape)
        net(x), p(x), s(x)
    for n, buffer in net.model.named_buffers():
        torch.testing.assert_close(buffer, p.get_buffer(n), rtol=1e-12, atol=1e-14)
    for n, buffer in net.super.named_buffers():
        torch.testing.assert_close(buffer, s.get_buffer(n), rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("method", [DPF(sparsity=0.5, steps=8, every=1), DCIL(sparsity=0.5, steps=8, every=1)])
def test_training_and_finalize(name, method):
    """A user's loop, any network: exact sparsity, and the finalized model is the evaluated one, in the user's class."""
    net, shape = build(name, method)
    keys = list(net.model.state_dict())
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for _ in range(8):
        x, y = batch(shape)
        loss = net.loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        net.step(opt)
    total = sum(m.numel() for m in net.masks.values())
    assert net.sparsity == int(0.5 * total) / total
    x, _ = batch(shape)
    sparse = net.finalize()
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), net(x), rtol=0, atol=0)
    assert type(sparse) is type(net.model)
    assert list(sparse.state_dict()) == keys
    for n, mask in net.masks.items():
        assert (sparse.get_parameter(n)[~mask] == 0).all()
        assert torch.equal(sparse.get_parameter(n)[mask], net.model.get_parameter(n)[mask])


def test_dpf_moves_pruned_weights_with_the_masked_gradient():
    net, shape = build("plain", DPF(sparsity=0.5, steps=100))
    scatter_masks(net)
    plain = independent(net, "pruned")
    x, y = batch(shape)
    F.cross_entropy(plain(x), y).backward()
    net.train()
    net.loss(net(x), y).backward()
    for n, w in net.model.named_parameters():
        torch.testing.assert_close(w.grad, plain.get_parameter(n).grad, rtol=1e-12, atol=1e-14)


def test_dense_is_the_plain_model():
    net, shape = build("residual", Dense())
    plain = copy.deepcopy(net.model).train()
    x, y = batch(shape)
    net.train()
    net.loss(net(x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    for n, w in net.model.named_parameters():
        torch.testing.assert_close(w.grad, plain.get_parameter(n).grad, rtol=0, atol=0)
    assert net.sparsity == 0


def test_what_is_shared_is_written_by_the_pruned_path_only():
    net, shape = build("buffers", DCIL(sparsity=0.5, steps=10))
    x, _ = batch(shape)
    net.train()
    for _ in range(3):
        net(x)
    assert int(net.model.calls) == 3
    net.model.scale.fill_(0.25)  # a change from outside reaches both paths
    other = copy.deepcopy(net)
    other.model.scale.fill_(0.5)
    assert not torch.equal(net(x)["super"], other(x)["super"])


def test_frozen_weights_stay_and_are_not_pruned():
    net, shape = build("frozen", DCIL(sparsity=0.9, steps=4, every=1))
    assert "0.0.0.weight" not in net.masks
    before = net.model[0][0][0].weight.clone()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        x, y = batch(shape)
        net.loss(net(x), y).backward()
        opt.step()
        net.step(opt)
    assert torch.equal(net.model[0][0][0].weight, before)


def test_a_shared_weight_is_pruned_once_under_its_first_name():
    net = SparseNet(Shared(), DCIL(sparsity=0.5, steps=10))
    assert list(net.masks) == ["first.weight"]
    scatter_masks(net)
    sparse = net.finalize()
    assert sparse.first.weight is sparse.second.weight


def test_default_parts_of_the_papers_networks():
    """Every convolution, stem and shortcuts included, never norm layers or the classifier."""
    net = SparseNet(models.build("resnet20"), DCIL(sparsity=0.9, steps=10))
    convs = [n + ".weight" for n, m in net.model.named_modules() if isinstance(m, nn.Conv2d)]
    assert list(net.masks) == convs
    assert sum(m.numel() for m in net.masks.values()) == 270_256
    norms = [n for n, m in net.model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert sorted(private_names(net)) == sorted([*norms, "fc"])


def test_overrides_by_pattern_and_predicate():
    make, _ = NETWORKS["transformer"]
    method = DCIL(sparsity=0.5, steps=10)
    net = SparseNet(make(), method, prunable=["*.in_proj_weight", "encoder.layers.0.linear1"])
    assert sorted(net.masks) == [
        "encoder.layers.0.linear1.weight",
        "encoder.layers.0.self_attn.in_proj_weight",
        "encoder.layers.1.self_attn.in_proj_weight",
    ]
    net = SparseNet(make(), method, prunable=lambda name, module: "linear2" in name)
    assert sorted(net.masks) == ["encoder.layers.0.linear2.weight", "encoder.layers.1.linear2.weight"]
    net = SparseNet(make(), method, private="norm")
    assert private_names(net) == ["norm"]
    assert "head.weight" in net.masks
    net = SparseNet(make(), method, private=lambda name, module: name == "encoder.layers.0")
    assert private_names(net) == ["encoder.layers.0"]
    net = SparseNet(make(), method, classifier="encoder.layers.0.linear1")
    assert "encoder.layers.0.linear1" in private_names(net)
    assert "head.weight" in net.masks


class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(4)), {}, ["'0'", "one batch"]),
        (Convolutional, {}, ["no classifier", "'1'", "classifier="]),
        (lambda: nn.Sequential(nn.Linear(3, 4)), {}, ["nothing to prune", "prunable="]),
        (Shared, {"classifier": "haed"}, ["'haed'", "'head'"]),
        (Shared, {"prunable": ["frist.weight"]}, ["'frist.weight'", "'first.weight'"]),
        (Shared, {"private": ["hed"]}, ["'hed'", "'head'"]),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)),
            {},
            ["'0'", "parametrization"],
        ),
    ],
)
def test_what_cannot_work_is_named_with_the_way_out(make, settings, words):
    with pytest.raises(UserError) as error:
        SparseNet(make(), DCIL(sparsity=0.5, steps=10), **settings)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_the_way_out_of_no_classifier_works():
    SparseNet(Convolutional(), DCIL(sparsity=0.5, steps=10), classifier="1")
    net = SparseNet(Convolutional(), DCIL(sparsity=0.5, steps=10), private=[])
    assert len(net.masks) == 2


def test_classifier_inside_named_modules():
    with pytest.raises(UserError, match="no classifier"):
        SparseNet(nn.Linear(3, 4), DCIL(sparsity=0.5, steps=10))


@pytest.mark.parametrize("method", METHODS.values())
def test_state_dict_goes_on_bit_for_bit(method):
    settings = {"sparsity": 0.6, "every": 3} if method.prunes else {}
    settings |= {"inner": False} if method is METHODS["l1filter"] else {}

    def fresh():
        torch.manual_seed(1)
        net = SparseNet(NETWORKS["plain"][0](), method(steps=20, **settings))
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def go(net, opt, steps):
        for step in steps:
            torch.manual_seed(100 + step)
            x, y = batch((2, 8, 8), dtype=torch.float)
            net.train()
            loss = net.loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            net.step(opt)

    whole, opt = fresh()
    go(whole, opt, range(14))
    first, opt = fresh()
    go(first, opt, range(7))
    second, other = fresh()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert second.steps_done == 7
    go(second, other, range(7, 14))
    for (n, a), b in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), n


def test_masks_move_when_due_and_say_what_changed():
    net, _ = build("plain", DPF(sparsity=0.5, steps=100, every=16, ramp=0.75))
    moved = [update for update in (net.step() for _ in range(100)) if update]
    assert [u.step for u in moved] == [16, 32, 48, 64, 80, 96]
    assert sum(int(u.changes[1]) - int(u.changes[0]) for u in moved) == sum(int((~m).sum()) for m in net.masks.values())
    assert net.step() is None  # after the last step the masks stay: fine-tuning


def test_dpf_freezes_at_the_target_if_asked():
    due = [s for s in range(1, 101) if DPF(sparsity=0.5, steps=100, ramp=0.5, freeze=True).due(s)]
    assert due == [16, 32, 48, 50]


def test_target_is_reached_even_if_the_ramp_ends_with_the_training():
    net, _ = build("plain", DCIL(sparsity=0.5, steps=10, ramp=1.0))
    for _ in range(10):
        net.step()
    total = sum(m.numel() for m in net.masks.values())
    assert net.sparsity == int(0.5 * total) / total


def test_kl_is_off_during_the_warmup():
    method = DCIL(sparsity=0.5, steps=300)
    assert [method.kl_at(step) for step in (0, 69, 70, 299)] == [0.0, 0.0, 1.0, 1.0]
    assert DCIL(sparsity=0.5, steps=300, kl=0.0).kl_at(299) == 0.0
    assert DCIL(sparsity=0.5, steps=300, kl=0.5, warmup=0.0).kl_at(0) == 0.5


def test_distill_against_its_definition():
    student, teacher = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    p, q = (teacher / 3).softmax(1), (student / 3).softmax(1)
    want = 9 * (p * (p / q).log()).sum(1).mean()
    got = distill(student, teacher, 3.0)
    torch.testing.assert_close(got, want)
    got.backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_a_layer_that_lost_everything_is_named():
    net, _ = build("plain", DCIL(sparsity=0.5, steps=10))
    first = next(iter(net.masks))
    net.masks[first].fill_(False)
    assert net.empty_layers() == [first]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.finalize()
    assert first in str(caught[0].message)


def test_eval_sees_the_pruned_weights_whatever_the_method_trains_with():
    net, shape = build("plain", Dense())
    scatter_masks(net)
    x, _ = batch(shape)
    net.eval()
    want = independent(net, "pruned").eval()(x)
    torch.testing.assert_close(net(x), want, rtol=0, atol=1e-14)
    with pytest.raises(UserError, match="super"):
        net.path("super", x)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DCIL(sparsity=95, steps=10), "got 95"),
        (lambda: DCIL(sparsity=1.0, steps=10), "must be >= 0 and < 1, got 1.0"),
        (lambda: DCIL(sparsity=-0.1, steps=10), "sparsity"),
        (lambda: DCIL(sparsity=0.5, steps=0), "steps"),
        (lambda: DCIL(sparsity=0.5, steps=5, every=-1), "every"),
        (lambda: DCIL(sparsity=0.5, steps=5, ramp=0.0), "ramp"),
        (lambda: DCIL(sparsity=0.5, steps=5, temperature=0.0), "temperature"),
        (lambda: DCIL(sparsity=0.5, steps=5, kl=-1.0), "kl"),
        (lambda: DCIL(sparsity=0.5, steps=5, warmup=2.0), "warmup"),
        (lambda: Dense(sparsity=0.5), "prunes nothing"),
    ],
)
def test_wrong_settings_are_named(make, word):
    with pytest.raises(UserError, match=word):
        make()


def test_filters_of_a_residual_network():
    net = SparseNet(models.build("resnet8-digits", 4, 2), DCIL(sparsity=0.4, steps=2, every=1, granularity=Filter()))
    for _ in range(2):
        net.step()
    filters = [mask.flatten(1) for mask in net.masks.values()]
    assert sum(int((~f.any(1)).sum()) for f in filters) == int(0.4 * sum(len(f) for f in filters))
    assert all(torch.equal(f.any(1), f.all(1)) for f in filters)


def test_masks_follow_memory_format_and_deepcopy():
    net = SparseNet(models.build("resnet8-digits"), DCIL(sparsity=0.4, steps=2, every=1))
    net = net.to(memory_format=torch.channels_last)
    net.step()
    mask = net.masks["layer2.0.conv1.weight"]
    assert mask.is_contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(net)
    other.masks["layer2.0.conv1.weight"].fill_(False)
    assert mask.any()
    assert not torch.equal(net.masks["layer2.0.conv1.weight"], other.masks["layer2.0.conv1.weight"])


def test_views_are_what_the_methods_say():
    assert DCIL.paths == {"pruned": views.kept, "super": views.revived}
    assert DPF.paths == {"pruned": views.straight_through}
    assert isinstance(Counting(), nn.Module)


# -- found by review --------------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """A norm that assigns its buffer anew instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x - self.mean


class AveragingNorm(Averaging):
    pass


def test_a_buffer_that_is_assigned_anew_arrives_on_both_paths():
    net = SparseNet(nn.Sequential(nn.Linear(5, 12), AveragingNorm(), nn.Linear(12, 4)), DCIL(sparsity=0.5, steps=9))
    scatter_masks(net)
    for _ in range(3):
        net(torch.randn(6, 5))
    private = net.super.get_buffer("1.mean")
    assert private.abs().sum() > 0
    assert net.model[1].mean.abs().sum() > 0
    assert not torch.equal(private, net.model[1].mean)


def test_norms_that_share_a_parameter():
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model[3].weight = model[1].weight
    net = SparseNet(model, DCIL(sparsity=0.5, steps=9))
    net.loss(net(torch.randn(6, 5)), torch.randint(4, (6,))).backward()
    copies = net.super
    assert copies.get_submodule("1").weight is copies.get_submodule("3").weight


def test_a_convolution_called_norm_is_a_convolution():
    class NormedConv(nn.Conv2d):
        pass

    model = nn.Sequential(NormedConv(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    assert list(SparseNet(model, DCIL(sparsity=0.5, steps=9)).masks) == ["0.weight"]


def test_a_classifier_that_cannot_be_told_is_asked_for():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.Flatten(), nn.Linear(4, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 1)
    )
    with pytest.raises(UserError, match="'4' comes after it"):
        SparseNet(model, DCIL(sparsity=0.5, steps=9))
    assert "2.weight" in SparseNet(model, DCIL(sparsity=0.5, steps=9), classifier="4").masks


def test_a_classifier_asked_for_by_name_is_prunable():
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    net = SparseNet(model, DCIL(sparsity=0.5, steps=9), prunable=["0", "2"])
    assert list(net.masks) == ["0.weight", "2.weight"]
    assert private_names(net) == ["1"]


def test_half_precision_logits_give_a_kl_that_is_not_negative():
    student = torch.randn(64, 10, dtype=torch.bfloat16)
    teacher = student + 0.02 * torch.randn(64, 10).bfloat16()
    exact = distill(student.double(), teacher.double(), 2.0)
    assert distill(student, teacher, 2.0).item() == pytest.approx(exact.item(), rel=1e-3)


def test_outputs_without_classes_are_refused_from_the_first_step():
    net = SparseNet(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1), nn.Flatten(0)), DCIL(sparsity=0.5, steps=9))
    with pytest.raises(UserError, match="kl=0"):
        net.loss(net(torch.randn(6, 5)), torch.randn(6), task=F.mse_loss)
    net = SparseNet(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1), nn.Flatten(0)), DCIL(sparsity=0.5, steps=9, kl=0.0))
    net.loss(net(torch.randn(6, 5)), torch.randn(6), task=F.mse_loss).backward()


def test_finalize_copes_with_an_activation_left_on_a_module():
    class Stashing(nn.Linear):
        def forward(self, x):
            self.seen = super().forward(x)
            return self.seen

    net = SparseNet(nn.Sequential(Stashing(5, 8), nn.Linear(8, 4)), DCIL(sparsity=0.5, steps=9))
    net(torch.randn(6, 5))
    assert net.finalize()(torch.randn(6, 5)).shape == (6, 4)


class Twice(nn.Module):
    """Computes its activations again in the backward pass, and says so nowhere."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(checkpoint(self.hidden, x, use_reentrant=False).relu())


def test_activations_that_are_computed_twice_inside_are_refused_and_around_are_right():
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    net = SparseNet(Twice(), DCIL(sparsity=0.5, steps=10))
    with pytest.raises(RuntimeError, match="the model checkpoints its activations"):
        net(x)
    plain = SparseNet(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), DCIL(sparsity=0.5, steps=10))
    plain.masks["0.weight"][::2] = False
    gradients = []
    for run in (lambda: plain(x), lambda: checkpoint(plain, x, use_reentrant=False)):
        plain.zero_grad()
        plain.loss(run(), y).backward()
        gradients.append([p.grad.clone() for p in plain.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(g.any() for g in gradients[0])


def test_checkpointed_activations_are_refused():
    model = NETWORKS["plain"][0]()
    model[0].gradient_checkpointing = True
    with pytest.raises(UserError, match="'0' checkpoints"):
        SparseNet(model, DCIL(sparsity=0.5, steps=9))


def test_a_model_in_eval_mode_is_trained_all_the_same():
    assert SparseNet(NETWORKS["plain"][0]().eval(), DCIL(sparsity=0.5, steps=9)).model.training


def test_double_weights_are_ranked_in_double():
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1 + 1e-9, 1 + 2e-9, 1 + 3e-9]], dtype=torch.double))
    net = SparseNet(model, DPF(sparsity=0.5, steps=1))
    net.step()
    assert net.masks["0.weight"].tolist() == [[False, False, True, True]]


def test_no_kl_ever_means_none_while_fine_tuning_either():
    assert DCIL(sparsity=0.5, steps=10, warmup=1.0).kl_at(15) == 0.0


def test_mistakes_of_a_first_script_are_named():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for method in ("dcil", DCIL):
        with pytest.raises(UserError, match=r"must be a dcil\.Method such as .*, got"):
            SparseNet(model, method)
    with pytest.raises(UserError, match=r"granularity must be Weight\(\) or Filter\(\).*, got 'filter'"):
        DCIL(sparsity=0.5, steps=10, granularity="filter")
    net = SparseNet(model, DCIL(sparsity=0.5, steps=10)).eval()
    with pytest.raises(UserError, match=r"as net\(x\) returns them in training"):
        net.loss(net(torch.randn(3, 4)), torch.zeros(3, dtype=torch.long))
    with pytest.warns(UserWarning, match=r"asked for a sparsity of 0\.5, reached 0\.0000"):
        net.finalize()  # without a single net.step


def test_compiled_once_and_once_more_when_the_kl_terms_begin():
    net, x, y = (
        SparseNet(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4)), DCIL(sparsity=0.5, steps=40)),
        *batch((5,), dtype=torch.float),
    )
    opt, graphs = torch.optim.SGD(net.parameters(), 0.1), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    whole = torch.compile(lambda x, y: net.loss(net(x), y), backend=backend, fullgraph=True)
    plain = copy.deepcopy(net)
    for _ in range(20):
        loss = whole(x, y)
        torch.testing.assert_close(loss, plain.loss(plain(x), y))
        opt.zero_grad()
        loss.backward()
        opt.step()
        net.step(opt)
        plain.load_state_dict(net.state_dict())
    assert len(graphs) == 2
