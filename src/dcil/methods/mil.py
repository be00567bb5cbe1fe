"""MIL: more is less, low-cost collaborative layers (Dong, Huang, Yang & Yan, CVPR 2017)."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dcil import views
from dcil.granularity import Granularity, Weight
from dcil.method import Method
from dcil.schedule import Never, Schedule


class LowCost(nn.Module):
    """A convolution with a cheap companion: conv(x) * relu(bn(cheap(x))).

    Where the companion is 0 the product is 0 whatever the convolution gives, so a runtime need not compute it there.
    ``skipped`` and ``seen`` count such places in evaluation.
    """

    skipped: Tensor
    seen: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        stride: tuple[int, int] = (conv.stride[0], conv.stride[1])
        self.cheap = nn.Conv2d(conv.in_channels, conv.out_channels, 1, stride, groups=conv.groups, bias=False)
        self.norm = nn.BatchNorm2d(conv.out_channels)
        self.register_buffer("skipped", torch.zeros((), dtype=torch.double))
        self.register_buffer("seen", torch.zeros((), dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.relu(self.norm(self.cheap(x)))
        if self.training:  # the next evaluation counts anew
            self.skipped.zero_()
            self.seen.zero_()
        else:
            self.skipped += (gate == 0).sum()
            self.seen += gate.numel()
        return torch.as_tensor(self.conv(x) * gate)

    def saving(self) -> tuple[float, float]:
        """(saved, all) multiply-adds per output value: those skipped, less what the companion costs."""
        dense = self.conv.weight[0].numel()
        part = float(self.skipped / self.seen) if self.seen else 0.0
        return float(self.seen) * (part * dense - self.cheap.weight[0].numel()), float(self.seen) * dense


@dataclass(frozen=True, kw_only=True)
class MIL(Method):
    """Every k x k convolution but the first gets a 1x1 companion; nothing is pruned, work is skipped where that is 0.

    Its "pruning ratio" is the part of the multiply-adds skipped on the test images, which the run's notes say.
    No original code was found: placement and initialisation are unverified (re-implementation from the paper).
    """

    sparsity: float = 0.0
    steps: int = 1
    schedule: Schedule = Never()

    paths: ClassVar[Mapping[str, views.View]] = {"pruned": views.whole}
    prunes: ClassVar[bool] = False
    granularities: ClassVar[tuple[type[Granularity], ...]] = (Weight,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("sparsity", self.sparsity == 0, "0", "the method skips work and prunes no weight")

    def prepare(self, model: nn.Module) -> nn.Module:
        """A copy of the network with companions; its keys gain ``.conv``, ``.cheap`` and ``.norm``."""
        model = copy.deepcopy(model)
        convs = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
        for name, conv in convs[1:]:
            if conv.kernel_size != (1, 1) and same_size(conv):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, LowCost(conv).to(conv.weight.device, conv.weight.dtype))
        return model

    def loss_key(self, step: int) -> Hashable:
        return ()  # the companions are part of the network; a step does with it what it does with any

    def notes(self, model: nn.Module) -> list[str]:
        pairs = [module.saving() for module in model.modules() if isinstance(module, LowCost)]
        saved, dense = sum(s for s, _ in pairs), sum(d for _, d in pairs)
        if not dense:
            return ["no multiply-adds were counted: no image was evaluated, or no convolution has a companion"]
        return [f"skips {100 * saved / dense:.1f} % of the multiply-adds of its k x k convolutions on the test images"]


def same_size(conv: nn.Conv2d) -> bool:
    """The 1x1 companion gives an output of the same size."""
    padding = conv.padding if not isinstance(conv.padding, str) else None
    return padding is not None and all(
        2 * p == d * (k - 1) for p, d, k in zip(padding, conv.dilation, conv.kernel_size, strict=True)
    )
