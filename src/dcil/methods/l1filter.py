"""L1 filter pruning: pruning filters for efficient convnets (Li, Kadav, Durdanovic, Samet & Graf, ICLR 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dcil.criteria import State
from dcil.granularity import Filter, Granularity
from dcil.methods.oneshot import OneShot
from dcil.scope import Scope, Uniform
from dcil.sharding import whole
from dcil.weight import PrunableWeight


@dataclass(frozen=True, kw_only=True)
class L1Filter(OneShot):
    """Train, remove the filters with the smallest sum of |w| once, fine-tune.

    inner   prune only the first convolution of each residual block, so that no residual width changes; the sparsity
            is then that of these layers

    Original: the same part of each of these layers here (theirs is tuned by stage, skipping sensitive layers), 40
    epochs of fine-tuning at 0.001. The smaller network itself is made by exporting it compact.
    Protocol: every prunable layer, pruned at the target epoch; the learning-rate schedule continues.
    """

    inner: bool = True
    granularity: Granularity = Filter()
    scope: Scope = Uniform()

    granularities: ClassVar[tuple[type[Granularity], ...]] = (Filter,)

    def is_prunable(self, name: str) -> bool:
        return not self.inner or ".conv1." in name

    def group_scores(self, layer: PrunableWeight, state: State) -> Tensor:
        return layer.rows(whole(layer.weight.detach())).double().abs().sum(1)

    def shards(self) -> bool:
        return self.criterion.shards
