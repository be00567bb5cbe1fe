"""A value with another gradient, a gradient without a value; and what a net makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from dcil import DPF, SparseNet
from dcil.engine import EngineSettings, obstacle
from dcil.fsdp import check_method
from dcil.gradient_rules import add_gradient, carry


@pytest.mark.parametrize("dtype", [torch.float32, torch.double, torch.bfloat16, torch.half])
def test_carry_has_the_value_of_one_and_the_gradient_of_the_other(dtype):
    w = torch.tensor([3.0, -0.1, 6e3, 1e-7], dtype=dtype, requires_grad=True)
    seen = carry(w.sign() * (w.abs() - 0.05).clamp_min(0), 2 * w)
    assert torch.equal(seen.detach(), w.detach().sign() * (w.detach().abs() - 0.05).clamp_min(0))
    seen.sum().backward()
    assert torch.equal(w.grad, torch.full_like(w, 2))


def test_an_added_gradient_does_not_change_the_loss_and_is_scaled_as_it():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    loss = (w**2).sum()
    more = add_gradient(loss, w, torch.tensor([0.5, 0.25]))
    assert more.item() == loss.item()
    (more * 8).backward()  # as a GradScaler does
    assert torch.equal(w.grad, 8 * torch.tensor([2 * 1 + 0.5, 2 * -2 + 0.25]))


@dataclass(frozen=True, kw_only=True)
class Halved(DPF):
    """The pruned net has half of the weights; they are pulled by 1."""

    adds_gradient: ClassVar[bool] = True

    def product(self, layer, state):
        return 0.5 * layer.weight * layer.mask

    def view(self, path, layer, state):
        return carry(self.product(layer, state), layer.weight)

    def added_gradient(self, layer, state):
        return torch.ones_like(layer.weight)


@dataclass(frozen=True, kw_only=True)
class NotPulled(Halved):
    adds_gradient: ClassVar[bool] = False


def halved(kind: type[DPF] = Halved) -> SparseNet:
    torch.manual_seed(0)
    net = SparseNet(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), kind(sparsity=0.5, steps=1, every=1))
    net.step()
    return net


def test_training_evaluation_and_the_finalized_net_compute_with_the_product():
    net, x = halved(), torch.randn(5, 4)
    layer = net.layers[0]
    trained, evaluated = net(x)["pruned"], net.eval()(x)
    assert torch.equal(trained, evaluated)
    sparse = net.finalize()
    assert torch.equal(sparse(x), evaluated)
    written = sparse.get_parameter(layer.name)
    assert torch.equal(written, 0.5 * layer.weight * layer.mask)
    assert not written[~layer.mask].signbit().any()  # 0 and not -0
    assert torch.equal(net.layers[0].weight, layer.weight)  # the net trains on with its own


def test_the_added_gradient_reaches_the_prunable_weights_and_leaves_the_loss():
    net, plain, x, y = halved(), halved(NotPulled), torch.randn(5, 4), torch.randint(2, (5,))
    losses = [n.loss(n(x), y) for n in (net, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    for (name, p), q in zip(net.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad + 1 if name == "0.weight" else q.grad)


def test_a_product_of_ones_own_is_neither_recorded_nor_sharded_unless_declared():
    net = halved()
    assert "loss_key" in (obstacle(net, EngineSettings("graph")) or "")
    with pytest.raises(Exception, match="must see whole weights"):
        check_method(net.method)
