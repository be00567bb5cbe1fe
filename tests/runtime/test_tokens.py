"""Tokens against torch: attention, embeddings, several inputs and outputs; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_runtime import SETS, TOLERANCE, difference, pruned, quick
from torch import Tensor, nn

from dcil import UserError, models
from dcil.runtime.lower import lower
from dcil_runtime import Network, Plan, PlanError
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")


@torch.no_grad()
def check_all(module: nn.Module, *inputs: Tensor, batches: tuple[int, ...] = (1, 3), sets: int = 4) -> Network:
    """By every kernel set, alone and by two threads, in several arrangements of lanes."""
    network = lower(module, inputs if len(inputs) > 1 else inputs[0])
    for n, isa in enumerate(SETS[-sets:]):
        plan = quick(network, 1 + n % 2, isa, tune_seconds=0.01)
        for batch in batches:
            some = [x[:batch] for x in inputs]
            found, want = plan(*(x.numpy() for x in some)), module(*some)
            several = isinstance(want, tuple)
            for got, y in zip(found if several else [found], want if several else [want], strict=True):
                assert difference(got, y) < TOLERANCE
    return network


class Attention(nn.Module):
    """Self-attention of tokens [n, t, 12]; ``how`` is its kind."""

    def __init__(self, how: str = "plain", heads: int = 3) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.register_buffer("positions", torch.randn(heads, 9, 9))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "by hand":
            scores = (q * 0.7) @ k.transpose(-2, -1) / 3 + self.positions
            y = scores.softmax(-1) @ v
        elif self.how == "one key for all":  # multi-query
            y = F.scaled_dot_product_attention(q, k[:, :1].expand(-1, self.heads, -1, -1), v[:, :1].expand_as(q))
        elif keep is not None:
            added = (1 - keep[:, None, None].float()) * torch.finfo(torch.float32).min
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.how == "causal")
        return self.proj(y.transpose(1, 2).reshape(n, t, c))


class Tokens(nn.Module):
    """Patches, a class token, positions, a block, a head."""

    def __init__(self, how: str = "plain", token: bool = True) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, 12)) if token else None
        self.place = nn.Parameter(torch.randn(1, 8 + token, 12))
        self.attention = Attention(how)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        if self.first is not None:
            y = torch.cat([self.first.expand(len(y), -1, -1), y], 1)
        y = y + self.place
        y = y + self.attention(self.norm(y))
        y = y + self.mlp(y)
        return self.head(y[:, 0] if self.first is not None else y.mean(1))


@pytest.mark.parametrize("how", ["plain", "causal", "by hand", "one key for all"])
def test_attention(how):
    torch.manual_seed(0)
    network = check_all(pruned(Tokens(how)), torch.randn(17, 3, 8, 16), batches=(1, 5) if how == "plain" else (3,))
    kinds = [op.kind for op in network.ops]
    assert kinds.count("attention") == 1 and "softmax" not in str(kinds)


def test_tokens_need_no_copy_between_their_layers():
    kinds = [op.kind for op in lower(pruned(Tokens(token=False)), torch.randn(2, 3, 8, 16)).ops]
    assert not {"take", "select", "flatten"} & set(kinds)
    assert kinds.count("conv") == 5 and kinds.count("map") == 0


class Reader(nn.Module):
    """Two inputs, of numbers and of what is padding, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 12), nn.Embedding(9, 12)
        self.attention, self.norm, self.head = Attention(), nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, words: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.words(words) + self.places(torch.arange(9)))
        x = x + self.attention(x, keep)
        return x, torch.tanh(self.head(x[:, 0]))


def read_inputs(n: int = 3) -> tuple[Tensor, Tensor]:
    keep = torch.ones(n, 9, dtype=torch.int64)
    keep[:, 6:] = torch.randint(2, (n, 3))
    return torch.randint(11, (n, 9)), keep


def test_several_inputs_and_outputs():
    torch.manual_seed(1)
    check_all(pruned(Reader()), *read_inputs())


def test_wrong_inputs_are_explained():
    plan = Plan(lower(pruned(Reader()), read_inputs()), tune_seconds=0)
    words, keep = (x.numpy() for x in read_inputs())
    assert plan.inputs == [((9,), "int64"), ((9,), "int64")] and plan.output_shapes == [(9, 12), (3,)]
    for given, why in [
        ((words,), "takes 2 inputs, got 1"),
        ((words, keep[:2]), "the same number of items, got 3, 2"),
        ((words.astype(np.float32), keep), "whole numbers here, got float32"),
        ((words[:, :8], keep), r"takes \(n, 9,\)"),
    ]:
        with pytest.raises(ValueError, match=why):
            plan(*given)
    for number in (11, -1, 1 << 40):
        wrong = words.copy()
        wrong[2, 8] = number
        with pytest.raises(PlanError, match=f"input 0 must hold numbers from 0 to 10, got {number}"):
            plan(wrong, keep)


def test_a_language_model():
    torch.manual_seed(2)
    check_all(pruned(models.gpt.GPT(1, 64, 19)), torch.randint(19, (2, 13)), batches=(2,), sets=1)


class Windows(nn.Module):
    """Shifted windows of 4 x 4 with positions, as in Swin, and patches merged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 1), nn.LayerNorm(12)
        self.qkv, self.proj, self.merge = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(48, 6)
        self.register_buffer("positions", torch.randn(3, 16, 16))
        self.register_buffer("apart", torch.where(torch.rand(6, 1, 16, 16) < 0.2, -100.0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = self.norm(x).roll((-2, -2), (1, 2)).reshape(n, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, 3, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * 0.5 + self.positions
        scores = (scores.reshape(n, 6, 3, 16, 16) + self.apart).reshape(-1, 3, 16, 16)
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.reshape(n, h // 4, w // 4, 4, 4, c).transpose(2, 3).reshape(n, h, w, c).roll((2, 2), (1, 2))
        x = x + y
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.merge(x).permute(0, 3, 1, 2)


def test_shifted_windows():
    torch.manual_seed(3)
    network = check_all(pruned(Windows()), torch.randn(3, 3, 8, 12))
    assert [op.kind for op in network.ops].count("take") == 1  # the merged patches; windows cost nothing


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.across, self.head = nn.Conv2d(3, 10, 4, stride=4), nn.Linear(8, 8), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).mT
        y = y + F.gelu(self.across(y.mT)).mT
        return self.head(y).mean(1)


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x))


def test_layers_over_tokens_and_over_channels():
    torch.manual_seed(4)
    check_all(pruned(Mixer()), torch.randn(3, 3, 8, 16))


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=(2, 3)),
    "bilinear": lambda x: F.interpolate(x, size=(17, 5), mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, size=(9, 20), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, size=(9, 20), mode="bicubic"),
    "pools that do not divide": lambda x: F.adaptive_avg_pool2d(x, (3, 7)),
    "pools that enlarge": lambda x: F.adaptive_avg_pool2d(x, (11, 13)),
    "several outputs": lambda x: (x.mean((2, 3)), F.relu(x), x.flatten(1)[:, :50]),
    "the first output twice": lambda x: (x, x),
    "rank 5": lambda x: x.reshape(len(x), 2, 2, *x.shape[2:]).mT,
    "one number": lambda x: x.mean((2, 3))[:, 0],
    "a constant for each pixel": lambda x: x * torch.linspace(-1, 1, x.shape[2] * x.shape[3]).reshape(x.shape[2:]),
    "a constant for each number": lambda x: x + torch.linspace(-1, 1, x[0].numel()).reshape(x.shape[1:]),
    "rows joined": lambda x: torch.cat([x, x.flip(2), torch.ones(len(x), 4, 2, x.shape[3])], 2),
    "zeros around": lambda x: F.pad(x, (1, 0, 2, 1)) * 2,
    "any permutation": lambda x: x.permute(0, 3, 1, 2).roll(1, 3).reshape(len(x), 8, -1),
    "powers": lambda x: x**2 + x**3,
    "the mean of each channel, last": lambda x: x.permute(0, 2, 3, 1).mean((1, 2)),
    "one row as channels": lambda x: x[:, :, 3].mT @ torch.eye(4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    torch.manual_seed(5)
    check_all(pruned(Called(FUNCTIONS[name])), torch.randn(3, 3, 8, 10))


class Two(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.function = nn.Embedding(5, 4), function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.table(x), y)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y: F.scaled_dot_product_attention(x, y, y), "not channels of tokens"),
        (lambda x, y: x @ y.mT, "a product of two tensors that depend on the input, outside attention"),
        (lambda x, y: (x @ x.mT * y[:, :, :1]).softmax(-1) @ x, "no CPU kernel for _softmax"),
        (lambda x, y: F.scaled_dot_product_attention(x, x, x, attn_mask=x @ torch.ones(4, 6)), "one number per key"),
        (lambda x, y: x.softmax(1), "no CPU kernel for _softmax"),
        (lambda x, y: torch.exp(x), "no CPU kernel for exp"),
    ],
)
def test_what_attention_cannot_be_is_refused_in_one_line(function, why):
    with pytest.raises(UserError, match=why) as found:
        lower(Two(function), (torch.zeros(2, 6, dtype=torch.int64), torch.randn(2, 6, 4)))
    assert "\n" not in str(found.value)


def test_wrong_examples_are_refused():
    for x in (
        torch.zeros(2, 3, 4, dtype=torch.int64),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 1, 1, 1, 1),
    ):
        with pytest.raises(UserError, match="an example input must be float32"):
            lower(nn.Identity(), x)
    with pytest.raises(UserError, match="numbers that are computed"):
        lower(nn.Sequential(Plus(), nn.Embedding(5, 4)), torch.zeros(2, 6, dtype=torch.int64))


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Alone(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


SIZES_OF_THE_BATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice": lambda x: x[:, : len(x)],
    "a shift": lambda x: x.roll(len(x), 1),
    "a factor": lambda x: x * (torch.ones(len(x), 1) * len(x)),
    "a sum": lambda x: x * torch.ones(len(x)).sum(),
    "a number": lambda x: x + torch.full((len(x), 1), float(len(x))),
    "a copy": lambda x: x[:, None].expand(-1, len(x), -1).flatten(1),
    "a size": lambda x: F.interpolate(x[:, :, None, None], size=(len(x), 3)),
}


@pytest.mark.parametrize("name", SIZES_OF_THE_BATCH)
def test_what_depends_on_the_size_of_the_batch_is_refused(name):
    with pytest.raises(UserError) as found:
        lower(Alone(SIZES_OF_THE_BATCH[name]), torch.randn(2, 8))
    assert "\n" not in str(found.value)
