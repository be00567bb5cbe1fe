"""Batched views equal the definitions in views.py: values, gradients, gradients of gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from dcil import batched_views, views
from dcil.batched_views import batched, together
from dcil.weight import PrunableWeight

PATHS = [
    {"pruned": views.kept, "super": views.revived},
    {"pruned": views.straight_through},
    {"pruned": views.whole},
    {"pruned": views.kept, "super": views.whole, "third": views.straight_through},
    {"super": views.revived, "pruned": views.kept},
    {"pruned": lambda w, m: 2 * w * m},
]


def layers_of(*shapes, dtype=torch.double):
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    return [PrunableWeight(f"w{i}", w, torch.rand(w.shape) < 0.4) for i, w in enumerate(weights)]


def plain(paths, layers):
    return {path: {layer.name: view(layer.weight, layer.mask) for layer in layers} for path, view in paths.items()}


def gradients(seen, layers, skip=(), create_graph=False):
    """Of a loss that is not linear in the views, some of which it may not use."""
    terms = [
        (k + 1) * (value**3).sum()
        for k, (path, name) in enumerate(itertools.product(seen, (layer.name for layer in layers)))
        if (path, name) not in skip
        for value in [seen[path][name]]
    ]
    weights = [layer.weight for layer in layers]
    return torch.autograd.grad(sum(terms), weights, allow_unused=True, retain_graph=True, create_graph=create_graph)


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("size", [2**22, 30])
def test_values_and_gradients(paths, size, monkeypatch):
    monkeypatch.setattr(batched_views, "TOGETHER", size)
    layers = layers_of((4, 3, 3, 3), (5, 4), (7, 5))
    a, b = batched(paths, layers), plain(paths, layers)
    assert list(a) == list(b)
    for path, name in itertools.product(paths, ("w0", "w1", "w2")):
        assert torch.equal(a[path][name], b[path][name])
    for skip in ((), {(next(iter(paths)), "w1")}, {(path, "w2") for path in paths}):
        for got, want in zip(gradients(a, layers, skip), gradients(b, layers, skip), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("paths", PATHS[:3])
def test_differentiated_twice(paths):
    layers = layers_of((5, 4), (7, 5))
    found = []
    for seen in (batched(paths, layers), plain(paths, layers)):
        once = gradients(seen, layers, create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in once), [layer.weight for layer in layers]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_large_layers_stand_alone(monkeypatch):
    monkeypatch.setattr(batched_views, "TOGETHER", 100)
    layers = layers_of((3, 3), (50, 2), (60, 2), (4, 4), (5, 5))
    assert [[layer.name for layer in group] for group in together(layers)] == [["w0"], ["w1"], ["w2"], ["w3", "w4"]]


def test_frozen_weights_get_no_gradient():
    layers = layers_of((3, 3), (4, 4), (5, 5))
    layers[1].weight.requires_grad_(False)
    seen = batched(PATHS[0], layers)["pruned"]
    assert [value.requires_grad for value in (seen["w0"], seen["w1"], seen["w2"])] == [True, False, True]


def test_a_broken_weight_that_is_pruned_does_not_reach_the_pruned_net():
    (layer,) = layers_of((3, 3))
    layer.mask.fill_(True)[0, 0] = False
    layer.weight.data[0, 0] = torch.nan
    seen = batched(PATHS[0], [layer])
    assert seen["pruned"]["w0"].isfinite().all() and not seen["super"]["w0"].isfinite().all()


def test_transforms_see_the_definitions():
    layers = layers_of((3, 3))
    weight, mask = layers[0].weight, layers[0].mask

    def loss(w):
        layer = PrunableWeight("w", w, mask)
        return sum((seen["w"] ** 2).sum() for seen in batched(PATHS[0], [layer]).values())

    want = torch.where(mask, 2 * weight, 2 * weight)
    torch.testing.assert_close(torch.func.grad(loss)(weight.detach()), want.detach())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        tangent = forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, want.sum().detach())
