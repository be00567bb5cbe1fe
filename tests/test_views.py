"""Each view's value and the gradient that autograd makes of it."""

from __future__ import annotations

import pytest
import torch

from dcil import views


@pytest.mark.parametrize(
    ("view", "masked", "reaches"),
    [
        (views.kept, True, lambda m: m),
        (views.revived, False, lambda m: ~m),
        (views.straight_through, True, torch.ones_like),
        (views.whole, False, torch.ones_like),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.double, torch.bfloat16])
def test_value_and_gradient(view, masked, reaches, dtype):
    w = torch.randn(7, 5).to(dtype).requires_grad_()
    m = torch.rand(7, 5) < 0.4
    g = torch.randn(7, 5).to(dtype)
    seen = view(w, m)
    (seen * g).sum().backward()
    assert torch.equal(seen.detach(), w.detach() * m if masked else w.detach())
    assert seen.dtype == dtype
    assert torch.equal(w.grad, g * reaches(m))


def test_straight_through_is_exact_for_extreme_values():
    w = torch.tensor([1e30, -1e-38, 3.0, -0.1, 65504.0], requires_grad=True)
    m = torch.tensor([True, False, False, True, False])
    assert torch.equal(views.straight_through(w, m).detach(), torch.where(m, w.detach(), 0.0))


def test_the_two_paths_of_dcil_split_the_gradient():
    """M * g + (1 - M) * h lands in one gradient, without a trace of the other path."""
    w = torch.randn(50, requires_grad=True)
    m = torch.rand(50) < 0.5
    g, h = torch.randn(50), torch.randn(50)
    ((views.kept(w, m) * g).sum() + (views.revived(w, m) * h).sum()).backward()
    assert torch.equal(w.grad, torch.where(m, g, h))
