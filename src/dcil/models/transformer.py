"""Transformer blocks, shared by GPT and ViT: Vaswani et al., "Attention Is All You Need", NeurIPS 2017.

With the norm layer first, as in GPT-2 and ViT. Module names are timm's.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dcil.errors import UserError

#: Channels of an attention head in GPT-2 and ViT, whatever the width.
HEAD = 64
#: The deepest network, and the largest, whose weights, gradients and AdamW's moments take 32 GB.
MAX_LAYERS, MAX_WEIGHTS = 1000, 2_000_000_000


class Attention(nn.Module):
    """Compute softmax(Q K^T / sqrt(d)) V in each of several heads, and mix the heads."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return out


class MLP(nn.Module):
    """Compute fc2(gelu(fc1(x))), with four times the width inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.fc2(F.gelu(self.fc1(x))))
        return out


class Block(nn.Module):
    """Compute x + attention(norm1(x)), then y + mlp(norm2(y))."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads, causal, dropout)
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def heads_of(name: str, layers: int, width: int) -> int:
    """Return the number of heads of 64 channels, at least two; refuse sizes that cannot be had."""
    heads = max(2, width // HEAD)
    if layers < 1 or layers > MAX_LAYERS:
        raise UserError(f"{name}: layers must be from 1 to {MAX_LAYERS}, got {layers}")
    if width < 2 or width % 2 or (width > 2 * HEAD and width % HEAD):
        raise UserError(f"{name}: width must be a multiple of {HEAD}, or an even number up to {2 * HEAD}, got {width}")
    if (weights := 12 * layers * width**2) > MAX_WEIGHTS:
        raise UserError(f"{name} must have at most {MAX_WEIGHTS:,} weights, has about {weights:,}")
    return heads
