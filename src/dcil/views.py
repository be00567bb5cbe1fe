"""Views: which tensor a layer sees for a weight ``w`` and its mask ``m`` (True = kept).

Pruning methods differ mainly in this. Plain autograd through a view *is* the gradient rule,
so there is no custom autograd function here, no masked layer class, no pruning code in any model.

    view               value     gradient reaches
    kept               M * W     the kept weights only
    revived            W         the pruned weights only
    straight_through   M * W     every weight, as if the mask were not there
    whole              W         every weight
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

View = Callable[[Tensor, Tensor], Tensor]


def kept(w: Tensor, m: Tensor) -> Tensor:
    """M * W with dL/dW = M * dL/d(view): the pruned net (P-net) of DCIL, Kim et al. 2022, Eq. 3."""
    return w * m


def revived(w: Tensor, m: Tensor) -> Tensor:
    """W with dL/dW = (1 - M) * dL/d(view): the super net (S-net) of DCIL, Kim et al. 2022, Eq. 3.

    The super net computes with all of W, but may only move what is pruned: the *refined gradient*.
    """
    return torch.where(m, w.detach(), w)


def straight_through(w: Tensor, m: Tensor) -> Tensor:
    """M * W with dL/dW = dL/d(view): the estimate of Bengio et al. 2013 that DPF uses (Lin et al. 2020)."""
    return w + (w * m - w).detach()  # exact: w + (w - w) = w where kept, w + (0 - w) = 0 where pruned


def whole(w: Tensor, m: Tensor) -> Tensor:
    """W with dL/dW = dL/d(view): the mask is ignored (dense training, soft filter pruning)."""
    return w
