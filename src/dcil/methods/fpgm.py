"""FPGM: filter pruning via geometric median (He, Liu, Wang, Hu & Yang, CVPR 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcil.criteria import State
from dcil.methods.filters_per_epoch import FiltersPerEpoch
from dcil.methods.zeroed import Zeroed
from dcil.sharding import whole
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class FPGM(FiltersPerEpoch, Zeroed):
    """Once per epoch, per layer, the filters nearest to all others go: the most replaceable ones.

        score(f) = sum over filters g of |f - g|

    gradual   let the sparsity grow along the schedule; the original prunes all of it from the first epoch

    Pruned filters get no gradient. The original lets leftover momentum revive them between epochs, against its own
    intention; here momentum is cleared. A zero filter lies near the median, so it is usually chosen again.
    Original: the same part of every layer, rounded down in each, shortcut convolutions left alone; distance only (its
    rate_norm = 1). Protocol: gradual, on the paper's prunable layers, exact over the network.
    """

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        rows = layer.rows(whole(layer.weight.detach())).double()
        return torch.cdist(rows, rows).sum(1)

    def shards(self) -> bool:
        return self.criterion.shards
