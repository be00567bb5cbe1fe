"""Random brightness, contrast and saturation of images, on the device that trains (Howard, arXiv 1312.5402).

With factors b, c, s from U(1 - strength, 1 + strength) for each image, and g = 0.2989 R + 0.587 G + 0.114 B:

    x <- b x,    x <- c x + (1 - c) mean(g(x)),    x <- s x + (1 - s) g(x),    each cut to the range of pixels

as torchvision's ColorJitter(strength, strength, strength) has it, but in this order for every image.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GREY = (0.2989, 0.587, 0.114)
#: A pixel's greatest value.
WHITE = 255.0


def draw(images: int, strength: float, random: np.random.Generator) -> Tensor:
    """Draw the factors of all images of an epoch, (N, 3)."""
    return torch.from_numpy(random.uniform(1 - strength, 1 + strength, (images, 3)).astype(np.float32))


def jitter(pixels: Tensor, factors: Tensor) -> Tensor:
    """Change the colours of pixels (N, H, W, 3) from 0 to 255 by factors (N, 3); float32."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    x = (pixels.float() * brightness).clamp_(0, WHITE)
    x = torch.lerp(grey(x).mean((1, 2, 3), keepdim=True), x, contrast).clamp_(0, WHITE)
    return torch.lerp(grey(x), x, saturation).clamp_(0, WHITE)


def grey(x: Tensor) -> Tensor:
    """Return the brightness of every pixel, (N, H, W, 1)."""
    return (x * x.new_tensor(GREY)).sum(-1, keepdim=True)
