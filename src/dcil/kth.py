"""The k-th smallest of many scores, where they are, without sorting them."""

from __future__ import annotations

import torch
from torch import Tensor


def kth_smallest(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest score (from 1), as a tensor."""
    if scores.is_cuda and scores.dtype == torch.float32:  # there kthvalue runs on a single processor of the GPU
        return radix_select(scores, k)
    return scores.kthvalue(k).values


def radix_select(scores: Tensor, k: int) -> Tensor:
    """The k-th smallest of float32 scores by their bits."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0, because -0.0 equals 0.0
    keys = bits ^ ((bits >> 31) | -(2**31))  # as unsigned integers these are in the order of the scores
    # full, not tensor: copying a number from the host would wait for the device
    found = (smallest_key(keys, torch.full((), k, device=scores.device)) - 2**31).int()
    return (found ^ ((found >> 31) & (2**31 - 1))).view(torch.float32)


def smallest_key(keys: Tensor, k: Tensor) -> Tensor:
    """The k-th smallest of int32 keys, read as unsigned, by three histograms of their bits, the highest first.

    No sort, no wait. ``k`` (from 1) is on the device too.
    """
    left, prefix = k, torch.zeros((), dtype=torch.long, device=keys.device)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        found = digit_counts(keys, shift, width, prefix)
        below = found.cumsum(0) < left
        left = left - (found * below).sum()
        prefix = (prefix << width) | below.sum()
    return prefix


def digit_counts(keys: Tensor, shift: int, width: int, prefix: Tensor) -> Tensor:
    """A histogram of ``width`` bits of the keys, of those only whose higher bits are ``prefix``."""
    digits = (keys >> shift) & (2**width - 1)
    if shift + width < 32:
        known = (keys >> (shift + width)) & (2 ** (32 - shift - width) - 1)
        digits = torch.where(known == prefix, digits, -1)
    if keys.is_cuda:
        return torch.histc(digits, 2**width, 0, 2**width)
    return torch.bincount(digits[digits >= 0], minlength=2**width)
