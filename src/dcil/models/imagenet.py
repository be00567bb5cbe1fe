"""Residual networks for ImageNet (He et al., CVPR 2016), with torchvision's state-dict keys and its v1.5 stride."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcil.models.blocks import BasicBlock, Block, Bottleneck, initialize, stage


class ImageNetResNet(nn.Module):
    """Run a 7x7 stem with max pooling, four stages of 64 to 512 channels, the global average and a classifier."""

    def __init__(self, block: Block, blocks: tuple[int, int, int, int], classes: int, channels: int) -> None:
        super().__init__()
        expansion = block.expansion
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = stage(block, 64 * expansion, 128, blocks[1], stride=2)
        self.layer3 = stage(block, 128 * expansion, 256, blocks[2], stride=2)
        self.layer4 = stage(block, 256 * expansion, 512, blocks[3], stride=2)
        self.fc = nn.Linear(512 * expansion, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def resnet18(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-18."""
    return ImageNetResNet(BasicBlock, (2, 2, 2, 2), classes, channels)


def resnet34(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-34."""
    return ImageNetResNet(BasicBlock, (3, 4, 6, 3), classes, channels)


def resnet50(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-50."""
    return ImageNetResNet(Bottleneck, (3, 4, 6, 3), classes, channels)
