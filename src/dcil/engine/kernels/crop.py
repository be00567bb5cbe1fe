"""A training batch in one kernel (Triton): gathered, cropped, mirrored and normalised, as ``Loader.crop`` does it."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from dcil.data import Loader

BLOCK = 512


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _crop(pixels, scale, shift, drawn, position, out, images, total, height, width, pad,  # type: ignore[no-untyped-def]
          CHANNELS: tl.constexpr, C: tl.constexpr, B: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    n, y, x = at // (height * width), (at // width) % height, at % width
    ok = n < images
    draw = drawn + tl.load(position) + n  # four rows of ``total``: image, top, left, mirrored
    top = tl.load(draw + total, mask=ok, other=0)
    left = tl.load(draw + 2 * total, mask=ok, other=0)
    x = tl.where(tl.load(draw + 3 * total, mask=ok, other=0) == 1, width - 1 - x, x)
    line = tl.load(draw, mask=ok, other=0) * (height + 2 * pad) + top + y
    c = tl.arange(0, C)
    inside = ok[:, None] & (c < CHANNELS)[None, :]
    source = (line * (width + 2 * pad) + left + x)[:, None] * CHANNELS + c[None, :]
    found = tl.load(pixels + source, mask=inside, other=0)
    a = tl.load(scale + c, mask=c < CHANNELS, other=0.0)[None, :]
    b = tl.load(shift + c, mask=c < CHANNELS, other=0.0)[None, :]
    tl.store(out + at[:, None] * CHANNELS + c[None, :], found.to(tl.float32) * a + b, mask=inside)


def crop(loader: Loader, drawn: Tensor, position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The ``size`` images and labels from ``position`` on, of an epoch's ``drawn`` (4, images)."""
    (height, width), channels = loader.size, loader.pixels.shape[1]
    out = torch.empty(size, height, width, channels, device=drawn.device)
    count = size * height * width
    normalize = loader.normalize
    _crop[(triton.cdiv(count, BLOCK),)](
        loader.pixels, normalize.scale, normalize.shift, drawn, position, out,
        size, drawn.shape[1], height, width, loader.pad,
        CHANNELS=channels, C=triton.next_power_of_2(channels), B=BLOCK,
    )  # fmt: skip
    order = drawn[0].index_select(0, position + torch.arange(size, device=drawn.device))
    return out.permute(0, 3, 1, 2), loader.labels[order]
