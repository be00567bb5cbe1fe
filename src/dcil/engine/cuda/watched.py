"""What a recording refers to, so that it is not replayed when that is no longer there."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from dcil import SparseNet


class Watched:
    """What a recording refers to: where tensors lie, modes of modules, settings of the optimizer."""

    def __init__(self, net: SparseNet, optimizer: Optimizer) -> None:
        self.net, self.optimizer, self.bindings = net, optimizer, net.bindings
        self.parameters, self.modules = list(net.parameters()), list(net.model.modules())
        tables = [(module._buffers, key) for module in net.modules() for key in module._buffers]
        self.buffers = [(table, key, buffer) for table, key in tables if (buffer := table[key]) is not None]
        self.before = self.now()

    def now(self) -> tuple[Any, ...]:
        groups = self.optimizer.param_groups
        settings = [[value for key, value in group.items() if key not in ("params", "lr")] for group in groups]
        return (
            [(parameter.data_ptr(), parameter.requires_grad) for parameter in self.parameters],
            [buffer.data_ptr() for _, _, buffer in self.buffers],
            [module.training for module in self.modules],
            settings, [len(group["params"]) for group in groups], id(self.optimizer.state), self.net.method,
        )  # fmt: skip

    def same(self) -> bool:
        """Whether all of it is as it was."""
        if self.net.bindings is not self.bindings or any(table[key] is not b for table, key, b in self.buffers):
            return False
        return bool(self.now() == self.before)
