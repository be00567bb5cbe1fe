"""Batch shares: the super net on the first samples of a batch, against a step written by hand and in expectation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, batch
from torch import nn
from torch.func import functional_call

from dcil import DCIL, DPF, SparseNet, UserError, make_step
from dcil.batch_share import count_samples, first_samples, first_targets
from dcil.distillation import distill_both_ways
from dcil.engine import EagerEngine, EngineSettings
from dcil.engine.step_settings import by_target

SETTINGS = {"sparsity": 0.5, "steps": 20, "every": 2, "warmup": 0.0}


def built(share: float, network: str = "residual", **settings):
    torch.manual_seed(5)
    net = SparseNet(NETWORKS[network][0]().double(), DCIL(super_share=share, **SETTINGS | settings)).train()
    net.update_masks()
    for layer in net.layers:  # as in the middle of a training
        layer.mask.copy_(torch.rand(layer.mask.shape) < 0.6)
    return net


def kl(student, teacher, temperature=2.0):
    log_p, log_q = (teacher.detach() / temperature).log_softmax(1), (student / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def step_by_hand(net, x, y, rows: int):
    """Eq. 3 and 4 with two plain networks, the second of which sees the first ``rows`` images."""
    model, tensors = net.model, {}
    for path in ("pruned", "super"):
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        if path == "super":
            own = {n: t.detach() for n, t in own.items()} | dict(net.get_submodule("super").state_dict(keep_vars=True))
        for name, mask in net.masks.items():
            w = model.get_parameter(name)
            own[name] = w * mask if path == "pruned" else torch.where(mask, w.detach(), w)
        tensors[path] = own
    p = functional_call(model, tensors["pruned"], (x,))
    s = functional_call(model, tensors["super"], (x[:rows],))
    loss = F.cross_entropy(p, y) + F.cross_entropy(s, y[:rows]) + kl(p[:rows], s) + kl(s, p[:rows])
    loss.backward()
    return loss


@pytest.mark.parametrize(("share", "rows"), [(1.0, 12), (0.5, 6), (0.26, 4), (0.01, 1)])
def test_a_step_is_the_one_by_hand(share, rows):
    x, y = batch((2, 8, 8), 12)
    net, other = built(share), built(share)
    loss = net.loss(net(x), y)
    loss.backward()
    torch.testing.assert_close(loss, step_by_hand(other, x, y, rows))
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), b in zip(net.named_buffers(), other.buffers(), strict=True):  # norm statistics, of each path's own
        torch.testing.assert_close(a, b, msg=name)


def test_the_whole_batch_is_the_default_bit_for_bit():
    x, y = batch((2, 8, 8), 12)
    assert DCIL(**SETTINGS).super_share == 1
    assert first_samples((x,), {"y": y}, 1.0) == ((x,), {"y": y})
    net = built(1.0)
    p, s = net(x).values()
    want = torch.stack([F.cross_entropy(p, y), F.cross_entropy(s, y)]).sum() + distill_both_ways(p, s)
    assert torch.equal(net.loss({"pruned": p, "super": s}, y), want)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_the_gradient_is_right_on_average(share):
    """Over the parts of a batch, each of them first for once, the mean gradient is that of the whole batch."""
    x, y = batch(NETWORKS["no-norm"][1], 12)
    rows, whole, sums = int(share * 12), built(1.0, "no-norm"), {}
    for start in range(0, 12, rows):
        net = built(share, "no-norm")
        net.loss(net(x.roll(-start, 0)), y.roll(-start, 0)).backward()
        for name, p in net.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad * share
    whole.loss(whole(x), y).backward()
    for name, p in whole.named_parameters():
        torch.testing.assert_close(sums[name], p.grad, msg=name)


def test_numbers_of_samples_are_rounded_up_but_for_rounding_errors():
    assert [count_samples(size, 0.25) for size in (0, 1, 4, 5, 128)] == [0, 1, 1, 2, 32]
    assert [count_samples(size, 1e-300) for size in (0, 1, 128)] == [0, 1, 1]
    assert count_samples(100, 0.07) == 7 and 0.07 * 100 > 7


@dataclass
class Output:
    logits: torch.Tensor


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens, mask=None, scale=1.0, bias=None):
        hidden = self.body(self.embed(tokens["ids"])) * scale
        hidden = hidden if bias is None else hidden + bias
        return Output(self.head(hidden if mask is None else hidden * mask[..., None]))


def test_structured_inputs_and_outputs_are_divided_along_the_batch():
    torch.manual_seed(0)
    net = SparseNet(Tagger(), DCIL(super_share=0.5, **SETTINGS)).train()
    ids, bias = torch.randint(11, (6, 5)), torch.randn(1, 1, 8)
    labels, mask = ids.roll(-1, 1), torch.rand(6, 5)
    outputs = net({"ids": ids}, mask=mask, scale=2.0, bias=bias)
    assert [len(outputs[path].logits) for path in ("pruned", "super")] == [6, 3]
    alone = net.path("super", {"ids": ids[:3]}, mask=mask[:3], scale=2.0, bias=bias)
    assert torch.equal(alone.logits, outputs["super"].logits)
    labels[:, -1] = -100
    whole, short = (o.logits.flatten(0, 1) for o in (outputs["pruned"], outputs["super"]))
    want = F.cross_entropy(whole, labels.flatten()) + F.cross_entropy(short, labels[:3].flatten())
    counted = labels[:3].flatten() != -100
    p, s = whole[:15][counted], short[counted]
    want = want + kl(p, s) + kl(s, p)
    torch.testing.assert_close(net.loss(outputs, labels), want)
    torch.testing.assert_close(net.loss(outputs, labels, valid=labels != -100), want)
    flat = net.loss(outputs, labels.flatten(), logits=lambda output: by_target(output.logits))
    torch.testing.assert_close(flat, want)


def test_a_target_of_one_number_for_several_rows_of_logits():
    """A label for each sequence whose tokens all have logits."""
    target = {"y": torch.arange(8), "pair": (torch.arange(16), None), "weight": torch.tensor(2.0)}
    found = first_targets(target, rows=8, of=16)
    assert found["y"].tolist() == [0, 1, 2, 3] and found["pair"][0].tolist() == list(range(8))
    assert found["weight"] == 2 and found["pair"][1] is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: first_samples((torch.ones(4), torch.ones(6)), {}, 0.5), "one batch size.*dimensions 4, 6"),
        (lambda: first_samples(([torch.ones(3, 8), torch.ones(3, 9)],), {}, 0.5), "tensors, or mappings.*got a list"),
        (lambda: first_samples((), {"x": object()}, 0.5), "tensors, or mappings.*object"),
        (lambda: first_targets(torch.ones(5), 4, 8), r"target must be tensors of 8 rows.*shape \(5,\)"),
        (lambda: first_targets([1] * 8, 4, 8), "target must be tensors of 8 rows.*got .1, 1, "),
        (lambda: DCIL(super_share=0.0, **SETTINGS), "super_share must be > 0 and <= 1, got 0"),
        (lambda: DCIL(super_share=1.5, **SETTINGS), "super_share must be > 0 and <= 1, got 1.5"),
        (lambda: DCIL(super_share=0.5, class_dim=0, **SETTINGS), "class_dim must be 1 or -1"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(call, words):
    with pytest.raises(UserError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_sum_over_the_batch_is_refused():
    net, (x, y) = built(0.5), batch((2, 8, 8), 12)
    with pytest.raises(UserError, match=r"super_share must be 1, got 0.5 .where the task sums"):
        net.loss(net(x), y, task=nn.CrossEntropyLoss(reduction="sum"))


def test_evaluation_and_a_path_alone_see_every_sample():
    net, (x, _) = built(0.25), batch((2, 8, 8), 12)
    assert len(net.path("super", x)) == 12
    net.eval()
    assert len(net(x)) == 12


def test_a_subclass_with_another_share_is_not_recorded_unless_it_says_so():
    class Half(DCIL):
        def share(self, path):
            return 0.5 if path == "super" else 1.0

    assert Half(**SETTINGS).loss_key(0) is None and Half(**SETTINGS).shards()
    assert DCIL(super_share=0.5, **SETTINGS).loss_key(0) is not None
    assert DPF(sparsity=0.5, steps=4).share("pruned") == 1


def test_a_single_image_makes_no_smaller_batch():
    net = built(0.125, "no-norm")
    x, y = batch(NETWORKS["no-norm"][1], 1)
    assert {path: len(output) for path, output in net(x).items()} == {"pruned": 1, "super": 1}
    net.loss(net(x), y).backward()


class Given:
    device = torch.device("cpu")

    def __init__(self, data) -> None:
        self.data = data

    def train(self, epoch, start=0):
        return iter(self.data[start:])


@pytest.mark.parametrize("low_memory", [False, True])
def test_training_loops_agree(low_memory):
    """By hand, the eager engine and make_step, mask updates included."""
    torch.manual_seed(3)
    data = [batch((2, 8, 8), size) for size in (12, 12, 12, 7, 12, 5)]
    nets = [built(0.5) for _ in range(3)]
    sgd = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in nets]
    for x, y in data:
        sgd[0].zero_grad()
        nets[0].loss(nets[0](x), y).backward()
        sgd[0].step()
        nets[0].step(sgd[0])
    engine = EagerEngine(nets[1], sgd[1], Given(data), EngineSettings(low_memory=low_memory))
    for _ in engine.epoch(0, lambda i: 0.05):
        pass
    step = make_step(nets[2], sgd[2], low_memory=low_memory)
    for x, y in data:
        step(x, y)
    for (name, a), b, c in zip(nets[0].state_dict().items(), *(n.state_dict().values() for n in nets[1:]), strict=True):
        torch.testing.assert_close(b, a, msg=name)
        torch.testing.assert_close(c, a, msg=name)
