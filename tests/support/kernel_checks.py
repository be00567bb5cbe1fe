"""The GPU engine's Triton kernels against plain torch, one by one: ``python kernels.py NAME DEVICE``.

Run by test_kernels.py in a process of its own, because kernels are interpreted or not from their import on.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcil import DCIL
from dcil.batch_share import count_samples
from dcil.data import Dataset, Split
from dcil.engine import kernels
from dcil.engine.cuda import ops
from dcil.engine.cuda.batches import DeviceSource
from dcil.engine.cuda.sgd import SGD
from dcil.selection import kth_smallest_key
from dcil.task import Objective


def last(*shape: int) -> Tensor:
    """Numbers that bfloat16 has: then the GPU's short products are exact."""
    return torch.randn(*shape).bfloat16().float().to(memory_format=torch.channels_last)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    assert a.shape == b.shape
    off = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
    assert off <= tolerance, off


def conv() -> None:
    """On a GPU in bfloat16, the only precision that the engine uses these kernels in."""
    kind, off = (torch.bfloat16, 1e-2) if torch.get_default_device().type == "cuda" else (torch.float32, 1e-5)
    for n, height, width, channels, out in ((3, 5, 8, 16, 32), (2, 7, 6, 32, 16), (1, 9, 9, 64, 64), (2, 3, 2, 16, 16)):
        x, weight, dy = last(n, channels, height, width), last(out, channels, 3, 3), last(n, out, height, width)
        short_x, short_weight, short_dy = (t.to(kind) for t in (x, weight, dy))
        close(kernels.conv.forward(short_x, short_weight), F.conv2d(x, weight, padding=1), off)
        want = torch.nn.grad.conv2d_input(x.shape, weight, dy, padding=1)
        close(kernels.conv.input_gradient(short_dy, short_weight), want, off)
        found = torch.full_like(short_weight, torch.nan)
        kernels.conv.weight_gradient(short_x, short_dy, found)
        close(found, torch.nn.grad.conv2d_weight(x, weight.shape, dy, padding=1), off)
    for groups in (2, 3):
        x, dy = last(2, 16 * groups, 5, 4), last(2, 32 * groups, 5, 4)
        weight, blocks = last(32 * groups, 16 * groups, 3, 3).to(kind), last(32 * groups, 16, 3, 3)
        for g, block in enumerate(blocks.chunk(groups)):  # what is off the diagonal is not read
            weight[32 * g : 32 * g + 32, 16 * g : 16 * g + 16] = block
        how = {"padding": 1, "groups": groups}
        close(kernels.conv.forward(x.to(kind), weight, groups), F.conv2d(x, blocks, **how), off)
        want = torch.nn.grad.conv2d_input(x.shape, blocks, dy, **how)
        close(kernels.conv.input_gradient(dy.to(kind), weight, groups), want, off)
        want = torch.nn.grad.conv2d_weight(x, blocks.shape, dy, **how)
        kernels.conv.weight_gradient(x.to(kind), dy.to(kind), weight, groups)
        for g, block in enumerate(want.chunk(groups)):
            close(weight[32 * g : 32 * g + 32, 16 * g : 16 * g + 16], block, off)


def pool() -> None:
    for shape, how in (((2, 5, 7, 8), (3, 2, 1)), ((1, 70, 6, 6), (2, 2, 0)), ((2, 3, 9, 5), (3, 1, 1))):
        x = last(*shape).round(decimals=0).requires_grad_()  # many ties: the first one wins
        want = F.max_pool2d(x, *how)
        dy = last(*want.shape)
        (want_dx,) = torch.autograd.grad(want, x, dy)
        got, winner = kernels.pool.forward(x.detach(), *how)
        assert torch.equal(got, want)
        close(kernels.pool.backward(dy, winner, (shape[2], shape[3]), *how), want_dx)
    broken = last(1, 4, 4, 4)
    broken[0, 1, 2, 3] = torch.nan
    assert torch.equal(kernels.pool.forward(broken, 3, 2, 1)[0].isnan(), F.max_pool2d(broken, 3, 2, 1).isnan())


def norm() -> None:
    norms(((2, 16, 9), (3, 40, 5)))
    kernels.division.LARGE = 0  # as if they were large
    norms(((2, 16, 9), (3, 40, 5)))
    parts = torch.randn(300, 2, 40)
    want = parts.sum(0)
    assert kernels.norm.sum_parts(parts, kernels.division.Plan(10**6, 40)) == 1
    close(parts[0], want)
    any_layout()


def any_layout() -> None:
    """What is added may lie otherwise in memory than what it is added to."""
    like, device = nn.BatchNorm2d(16), torch.get_default_device()
    at = {name: torch.rand(16) + 0.5 for name in ("weight", "bias", "dweight", "dbias", "running_mean", "running_var")}
    layer, x = ops.Norm(like, at, relu=True), last(2, 16, 6, 6)
    ops.plain_evaluate, ops.plain_forward = kernels.norm.evaluate, kernels.norm.forward  # on the CPU too
    for other in (last(2, 32, 6, 6).chunk(2, 1)[1], last(2, 16, 6, 6).contiguous()):
        for layer.training in (False, True):
            assert torch.equal(layer(x, other), layer(x, other.to(memory_format=torch.channels_last, device=device)))


def norms(shapes: Iterable[tuple[int, int, int]]) -> None:
    for (n, channels, size), residual, relu, two in itertools.product(
        shapes, (False, True), (False, True), (False, True)
    ):
        if residual and not relu:
            continue  # a sum is only taken over together with the ReLU behind it
        x, weight, bias = last(n, channels, size, size) + 0.5, torch.rand(channels) + 0.5, torch.randn(channels)
        other = last(n, channels, size, size) if residual else None
        ours, theirs = ((torch.zeros(channels), torch.ones(channels)) for _ in range(2))
        got = kernels.norm.forward(x, other, weight, bias, 1e-5, relu, ours, 0.1)
        want = ops.plain_forward(x, other, weight, bias, 1e-5, relu, theirs, 0.1)
        for a, b in zip((*got, *ours), (*want, *theirs), strict=True):
            close(a, b, 3e-5)
        found = kernels.norm.evaluate(x, other, weight, bias, 1e-5, relu, ours)
        close(found, ops.plain_evaluate(x, other, weight, bias, 1e-5, relu, ours))
        y, mean, scale = want
        grads = [last(n, channels, size, size) for _ in range(1 + two)]
        sums, others = torch.empty(2, channels), torch.empty(2, channels)
        dx, dres = kernels.norm.backward(x, y, grads, residual, weight, bias, mean, scale, relu, *sums)
        dx2, dres2 = ops.plain_backward(x, y, grads, residual, weight, bias, mean, scale, relu, *others)
        close(dx, dx2, 1e-4)
        close(sums, others, 1e-4)
        assert (dres is None) == (dres2 is None)
        if dres is not None and dres2 is not None:
            close(dres, dres2)


def weight_views() -> None:
    n = 3000
    w, m = torch.randn(n + 50), torch.rand(n) < 0.3
    gradients = torch.randn(2, 2 * n)
    places = [torch.randperm(2 * n)[:n] for _ in range(2)]
    for view, index in itertools.product(kernels.views.RULES, (None, places[0])):
        got, want = torch.zeros(2 * n), torch.zeros(2 * n)
        kernels.views.write_view(view, w, m, index, got)
        want[torch.arange(n) if index is None else index] = view(w[:n], m)
        assert torch.equal(got, want)
    for one, two, stacked in itertools.product(kernels.views.RULES, kernels.views.RULES, (False, True)):
        leaf = w[:n].clone().requires_grad_()
        back = [g[i] if stacked else g[:n] for g, i in zip(gradients, places, strict=True)]
        indices = places if stacked else [None, None]
        for pair in ([one, two], [one]):
            want = torch.autograd.grad([view(leaf, m) for view in pair], [leaf], back[: len(pair)])[0]
            got = torch.empty(n)
            kernels.views.weight_gradient(list(zip(pair, gradients, indices, strict=False)), m, got)
            assert torch.equal(got, want)


def selection() -> None:
    for keys in (
        torch.randn(3000).square().view(torch.int32),
        torch.randint(50, (1000,)).int(),  # many ties
        torch.randn(1000).view(torch.int32),  # read as unsigned: negative ones are the largest
    ):
        ordered = (keys.long() & 0xFFFFFFFF).sort().values
        for k in (1, 100, len(ordered)):
            number = torch.tensor(k)
            found = kernels.select.smallest_key(keys, number).tolist()
            assert found == [int(ordered[k - 1]), int((ordered[k:] == ordered[k - 1]).sum())]
            assert int(kth_smallest_key(keys, number)) == int(ordered[k - 1])
    windows, narrow = [], kernels.window.narrow

    def noted(*given) -> kernels.window.Window:
        windows.append(narrow(*given))
        return windows[-1]

    for keys in (torch.randn(1500).square().view(torch.int32), torch.randint(4, (1500,)).int()):
        for place, many in ((torch.randperm(1500).int(), 2**22), (torch.randperm(1500).int(), 1), (None, 1)):
            old = torch.rand(1500) < 0.5
            ranks = torch.arange(1500) if place is None else place
            order = sorted(range(1500), key=lambda i: (int(keys[i]), -int(ranks[i])))
            for pruned in (1500,) if place is None else (1, 700):
                new, masks = torch.ones(1500, dtype=torch.bool), old.clone()
                new[order[:pruned]] = False
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(kernels.select, "MANY", many)
                    patch.setattr(kernels.window, "STRIDE", 1)
                    patch.setattr(kernels.window, "narrow", noted)
                    changes = kernels.select.keep_largest(keys, place, torch.tensor(pruned), masks)
                assert torch.equal(masks, new)
                assert changes.tolist() == [int((new & ~old).sum()), int((old & ~new).sum())]
    inside = [int(window.k_inside) > 0 for window in windows]
    assert len(windows) == 6 and any(inside) and not all(inside)  # many ties overflow the window


def loss() -> None:
    cases = ((128, 10, 1.0, 2.0), (33, 100, 0.5, 3.0), (5, 1000, 0.0, 2.0))
    for (n, classes, weight, temperature), share in itertools.product(cases, (1.0, 0.3)):
        method = DCIL(sparsity=0.5, steps=100, kl=weight, temperature=temperature, warmup=0.0, super_share=share)
        rows = (n, count_samples(n, share))
        p, s = ((3 * torch.randn(number, classes)).requires_grad_() for number in rows)
        y = torch.randint(classes, (n,))
        for ignored, target in ((None, y), (-100, torch.where(torch.arange(n) % 3 > 0, y, -100))):
            task = Objective(F.cross_entropy)
            want = method.loss({"pruned": p, "super": s}, target, task, 50)
            got, terms = kernels.loss.dcil_loss(p, s, target, weight, temperature, ignored)
            close(got.detach(), want.detach())
            for term, name in zip(terms.sum(1), ("loss/pruned", "loss/super", "loss/kl"), strict=True):
                close(term, torch.as_tensor(task.parts.get(name, 0.0)))
            for a, b in zip(torch.autograd.grad(2 * got, [p, s]), torch.autograd.grad(2 * want, [p, s]), strict=True):
                close(a, b)
    p, s = torch.randn(2, 4, 10)
    p[0, 0] = torch.nan
    assert kernels.loss.dcil_loss(p, s, torch.zeros(4, dtype=torch.long), 1.0, 2.0)[0].isnan()
    none = kernels.loss.dcil_loss(p, s, torch.full((4,), -100), 1.0, 2.0, -100)[0]
    assert none == 0  # torch says NaN; nothing is learned either way


def batch() -> None:
    def split(n: int) -> Split:
        return Split(torch.randint(256, (n, 3, 8, 6), dtype=torch.uint8), torch.randint(5, (n,)))

    device = torch.get_default_device()
    with torch.device("cpu"):  # where images come from, and the random choices are made
        for pad, flip in ((2, True), (0, False)):
            data = Dataset("random", split(33), split(5), 5, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), pad, flip)
            loader = data.loader(10, device, 0)
            plain, kernel = DeviceSource(loader, kernel=False), DeviceSource(loader, kernel=True)
            for size, _ in zip(plain.train(1), kernel.train(1), strict=True):
                (x, y), (other_x, other_y) = plain.batch(size), kernel.batch(size)
                assert torch.equal(y, other_y) and x.stride() == other_x.stride()
                close(other_x, x, 1e-6)


def update() -> None:
    for momentum, nesterov, bad in itertools.product((0.0, 0.9), (False, True), (0, 7)):
        w, g, v = torch.randn(3, 3000)
        want_w, want_v = w.clone(), v.clone()
        SGD(momentum, 1e-2, nesterov).step(want_w, g, want_v, torch.tensor(-0.1), torch.tensor(bad))
        speed = v if momentum else None
        kernels.sgd.step(w, g, speed, torch.tensor(-0.1), torch.tensor(bad), 1e-2, momentum, nesterov)
        close(w, want_w)
        if not bad:  # the plain formula moves the momentum of a step that is not taken; nobody reads it then
            close(v, want_v)


CHECKS = {check.__name__: check for check in (conv, norm, pool, weight_views, selection, loss, batch, update)}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_device(sys.argv[2])
    CHECKS[sys.argv[1]]()
