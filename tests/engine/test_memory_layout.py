"""Images are channels_last, but for networks whose training oneDNN then writes past its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dcil import data
from dcil.engine.memory_layout import is_narrow, layout_for
from dcil.train import Config, Trainer


@pytest.mark.parametrize(
    ("conv", "narrow"),
    [
        (nn.Conv2d(12, 24, 1, stride=2), True),
        (nn.Conv2d(32, 32, 1, stride=(1, 2), groups=4), True),
        (nn.Conv2d(16, 32, 1, stride=2), False),
        (nn.Conv2d(12, 24, 1), False),
        (nn.Conv2d(12, 24, 3, stride=2), False),
        (nn.Linear(3, 3), False),
    ],
)
def test_narrow_strided_convolutions_are_known(conv, narrow):
    assert is_narrow(conv) == narrow
    wanted = torch.contiguous_format if narrow else torch.channels_last
    assert layout_for(nn.Sequential(conv), torch.device("cpu")) == wanted
    assert layout_for(nn.Sequential(conv), torch.device("cuda")) == torch.channels_last


@pytest.mark.parametrize(("model", "layout"), [("resnet8-digits", torch.contiguous_format), ("resnet20", None)])
def test_shortcuts_compute_in_the_layout_that_is_safe(model, layout):
    config = Config(model=model, method="dcil", batch=700)
    trainer = Trainer.build(config, data.load("digits", Path("data")), torch.device("cpu"))
    seen = []
    for module in trainer.net.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.register_forward_pre_hook(lambda module, args: seen.extend([args[0], module.weight]))
    next(iter(trainer.engine.epoch(0, lambda i: 0.1)))
    assert len(seen) == 8  # two shortcuts, two paths
    for tensor in seen[::2]:
        assert tensor.is_contiguous(memory_format=layout or torch.channels_last)
    if layout:  # a weight in the other layout would decide for it
        assert all(weight.stride() == (weight.shape[1], 1, 1, 1) for weight in seen[1::2])
