"""Both KL terms at once equal the two of the definition: values, gradients, dtypes, ignored positions, parts."""

from __future__ import annotations

import pytest
import torch

from dcil import mutual_kl as module
from dcil.distillation import distill, distill_both_ways, distill_mutually
from dcil.mutual_kl import mutual_kl


def pair(*shape, dtype=torch.double):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.double).mul(3).to(dtype).requires_grad_() for _ in range(2)
    ]


def both(p, s, *args):
    return distill(p, s, *args) + distill(s, p, *args)


@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
@pytest.mark.parametrize(
    ("shape", "dim", "counted"),
    [
        ((6, 10), 1, None),
        ((6, 10), 1, (6,)),
        ((6, 5, 4), 1, (6, 4)),
        ((6, 4, 5), -1, (6,)),
        ((6, 4, 5), 2, None),
        ((2, 5, 4, 3), 1, (2, 4, 3)),
        ((10, 6), 0, (6,)),
    ],
)
@pytest.mark.parametrize("chunk", [2**24, 1, 25])
def test_equal_to_the_definition(shape, dim, counted, reduction, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    p, s = pair(*shape)
    if counted is not None:
        counted = torch.rand(counted, generator=torch.Generator().manual_seed(1)) < 0.6
    args = (2.0, dim, counted, reduction)
    got, want = distill_mutually(p, s, *args), both(p, s, *args)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(0.3 * got, [p, s]), torch.autograd.grad(0.3 * want, [p, s]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("counted", [None, torch.tensor([True, False, True, True, False, True])])
def test_differentiated_twice(counted):
    p, s = pair(6, 5)
    found = []
    for loss in (distill_mutually(p, s, 2.0, 1, counted, "mean"), both(p, s, 2.0, 1, counted, "mean")):
        once = torch.autograd.grad(loss, [p, s], create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in once), [p, s]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_an_ignored_position_may_hold_anything():
    p, s = pair(3, 5)
    with torch.no_grad():
        p[1, 2], s[1] = torch.inf, torch.nan
    loss = distill_mutually(p, s, 2.0, 1, torch.tensor([True, False, True]), "mean")
    torch.testing.assert_close(loss, both(p[::2], s[::2], 2.0, 1, None, "mean"))
    dp, ds = torch.autograd.grad(loss, [p, s])
    assert not dp[1].any() and not ds[1].any() and dp[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_half_precision(dtype):
    p, s = pair(64, 10, dtype=dtype)
    exact = [logits.detach().double().requires_grad_() for logits in (p, s)]
    got, want = distill_mutually(p, s, 2.0, 1, None, "mean"), both(*exact, 2.0, 1, None, "mean")
    assert got.dtype == torch.float and got.item() == pytest.approx(want.item(), rel=1e-5)
    for a, b in zip(torch.autograd.grad(got, [p, s]), torch.autograd.grad(want, exact), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2 * torch.finfo(dtype).eps * b.abs().max().item())


def test_never_negative_and_zero_only_for_equal_logits():
    p, s = pair(200, 10)
    assert mutual_kl(p, p.detach() + 5, 2.0).item() == pytest.approx(0, abs=1e-12)
    assert mutual_kl(p, s, 2.0) > 0
    half = [(p + scale * s).float() for scale in (0, 1e-6)]
    assert mutual_kl(*half, 2.0) >= 0


def test_logits_of_two_dtypes_or_shapes_take_the_definition():
    p, s = pair(6, 10)
    loss = distill_both_ways(p.float(), s)
    torch.testing.assert_close(loss.double(), both(p, s, 2.0, 1, None, "mean"), rtol=1e-5, atol=1e-5)
