"""Residual blocks, shared by the CIFAR and the ImageNet networks.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016. Module names are torchvision's, so
that state dicts load in either library without renaming.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution that keeps the spatial size at stride 1; no bias, because a norm layer always follows."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Build the projection of a block whose shape changes (He et al., option B); None is the identity."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Compute relu(x' + F(x)), F two 3x3 convolutions with batch norm, x' the shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """Compute relu(x' + F(x)), F a 1x1, a 3x3 and a 1x1 convolution to four times the width.

    The stride is that of the 3x3 convolution ("v1.5", as in torchvision).
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


Block = type[BasicBlock] | type[Bottleneck]


def stage(block: Block, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Chain `blocks` blocks of one width; only the first changes the shape."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width) for _ in range(blocks - 1)))


def initialize(model: nn.Module) -> None:
    """Initialise convolutions with Kaiming-normal (fan out); everything else keeps torch's defaults."""
    for module in model.modules():
        # On the meta device there is nothing to draw, and the call would import torch's compiler.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
