"""Residual networks for small images: three stages, the width doubling from 16 (He et al., CVPR 2016, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcil.models.blocks import BasicBlock, Block, Bottleneck, conv, initialize, stage


class CifarResNet(nn.Module):
    """Run a stem, three stages of `blocks` blocks each, the global average and a classifier."""

    def __init__(self, block: Block, blocks: int, classes: int, channels: int, width: int = 16) -> None:
        super().__init__()
        expansion = block.expansion
        self.conv1 = conv(channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(block, width, width, blocks, stride=1)
        self.layer2 = stage(block, width * expansion, 2 * width, blocks, stride=2)
        self.layer3 = stage(block, 2 * width * expansion, 4 * width, blocks, stride=2)
        self.fc = nn.Linear(4 * width * expansion, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def resnet(depth: int, classes: int = 10, channels: int = 3, width: int = 16) -> CifarResNet:
    """Build the basic-block network of `depth` = 6n + 2 weight layers, with projections where the shape changes."""
    return CifarResNet(BasicBlock, (depth - 2) // 6, classes, channels, width)


def resnet56_bottleneck(classes: int = 10, channels: int = 3) -> CifarResNet:
    """Build what the DCIL authors, and most likely the DPF authors, trained under the name ResNet-56.

    Their code takes the block count of the basic-block ResNet-56, (56 - 2) // 6 = 9 per stage, but builds bottlenecks:
    83 weight layers and 853,936 convolution weights, against 850,864 in the basic-block ResNet-56.
    """
    return CifarResNet(Bottleneck, 9, classes, channels)
