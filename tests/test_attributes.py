"""Each path goes on from what its own forward pass left; forward passes leave the weights alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dcil
from dcil import DCIL, GMP, SparseNet, UserError
from dcil.engine.executor import EagerExecutor, Inputs, one_at_a_time

KINDS = ["tensor", "tuple", "list", "dict", "in place", "counter"]


class Recurrent(nn.Module):
    """Adds what the last call left to its features, kept in a plain attribute of some kind."""

    def __init__(self, kind="tensor"):
        super().__init__()
        self.kind, self.h = kind, None
        self.inner = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.norm(self.inner(x))
        return self.head(y + self.left(y.detach().mean(0)))

    def left(self, new):
        """What the call before left; and leave ``new``."""
        h = self.h
        if self.kind == "counter":
            self.h = (h or 0) + 1
            return float(h or 0)
        if self.kind == "dict":
            self.h = {} if h is None else h
            found, self.h["state"] = self.h.get("state", 0.0), new
        elif self.kind == "list":
            self.h = [] if h is None else h
            found = self.h[-1] if self.h else 0.0
            self.h.append(new)
        elif self.kind == "in place":
            self.h = torch.zeros(8) if h is None else h
            found = self.h.clone()
            self.h.copy_(new)
        else:
            found = 0.0 if h is None else h[0] if self.kind == "tuple" else h
            self.h = (new,) if self.kind == "tuple" else new
        return found


class Prepared(nn.Module):
    """Does something once, at its first call, and remembers that in an attribute which was not there before."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        if not hasattr(self, "table"):
            self.table = torch.arange(6.0)
            self.inner.register_forward_hook(lambda module, args, output: 2 * output)
        return self.head(self.norm(self.inner(x + self.table)))


@pytest.mark.parametrize("low_memory", [False, True])
def test_what_is_done_once_is_not_done_for_each_path(low_memory):
    net = SparseNet(Prepared(), method())
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    if low_memory:
        one_at_a_time(EagerExecutor(net), net.method.paths, net.loss, Inputs((x,)), y)
    else:
        net.loss(net(x), y).backward()
    assert len(net.model.inner._forward_hooks) == 1


def method(**settings):
    return DCIL(**{"sparsity": 0.5, "steps": 8, "every": 1, "warmup": 0.0, **settings})


def tensors(net, path):
    own = dict(net.model.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in (own | net.tensors(path)).items()}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_paths_are_those_of_two_networks(kind, reset):
    net = SparseNet(Recurrent(kind), method())
    alone = {path: Recurrent(kind) for path in net.method.paths}
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        if reset and step % 2 == 0:  # as training loops do, of the one model that they have
            for module in (net.model, *alone.values()):
                module.h = None
        x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
        want = {path: torch.func.functional_call(alone[path], tensors(net, path), (x,)) for path in alone}
        got = net(x)
        for path in want:
            torch.testing.assert_close(got[path], want[path])
        opt.zero_grad()
        net.loss(got, y).backward()
        opt.step()
        net.step(opt)
        if step == 3:
            net.eval()
            net.train()


def test_what_is_left_on_the_model_is_the_pruned_paths():
    net = SparseNet(Recurrent(), method())
    x = torch.randn(5, 6)
    inner = net.tensors("pruned")["inner.weight"]
    with torch.no_grad():
        want = net.model.norm(nn.functional.linear(x, inner, net.model.inner.bias)).mean(0)
    net(x)
    torch.testing.assert_close(net.model.h, want)


def test_a_net_with_activations_left_on_it_is_averaged_and_wrapped_again():
    class Keeps(Recurrent):
        def forward(self, x):
            self.seen = [self.inner(x)]
            return self.head(self.norm(self.seen[0]))

    net = SparseNet(Keeps(), method())
    net(torch.randn(5, 6))
    average = dcil.EMA(net)
    average.update()
    assert average(torch.randn(2, 6)).shape == (2, 3)
    SparseNet(net.finalize(), method(), masks="zeros")


def test_a_copy_of_the_net_goes_on_by_itself():
    net = SparseNet(Recurrent(), method())
    net(torch.randn(5, 6))
    other, x = copy.deepcopy(net), torch.randn(5, 6)
    torch.testing.assert_close(other(x)["pruned"], net(x)["pruned"])


def test_a_state_in_a_shared_buffer_is_announced():
    class Buffered(Recurrent):
        def __init__(self):
            super().__init__()
            del self.h
            self.register_buffer("h", torch.zeros(8))

    net = SparseNet(Buffered(), method())
    with pytest.warns(UserWarning, match="forward changes the buffer h, .* name its module in private"):
        net(torch.randn(5, 6))


# -- weights ---------------------------------------------------------------------------------------------------------


def clamp_data(model):
    model.inner.weight.data.clamp_(-0.01, 0.01)


def clamp(model):
    with torch.no_grad():
        model.inner.weight.clamp_(-0.01, 0.01)


def assign_data(model):
    model.inner.weight.data = model.inner.weight.data / 2


def assign(model):
    model.inner.weight = nn.Parameter(model.inner.weight.detach() / 2)


def one_element(model):
    model.inner.weight.data[0, 0] += 1


def through_numpy(model):
    model.inner.weight.detach().numpy()[0] = 1


def shared_bias(model):
    model.inner.bias.data.mul_(0.5)


class Writes(Recurrent):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        self.write(self)
        return self.head(self.norm(self.inner(x)))


@pytest.mark.parametrize("write", [clamp_data, clamp, assign_data, assign, one_element, through_numpy, shared_bias])
def test_changes_of_weights_inside_forward_are_refused(write):
    net = SparseNet(Writes(write), method())
    with pytest.raises(UserError, match=r"forward must leave the weights as they are, got a change of inner\.\w+: "):
        net(torch.randn(5, 6))


def test_a_bias_that_one_path_changes_is_changed():
    net = SparseNet(Writes(shared_bias), GMP(sparsity=0.5, steps=8))
    before = net.model.inner.bias.detach().clone()
    net(torch.randn(5, 6))
    torch.testing.assert_close(net.model.inner.bias.detach(), before / 2)


def test_reading_weights_is_no_change():
    net = SparseNet(Writes(lambda model: model.inner.weight.data.abs().sum()), method())
    assert set(net(torch.randn(5, 6))) == {"pruned", "super"}
    with torch.inference_mode():
        net(torch.randn(5, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_one_path_at_a_time_goes_on_from_the_same(kind):
    states = []
    for low_memory in (False, True):
        torch.manual_seed(0)
        net = SparseNet(Recurrent(kind), method())
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
            opt.zero_grad()
            if low_memory:
                one_at_a_time(EagerExecutor(net), net.method.paths, net.loss, Inputs((x,)), y)
            else:
                net.loss(net(x), y).backward()
            opt.step()
            net.step(opt)
        states.append(net.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, msg=name)
