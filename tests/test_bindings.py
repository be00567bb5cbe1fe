"""Bindings notice what is exchanged, give every tensor back, and keep nothing alive."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from dcil import DCIL, SparseNet


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    return SparseNet(model, DCIL(sparsity=0.5, steps=10))


def test_they_are_looked_up_once_and_again_after_an_exchange():
    net, x = make(), torch.randn(3, 5)
    net(x)
    before = net.bindings
    net(x)
    assert net.bindings is before
    net.model[0].weight = nn.Parameter(torch.zeros(8, 5))
    assert net.bindings is not before
    assert net.layers[0].weight is net.model[0].weight
    assert torch.equal(net.path("pruned", x), net.path("pruned", 2 * x + 1))  # of zeros: the batch does not matter


def test_masks_that_were_moved_are_found():
    net = make()
    assert net.layers[0].mask is net.masks["0.weight"]
    net.double()
    assert net.layers[0].mask is net.masks["0.weight"] and net.layers[0].weight.dtype == torch.double
    net._masks.get_submodule("0")._buffers["weight"] = torch.zeros(8, 5, dtype=torch.bool)
    assert not net.layers[0].mask.any()


def test_the_modules_have_their_own_tensors_back_after_an_error():
    net = make()
    own = {name: id(t) for name, t in (*net.model.named_parameters(), *net.model.named_buffers())}
    with pytest.raises(RuntimeError):
        net(torch.randn(3, 6))
    assert own == {name: id(t) for name, t in (*net.model.named_parameters(), *net.model.named_buffers())}
    net(torch.randn(3, 5))


def test_a_copy_has_its_own():
    net, x = make(), torch.randn(3, 5)
    net(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.model[0].weight.zero_()
    assert not torch.equal(net.eval()(x), twin.eval()(x))
    assert twin.layers[0].weight is twin.model[0].weight


def test_nothing_is_kept_alive():
    net = make()
    net(torch.randn(3, 5))
    weight = weakref.ref(net.model[0].weight)
    gc.disable()
    try:
        del net
        assert weight() is None  # without the garbage collector, which would come too late for a GPU's memory
    finally:
        gc.enable()
