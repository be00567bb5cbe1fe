"""A training batch in one kernel: gather, crop, mirror and normalise, as ``Loader.crop`` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcil.data import Loader

BLOCK_SIZE = 512


# for each pixel (n, y, x) of the batch, with (image, top, left, mirrored) = draws[:, position + n]:
#     source_x = width - 1 - x if mirrored else x
#     out[n, y, x, c] = images[image, top + y, left + source_x, c] * scale[c] + shift[c]
@triton.jit
def _crop_kernel(images_ptr, scale_ptr, shift_ptr, draws_ptr, position_ptr, out_ptr,
                 batch, num_draws, height, width, pad,
                 CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    n, y, x = offsets // (height * width), (offsets // width) % height, offsets % width
    row_mask = n < batch
    draw_ptrs = draws_ptr + tl.load(position_ptr) + n  # four rows of num_draws: image, top, left, mirrored
    top = tl.load(draw_ptrs + num_draws, mask=row_mask, other=0)
    left = tl.load(draw_ptrs + 2 * num_draws, mask=row_mask, other=0)
    x = tl.where(tl.load(draw_ptrs + 3 * num_draws, mask=row_mask, other=0) == 1, width - 1 - x, x)
    line = tl.load(draw_ptrs, mask=row_mask, other=0) * (height + 2 * pad) + top + y
    channels = tl.arange(0, BLOCK_CHANNELS)
    mask = row_mask[:, None] & (channels < CHANNELS)[None, :]
    image_offsets = (line * (width + 2 * pad) + left + x)[:, None] * CHANNELS + channels[None, :]
    pixels = tl.load(images_ptr + image_offsets, mask=mask, other=0)
    scale = tl.load(scale_ptr + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    shift = tl.load(shift_ptr + channels, mask=channels < CHANNELS, other=0.0)[None, :]
    out_offsets = offsets[:, None] * CHANNELS + channels[None, :]
    tl.store(out_ptr + out_offsets, pixels.to(tl.float32) * scale + shift, mask=mask)


def crop(loader: Loader, draws: Tensor, position: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Return ``batch`` images and labels from ``position`` on; ``draws`` (4, images) are the epoch's random choices."""
    (height, width), channels = loader.size, loader.pixels.shape[1]
    out = torch.empty(batch, height, width, channels, device=draws.device)
    normalize = loader.normalize
    _crop_kernel[(triton.cdiv(batch * height * width, BLOCK_SIZE),)](
        loader.pixels, normalize.scale, normalize.shift, draws, position, out,
        batch, draws.shape[1], height, width, loader.pad,
        CHANNELS=channels, BLOCK_CHANNELS=triton.next_power_of_2(channels), BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    order = draws[0].index_select(0, position + torch.arange(batch, device=draws.device))
    return out.permute(0, 3, 1, 2), loader.labels[order]
