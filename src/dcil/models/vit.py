"""Vision transformers: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021.

Ti and S are those of Touvron et al., "Training data-efficient image transformers", ICML 2021. State-dict keys are
timm's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcil.errors import UserError
from dcil.models.transformer import Block, heads_of

#: Name -> (layers, width).
SIZES = {"ti": (12, 192), "s": (12, 384), "b": (12, 768), "l": (24, 1024)}


def usual_size(patch: int) -> int:
    """Return the side of the images that patches of this size are used for: ImageNet's, or CIFAR's below 8 pixels."""
    return 224 if patch >= 8 else 32


class PatchEmbed(nn.Module):
    """Map each patch of `patch` x `patch` pixels to a vector: (N, C, H, W) to (N, patches, width)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


class VisionTransformer(nn.Module):
    """Classify images of `size` x `size` pixels: a class token beside the patches, learned positions, `layers` blocks,
    a norm layer, and a classifier of the class token."""

    def __init__(
        self,
        layers: int,
        width: int,
        patch: int,
        classes: int = 1000,
        channels: int = 3,
        size: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        name, size = f"vit-{layers}-{width}-{patch}", usual_size(patch) if size is None else size
        heads = heads_of(name, layers, width)
        if patch < 1 or size % patch:
            raise UserError(f"{name}: images of {size} pixels must be a multiple of the patch size, got {patch}")
        self.patch_embed = PatchEmbed(channels, width, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, False, dropout, eps=1e-6) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm(self.blocks(self.pos_drop(x + self.pos_embed)))
        out: Tensor = self.head(x[:, 0])
        return out

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that are not decayed besides vectors, as timm's networks do."""
        return {"cls_token", "pos_embed"}


def initialize(model: VisionTransformer) -> None:
    """Draw linear weights and positions from N(0, 0.02^2) cut at 2; the patch embedding keeps torch's default."""
    if model.cls_token.is_meta:
        return
    nn.init.normal_(model.cls_token, std=1e-6)
    nn.init.trunc_normal_(model.pos_embed, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
