"""The fast engine on digits, some steps of it, and a method whose super net leaves the loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dcil import DCIL, Method, SparseNet, data
from dcil.engine import EngineSettings
from dcil.engine.cuda.graph import GraphEngine


@dataclass(frozen=True, kw_only=True)
class Late(DCIL):
    """After three steps only the pruned net learns."""

    def form(self, step):
        return step >= 3

    def loss(self, outputs, target, task, step):
        return task(outputs["pruned"], target) + (task(outputs["super"], target) if step < 3 else 0.0)


def engine_of(
    model: nn.Module,
    method: Method,
    route: str,
    device: str = "cpu",
    steps: int = 6,
    rate: float = 0.1,
    precision: str = "tf32",
) -> GraphEngine:
    """The engine after its first steps."""
    torch.manual_seed(0)
    loader = data.load("digits", Path("data")).loader(100, torch.device(device), 0)
    net = SparseNet(model.to(device), method).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    engine = GraphEngine(net, optimizer, loader, EngineSettings("graph", precision, executor=route))
    for i, _ in enumerate(engine.epoch(0, lambda i: rate)):
        if i + 1 == steps:
            break
    return engine
