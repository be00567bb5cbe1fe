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
    """The k-th smallest of float32 scores by three histograms of their bits, the highest first; no sort, no wait."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0, because -0.0 equals 0.0
    keys = bits ^ ((bits >> 31) | -(2**31))  # as unsigned integers these are in the order of the scores
    # full, not tensor: copying a number from the host would wait for the device
    left, prefix = (torch.full((), value, dtype=torch.long, device=scores.device) for value in (k, 0))
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        digits = (keys >> shift) & (2**width - 1)
        if shift < 21:  # only those that agree with what is known of the result
            known = (keys >> (shift + width)) & (2 ** (32 - shift - width) - 1)
            digits = torch.where(known == prefix, digits, -1)
        counts = histogram(digits, 2**width)
        below = counts.cumsum(0) < left
        left = left - (counts * below).sum()
        prefix = (prefix << width) | below.sum()
    found = (prefix - 2**31).int()
    return (found ^ ((found >> 31) & (2**31 - 1))).view(torch.float32)


def histogram(digits: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is there; what is negative does not count."""
    if digits.is_cuda:
        return torch.histc(digits, size, 0, size)
    return torch.bincount(digits[digits >= 0], minlength=size)
