"""Wide residual networks: Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.models.blocks import conv, initialize

#: The deepest network, and the largest, whose weights, gradients and momentum take 6 GB.
MAX_DEPTH, MAX_WEIGHTS = 1204, 500_000_000


class WideBlock(nn.Module):
    """Compute x' + conv2(relu(bn2(conv1(relu(bn1(x)))))), with pre-activation.

    The shortcut x' is x or, where the shape changes, a projection of relu(bn1(x)).
    """

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        # No norm layer here: the next block's bn1 normalises the sum.
        self.shortcut = None if stride == 1 and inputs == width else conv(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = torch.relu(self.bn1(x))
        out: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(activated))))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(activated)
        return shortcut + out


def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(WideBlock(inputs, width, stride), *(WideBlock(width, width) for _ in range(blocks - 1)))


class WideResNet(nn.Module):
    """Run WRN-`depth`-`width`: three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times `width` channels."""

    def __init__(self, depth: int, width: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest:
            raise UserError(f"wrn-{depth}-{width}: depth must be 6n + 4 with n >= 1 (10, 16, 22, 28, …), got {depth}")
        if width < 1:
            raise UserError(f"wrn-{depth}-{width}: width must be >= 1, got {width} (1 is 16, 32 and 64 channels)")
        if depth > MAX_DEPTH:
            raise UserError(f"wrn-{depth}-{width}: depth must be <= {MAX_DEPTH}, got {depth}")
        if (weights := blocks * 18 * (16**2 + 32**2 + 64**2) * width**2) > MAX_WEIGHTS:
            raise UserError(f"wrn-{depth}-{width} must have at most {MAX_WEIGHTS:,} weights, has about {weights:,}")
        self.conv1 = conv(channels, 16, 3)
        self.layer1 = _stage(16, 16 * width, blocks, stride=1)
        self.layer2 = _stage(16 * width, 32 * width, blocks, stride=2)
        self.layer3 = _stage(32 * width, 64 * width, blocks, stride=2)
        self.bn = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)
        initialize(self)
        nn.init.zeros_(self.fc.bias)  # as in the authors' code

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        out: Tensor = self.fc(torch.relu(self.bn(x)).mean((2, 3)))
        return out
