"""Activations, two operands, norms and moves of channels against torch, in every layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_runtime import SETS, check, pruned, quick
from torch import Tensor, nn

from dcil import UserError
from dcil.runtime.lower import lower
from dcil_runtime import Network
from dcil_runtime.format import HEADER, encode
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
SHAPES = [(3, 6, 13, 9), (20, 6, 5, 5), (2, 6, 1, 1)]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sqrt": lambda x: torch.sqrt(x.clamp(min=0)),
}


class Call(nn.Module):
    """A function as a module, between two convolutions or alone."""

    def __init__(self, function: Callable[..., Tensor], channels: int = 0) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(channels, channels, 3, padding=1) if channels else nn.Identity()
        after = function(torch.zeros(1, channels, 3, 3)).shape[1] if channels else 0
        self.last = nn.Conv2d(after, channels, 3, padding=1) if channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def check_everywhere(function: Callable[..., Tensor], seed: int = 0) -> None:
    """On images and vectors, fused and alone, by every kernel set, alone and by two threads."""
    torch.manual_seed(seed)
    for shape in SHAPES:
        for channels in (0, shape[1]):
            model = pruned(Call(function, channels), 0.7)
            for n, isa in enumerate(SETS):
                check(model, torch.randn(shape), 1 + n % 2, isa)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    check_everywhere(ACTIVATIONS[name])


@torch.no_grad()
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_large_and_tiny_numbers(name, isa):
    sizes = torch.logspace(-12, 4, 64)
    x = torch.cat([sizes, -sizes])[None, None, None]
    got = quick(lower(Call(ACTIVATIONS[name]), x), 1, isa)(x.numpy())
    want = ACTIVATIONS[name](x.double()).numpy()
    assert (np.abs(got - want) <= 4e-7 * np.maximum(np.abs(want), np.minimum(1, np.abs(x.numpy())))).all()


VECTOR = torch.linspace(-1, 2, 6).reshape(6, 1, 1)


def squeezed(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize(
    "function",
    [
        squeezed,
        lambda x: x.mean((2, 3), keepdim=True) + x,
        lambda x: x / torch.sigmoid(x),
        lambda x: x * x,
        lambda x: torch.sigmoid(x) * torch.tanh(x),
        lambda x: x * 2 - VECTOR,
        lambda x: 1.5 - x / 4,
        lambda x: (x + 1) * VECTOR,
        lambda x: torch.addcmul(VECTOR, VECTOR, x),
        lambda x: x - torch.tanh(x),
        lambda x: torch.relu(x * torch.sigmoid(x[:, :1])),
        lambda x: x / torch.sigmoid(x[:, 2:3].mean((2, 3), keepdim=True)),
        lambda x: x - x.mean((2, 3), keepdim=True),
    ],
)
def test_two_operands(function):
    check_everywhere(function)


def last(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


SCALE, SHIFT = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)


@pytest.mark.parametrize(
    "function",
    [
        last(lambda x: F.layer_norm(x, (6,), SCALE, SHIFT, 1e-6)),
        last(lambda x: F.gelu(F.layer_norm(x, (6,)) * SCALE) + x),
        lambda x: F.relu(F.group_norm(x + 3, 3, SCALE, SHIFT)),
        lambda x: F.group_norm(x, 1) + F.group_norm(x, 6, eps=0.1),
    ],
)
def test_norms(function):
    check_everywhere(function)


def test_permutations_around_a_norm_cost_nothing():
    model = Call(last(lambda x: F.layer_norm(x, (6,), SCALE, SHIFT)), 6)
    network = lower(model, torch.randn(2, 6, 8, 8))
    assert [op.kind for op in network.ops] == ["conv", "layernorm", "conv"]
    assert version(network) == 2 and version(lower(nn.ReLU(), torch.randn(2, 6, 8, 8))) == 1


def version(network: Network) -> int:
    found: int = HEADER.unpack_from(encode(network))[1]
    return found


def shuffled(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, 1:4],
    "every second": lambda x: x[:, ::2],
    "shuffle": shuffled,
    "shuffle of torch": lambda x: F.channel_shuffle(x, 3),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "parts": lambda x: torch.cat([x, x.split([1, 2, 3], 1)[2], x[:, :0], torch.relu(x)], 1),
    "shuffle of a concatenation": lambda x: shuffled(torch.cat([x[:, :3], torch.tanh(x[:, 3:])], 1)),
    "flips": lambda x: torch.cat([x.flip(1), x.roll(2, 1)], 1),
    "expanded": lambda x: x * x.mean((2, 3), keepdim=True).expand_as(x),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_channels(name):
    check_everywhere(lambda x: MOVES[name](x))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolutions_read_moved_channels_where_they_lie(groups):
    torch.manual_seed(3)
    conv = pruned(nn.Conv2d(6, 12, 3, padding=1, groups=groups))
    model = nn.Sequential(nn.Conv2d(3, 6, 1), Call(shuffled), conv)
    x = torch.randn(3, 3, 9, 9)
    assert [op.kind for op in lower(model, x).ops] == ["conv", "conv"]
    check(model, x)


def test_what_mixes_the_items_of_a_batch_is_refused():
    mixes = Call(lambda x: x.transpose(0, 1).reshape(x.shape) * 2)
    with pytest.raises(UserError, match="mixes the items of a batch"):
        lower(mixes, torch.randn(2, 6, 5, 5))


def test_a_tensor_is_spread_along_one_side():
    check_everywhere(lambda x: x * x[..., :1])
