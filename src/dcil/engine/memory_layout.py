"""The memory layout of networks and batches of images: channels_last, in which convolutions are fastest.

On a CPU with AVX-512, oneDNN computes the weight gradient of a 1x1 convolution with a stride over channels_last
images in blocks of 16 channels. Of a layer with fewer it writes past the memory that it has (oneDNN issue 6035): large
images end the process, in small ones other memory may be damaged. Such networks are trained in the usual layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK = 16


def layout_for(net: nn.Module, device: torch.device) -> torch.memory_format:
    """Return the layout that the network and its batches are to have."""
    narrow = device.type == "cpu" and any(map(is_narrow, net.modules()))
    return torch.contiguous_format if narrow else torch.channels_last


def laid_out(x: Tensor, layout: torch.memory_format) -> Tensor:
    """Return a batch of images, which come in channels_last, in the layout; tokens as they are."""
    if x.dim() < 4 or layout == torch.channels_last:
        return x
    return x.clone(memory_format=layout)  # images of one channel are in both layouts until their strides are set


def is_narrow(module: nn.Module) -> bool:
    """Return whether the module is a convolution that oneDNN cannot train in channels_last."""
    return (
        isinstance(module, nn.Conv2d)
        and set(module.kernel_size) == {1}
        and max(module.stride) > 1
        and module.in_channels // module.groups < BLOCK
    )
