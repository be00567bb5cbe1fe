"""The KL terms are what they say: over the classes, over the positions that count, reduced as the task is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcil import DCIL, DPF, SparseNet, UserError
from dcil.distillation import distill_both_ways, distill_mse, distill_sigmoid

T = 2.0


class Tokens(nn.Module):
    """Logits (batch, positions, classes), or classes in dimension 1, in whatever a model returns."""

    def __init__(self, classes=7, wrap=lambda logits: logits, first=False):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, classes)
        self.wrap, self.first = wrap, first

    def forward(self, ids):
        logits = self.head(self.norm(torch.relu(self.mix(self.embed(ids)))))
        return self.wrap(logits.transpose(1, 2) if self.first else logits)


def make(wrap=lambda logits: logits, classes=7, first=False, **settings):
    torch.manual_seed(0)
    net = SparseNet(
        Tokens(classes, wrap, first).double(), DCIL(**{"sparsity": 0.5, "steps": 9, "warmup": 0.0} | settings)
    )
    for mask in net.masks.values():
        mask.copy_(torch.rand(mask.shape) < 0.5)
    with torch.no_grad():
        for parameter in net.super.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return net


def logits_of(net, ids, pick=lambda out: out):
    outputs = net(ids)
    return pick(outputs["pruned"]), pick(outputs["super"])


def kl(student, teacher, valid=None, reduction="mean"):
    """T^2 KL(teacher || student; T) over the last dimension, written out."""
    p, q = (teacher.detach() / T).softmax(-1), (student / T).softmax(-1)
    terms = (p * (p.log() - q.log())).sum(-1)
    terms = terms[valid] if valid is not None else terms
    return T**2 * (terms.mean() if reduction == "mean" else terms.sum())


def mutual(p, s, **settings):
    return kl(p, s, **settings) + kl(s, p, **settings)


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


IDS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(2))


def cross_entropy(logits, labels, **settings):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


def test_classes_in_the_last_dimension():
    net = make()
    p, s = logits_of(net, IDS)
    want = cross_entropy(p, LABELS) + cross_entropy(s, LABELS) + mutual(p, s)
    got = net.loss(net(IDS), LABELS)
    torch.testing.assert_close(got, want)
    got, want = gradients(net, got), gradients(net, want)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad)


def test_classes_in_dimension_one():
    net = make(first=True)
    p, s = logits_of(net, IDS, lambda out: out.transpose(1, 2))
    want = cross_entropy(p, LABELS) + cross_entropy(s, LABELS) + mutual(p, s)
    torch.testing.assert_close(net.loss(net(IDS), LABELS), want)


def test_as_many_positions_as_classes_must_be_told_apart_by_the_user():
    ids, labels = IDS[:, :5], torch.randint(5, (3, 5))
    net = make(classes=5)
    with pytest.raises(UserError, match=r"class_dim=1.*class_dim=-1"):
        net.loss(net(ids), labels)
    net = make(classes=5, class_dim=-1)
    p, s = logits_of(net, ids)
    want = cross_entropy(p, labels) + cross_entropy(s, labels) + mutual(p, s)
    torch.testing.assert_close(net.loss(net(ids), labels), want)
    with pytest.raises(UserError, match="class_dim must be"):
        make(class_dim=5).loss(make(class_dim=5)(IDS), LABELS)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_ignored_labels_do_not_count(ignored):
    labels = LABELS.clone()
    labels[0, 1:] = ignored
    task = F.cross_entropy if ignored == -100 else functools.partial(F.cross_entropy, ignore_index=ignored)
    net = make()
    p, s = logits_of(net, IDS)
    losses = cross_entropy(p, labels, ignore_index=ignored) + cross_entropy(s, labels, ignore_index=ignored)
    want = losses + mutual(p, s, valid=labels != ignored)
    torch.testing.assert_close(net.loss(net(IDS), labels, task), want)
    torch.testing.assert_close(net.loss(net(IDS), labels, nn.CrossEntropyLoss(ignore_index=ignored)), want)


def test_positions_named_by_the_user_count():
    valid = torch.rand(3, 5) < 0.5
    valid[0, 0] = True
    net = make(distill="softmax")

    def shifted(logits, labels):  # a task of one's own: padding is not recognised
        return cross_entropy(logits[:, :-1], labels[:, 1:])

    p, s = logits_of(net, IDS)
    want = shifted(p, LABELS) + shifted(s, LABELS) + mutual(p, s, valid=valid)
    torch.testing.assert_close(net.loss(net(IDS), LABELS, shifted, valid=valid), want)
    with pytest.raises(UserError, match="valid must have the shape"):
        net.loss(net(IDS), LABELS, shifted, valid=valid[:, :3])
    padded = LABELS.clone()
    padded[:, -1] = -100
    with pytest.raises(UserError, match="valid must be given"):
        net.loss(net(IDS), padded, shifted)


def test_nothing_to_learn_from_is_zero_and_not_nan():
    net = make()
    task = functools.partial(F.cross_entropy, reduction="sum")  # its mean over nothing is NaN by itself
    loss = net.loss(net(IDS), torch.full_like(LABELS, -100), task)
    assert loss == 0
    grads = gradients(net, loss)
    assert all((grad == 0).all() for grad in grads.values())


def test_a_sum_stays_a_sum():
    net = make()
    p, s = logits_of(net, IDS)
    losses = sum(cross_entropy(out, LABELS, reduction="sum") for out in (p, s))
    want = losses + mutual(p, s, reduction="sum")
    for task in (functools.partial(F.cross_entropy, reduction="sum"), nn.CrossEntropyLoss(reduction="sum")):
        torch.testing.assert_close(net.loss(net(IDS), LABELS, task), want)
    with pytest.raises(UserError, match="scalar"):
        net.loss(net(IDS), LABELS, nn.CrossEntropyLoss(reduction="none"))


def test_soft_labels():
    net = make()
    soft = torch.rand(3, 5, 7, dtype=torch.double).softmax(-1)
    p, s = logits_of(net, IDS)
    want = sum(F.cross_entropy(out.flatten(0, 1), soft.flatten(0, 1)) for out in (p, s)) + mutual(p, s)
    torch.testing.assert_close(net.loss(net(IDS), soft), want)


@pytest.mark.parametrize(
    "task", [F.binary_cross_entropy_with_logits, nn.MSELoss(), F.l1_loss, lambda out, y: F.cross_entropy(out, y)]
)
def test_another_task_must_say_what_is_compared(task):
    net = make()
    with pytest.raises(UserError, match="distill must say"):
        net.loss(net(IDS), torch.rand(3, 5, 7, dtype=torch.double), task)
    quiet = make(kl=0.0)
    quiet.loss(quiet(IDS), torch.rand(3, 5, 7, dtype=torch.double), task)


def test_the_refusal_comes_in_the_first_step_not_after_the_warmup():
    net = make(warmup=0.9)
    with pytest.raises(UserError, match="distill must say"):
        net.loss(net(IDS), torch.rand(3, 5, 7, dtype=torch.double), F.mse_loss)


def test_sigmoid_is_one_bernoulli_variable_per_logit():
    net, target = make(distill="sigmoid"), torch.rand(3, 5, 7, dtype=torch.double)

    def bernoulli(student, teacher):
        p, q = (teacher.detach() / T).sigmoid(), (student / T).sigmoid()
        return T**2 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()

    p, s = logits_of(net, IDS)
    task = F.binary_cross_entropy_with_logits
    want = task(p, target) + task(s, target) + bernoulli(p, s) + bernoulli(s, p)
    got = net.loss(net(IDS), target, task)
    torch.testing.assert_close(got, want)
    a, b = gradients(net, got), gradients(net, want)
    for name in a:
        torch.testing.assert_close(a[name], b[name])
    one = torch.tensor([[40.0], [-1e4]])
    assert distill_sigmoid(one, -one, T).isfinite()
    assert distill_sigmoid(one[:1], torch.zeros(1, 1), T) > 0  # a softmax over one logit would be 0


def test_regression():
    net, target = make(distill="mse"), torch.rand(3, 5, 7, dtype=torch.double)
    p, s = logits_of(net, IDS)
    gap = ((p - s) ** 2).mean()
    torch.testing.assert_close(
        net.loss(net(IDS), target, F.mse_loss), F.mse_loss(p, target) + F.mse_loss(s, target) + 2 * gap
    )
    valid = torch.tensor([True, False, True])
    student, teacher = torch.randn(3, 4), torch.randn(3, 4)
    want = ((student - teacher) ** 2)[valid].mean()
    torch.testing.assert_close(distill_mse(student, teacher, valid), want)


def test_a_distance_of_ones_own():
    net = make(distill=lambda student, teacher: (student - teacher).abs().max())
    p, s = logits_of(net, IDS)
    want = cross_entropy(p, LABELS) + cross_entropy(s, LABELS) + 2 * (p - s).abs().max()
    torch.testing.assert_close(net.loss(net(IDS), LABELS), want)
    with pytest.raises(UserError, match="scalar"):
        distill_both_ways(p, s, lambda student, teacher: student)


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [Output, lambda x: {"logits": x}, lambda x: (x, "state"), lambda x: [x]],
    ids=["object", "mapping", "tuple", "list"],
)
def test_structured_outputs(wrap):
    plain, net = make(), make(wrap)
    want = plain.loss(plain(IDS), LABELS)
    torch.testing.assert_close(net.loss(net(IDS), LABELS), want)


def test_logits_anywhere_else():
    net, plain = make(lambda x: {"out": {"deep": x}}), make()
    want = plain.loss(plain(IDS), LABELS)
    got = net.loss(net(IDS), LABELS, logits=lambda out: out["out"]["deep"])
    torch.testing.assert_close(got, want)
    with pytest.raises(UserError, match=r"keys out.*logits=lambda"):
        net.loss(net(IDS), LABELS)


def test_a_task_of_ones_own_gets_the_output_as_it_is():
    net = make(Output, distill="softmax")
    seen = []

    def task(output, target):
        seen.append(output)
        return cross_entropy(output.logits, target)

    net.loss(net(IDS), LABELS, task)
    assert all(isinstance(output, Output) for output in seen)


def test_a_task_may_say_what_it_is():
    class Own:
        reduction, distill = "sum", "softmax"

        def __call__(self, out, y):
            return cross_entropy(out, y, reduction="sum")

    net = make()
    p, s = logits_of(net, IDS)
    losses = sum(cross_entropy(out, LABELS, reduction="sum") for out in (p, s))
    torch.testing.assert_close(net.loss(net(IDS), LABELS, Own()), losses + mutual(p, s, reduction="sum"))


def test_one_path_needs_none_of_this():
    net = SparseNet(Tokens(5).double(), DPF(sparsity=0.5, steps=9))
    out = net(IDS)["pruned"]
    labels = torch.randint(5, (3, 4))
    torch.testing.assert_close(net.loss(net(IDS[:, :4]), labels), cross_entropy(out[:, :4], labels))


def test_outputs_of_an_evaluation_are_refused():
    net = make(lambda x: {"logits": x}).eval()
    with pytest.raises(UserError, match=r"net.train\(\)"):
        net.loss(net(IDS), LABELS)


def test_metrics_have_the_parts_of_the_loss():
    net = make()
    p, s = logits_of(net, IDS)
    net.loss(net(IDS), LABELS)
    found = net.metrics()
    assert found["kl_weight"] == 1.0
    assert found["loss/pruned"] == pytest.approx(cross_entropy(p, LABELS).item())
    assert found["loss/super"] == pytest.approx(cross_entropy(s, LABELS).item())
    assert found["loss/kl"] == pytest.approx(mutual(p, s).item())
    assert found["sparsity"] == net.sparsity
    assert found["layer_sparsity/mix.weight"] == 1 - int(net.masks["mix.weight"].sum()) / 36
    net.update_masks()
    assert {"flips/revived", "flips/dropped", "step"} <= net.metrics().keys()
    assert all(isinstance(value, (int, float)) for value in net.metrics().values())


# -- what would be silently wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mse", "sigmoid"])
def test_ignored_labels_count_in_no_kind_of_distillation(kind):
    net, labels = make(distill=kind), LABELS.clone()
    labels[:, 3:] = -100
    outputs = {path: logits.detach() for path, logits in net(IDS).items()}
    before = net.loss(outputs, labels)
    outputs["super"][:, 3:] += 1
    torch.testing.assert_close(net.loss(outputs, labels), before)


@pytest.mark.parametrize(
    "valid",
    [
        LABELS,  # as bool these would be all but class 0
        torch.zeros(3, 5),  # added to scores: 0 is kept
        torch.ones(3, 5, 7, dtype=torch.bool),
        [True] * 5,
    ],
)
def test_what_is_no_mask_of_positions_is_refused(valid):
    net = make()
    with pytest.raises(UserError, match="valid must"):
        net.loss(net(IDS), LABELS, valid=valid)


@pytest.mark.parametrize("method", [DPF(sparsity=0.5, steps=9), DCIL(sparsity=0.5, steps=9, kl=0.0)])
def test_without_kl_terms_the_class_dimension_is_not_guessed_either(method):
    net = SparseNet(Tokens(classes=5), method)
    with pytest.raises(UserError, match="must be unique"):
        net.loss(net(IDS), LABELS % 5)
    soft = torch.rand(3, 5, 5).softmax(-1)
    with pytest.raises(UserError, match="must be unique"):
        net.loss(net(IDS), soft)


def test_labels_tell_where_the_classes_are():
    """As wide as there are classes: (batch, classes, height, width) for labels (batch, height, width)."""
    net = SparseNet(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1)),
        DCIL(sparsity=0.5, steps=9, warmup=0.0),
        classifier="2",
    )
    outputs, y = net(torch.randn(2, 2, 6, 5)), torch.randint(5, (2, 6, 5))
    p, s = (outputs[path].movedim(1, -1) for path in ("pruned", "super"))
    want = F.cross_entropy(outputs["pruned"], y) + F.cross_entropy(outputs["super"], y) + mutual(p, s)
    torch.testing.assert_close(net.loss(outputs, y), want)
    # A classifier that was named wrongly, with as many outputs as there are positions.
    tokens = SparseNet(Tokens(), DCIL(sparsity=0.5, steps=9, warmup=0.0, distill="softmax"), classifier="mix")
    ids, labels = torch.randint(11, (3, 6)), torch.randint(7, (3, 6))
    with pytest.raises(UserError, match="must be unique"):
        tokens.loss(tokens(ids), labels, cross_entropy)


def test_a_mean_over_the_batch_is_one():
    net = make(distill="softmax")
    outputs = {path: logits[:, 0].log_softmax(-1) for path, logits in net(IDS).items()}
    target = torch.rand(3, 7, dtype=torch.double).softmax(-1)
    task = functools.partial(F.kl_div, reduction="batchmean")
    p, s = outputs["pruned"], outputs["super"]
    torch.testing.assert_close(net.loss(outputs, target, task), task(p, target) + task(s, target) + mutual(p, s))


def test_a_loss_module_of_ones_own_gets_the_output_as_it_is():
    class Mine(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return cross_entropy(output["logits"], target) + output["extra"]

    net = SparseNet(Tokens(wrap=lambda logits: {"logits": logits, "extra": 1.0}), DPF(sparsity=0.5, steps=9))
    outputs = net(IDS)
    want = cross_entropy(outputs["pruned"]["logits"], LABELS) + 1
    torch.testing.assert_close(net.loss(outputs, LABELS, Mine()), want)


@pytest.mark.parametrize(
    "wrong", [{"task": None}, {"task": "cross_entropy"}, {"logits": "logits"}, {"logits": lambda output: None}]
)
def test_wrong_types_are_refused(wrong):
    net = make()
    with pytest.raises(UserError, match="must"):
        net.loss(net(IDS), LABELS, **wrong)
