"""Small networks of many kinds that the tests train; none of them knows about pruning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dcil import models


class Shared(nn.Module):
    """One weight used by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Counting(nn.Module):
    """Extra buffers: a constant, and a count of forward passes that the forward itself writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((12,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.body(x * self.scale))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 6, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(x + self.position)).mean(1))


def conv_net(conv: Callable[..., nn.Module], norm: Callable[[int], nn.Module], pool: nn.Module) -> nn.Module:
    """Nested containers, biases, groups."""
    body = nn.Sequential(
        nn.Sequential(conv(2, 6, 3, padding=1), norm(6), nn.ReLU()),
        nn.Sequential(conv(6, 4, 3, padding=1, groups=2), nn.Sequential(norm(4), nn.ReLU())),
    )
    return nn.Sequential(body, pool, nn.Flatten(), nn.Linear(4, 4))


def frozen() -> nn.Module:
    net = conv_net(nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d(1))
    for parameter in net[0][0].parameters():
        parameter.requires_grad_(False)
    return net


#: name -> (network, shape of one input)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: conv_net(nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d(1)), (2, 8, 8)),
    "conv1d": (lambda: conv_net(nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d(1)), (2, 9)),
    "conv3d": (lambda: conv_net(nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d(1)), (2, 4, 5, 5)),
    "transposed1d": (lambda: conv_net(nn.ConvTranspose1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d(1)), (2, 7)),
    "transposed2d": (lambda: conv_net(nn.ConvTranspose2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d(1)), (2, 5, 5)),
    "transposed3d": (lambda: conv_net(nn.ConvTranspose3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d(1)), (2, 3, 4, 4)),
    "groupnorm": (lambda: conv_net(nn.Conv2d, lambda c: nn.GroupNorm(2, c), nn.AdaptiveAvgPool2d(1)), (2, 8, 8)),
    "no-norm": (lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4)), (5,)),
    "residual": (lambda: models.build("resnet8-digits", 4, 2), (2, 8, 8)),
    "wide": (lambda: models.build("wrn-10-1", 4, 2), (2, 8, 8)),
    "transformer": (Transformer, (6, 16)),
    "shared": (Shared, (12,)),
    "frozen": (frozen, (2, 8, 8)),
    "buffers": (Counting, (12,)),
}


def batch(shape: tuple[int, ...], n: int = 6, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *shape, dtype=dtype), torch.randint(4, (n,))
