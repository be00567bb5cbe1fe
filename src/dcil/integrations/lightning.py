"""Lightning: a callback that wraps the network, attaches it to its optimizers and logs its metrics."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from dcil import Method, SparseNet
from dcil.errors import UserError, missing_extra

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise missing_extra("lightning", "lightning") from error


class SparsityCallback(Callback):
    """Counts the optimizer's real steps, moves the masks after them, and logs ``net.metrics()`` to every logger.

        loss = self.net.loss(self.net(x), y)                                                # in training_step
        trainer = Trainer(callbacks=[SparsityCallback(dcil.DCIL(sparsity=0.9, steps=1000))])

    method   wraps the module's network with it before the optimizers are configured; None if the module has made
             SparseNets by itself, which ``LightningModule.load_from_checkpoint`` needs
    net      the attribute that holds the network, where the module has several

    Gradient accumulation, manual optimization and steps that a scaler skips are counted right. Masks and steps are in
    the module's state dict, so that checkpoints of the trainer resume exactly.
    """

    def __init__(self, method: Method | None = None, net: str | None = None) -> None:
        super().__init__()
        self.method = method
        self.net = net
        self.logged = -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the network, for every stage: a checkpoint of one may be loaded in another."""
        if self.method is not None and not sparse_nets(pl_module):
            name = self.net or only_network(pl_module)
            setattr(pl_module, name, SparseNet(getattr(pl_module, name), self.method))
        self.check_averaging(trainer)

    def check_averaging(self, trainer: Any) -> None:
        """Refuse averages that would hold masks of several steps, or were made of the network before it was wrapped."""
        for number, other in enumerate(trainer.callbacks):
            if getattr(other, "_use_buffers", False):
                raise UserError(
                    f"{type(other).__name__} must not average buffers, which include the masks: give it "
                    "use_buffers=False, or use dcil.EMA(net)"
                )
            if self.method and hasattr(other, "_average_model") and number < trainer.callbacks.index(self):
                raise UserError(f"{type(other).__name__} must come after SparsityCallback in the list of callbacks")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach every net to the optimizers that have parameters of it."""
        if not sparse_nets(pl_module):
            raise UserError(
                f"{type(pl_module).__name__} must have a SparseNet, got none: pass the method, "
                "SparsityCallback(dcil.DCIL(…)), or set self.net = dcil.SparseNet(…) in its __init__"
            )
        for net in sparse_nets(pl_module).values():
            own = {id(parameter) for parameter in net.parameters()}
            held = [o for o in trainer.optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
            if not held:
                raise UserError("an optimizer must hold the parameters of net, got none: see configure_optimizers")
            net.attach(*held)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log every ``log_every_n_steps`` optimizer steps."""
        nets = sparse_nets(pl_module)
        steps = max(net.steps_done for net in nets.values())
        every = trainer.log_every_n_steps
        if not trainer.loggers or not every or steps % every or steps == self.logged:
            return
        self.logged = steps
        for name, net in nets.items():
            prefix = f"{name}/" if len(nets) > 1 else ""
            # Not loss/…: stores that make folders of names could have no metric called loss beside it.
            metrics = {prefix + re.sub("^loss/", "losses/", key): value for key, value in net.metrics().items()}
            metrics.pop(f"{prefix}step")
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=net.steps_done - 1)  # from 0, as Lightning does


def sparse_nets(module: nn.Module) -> dict[str, SparseNet]:
    """The SparseNets in a module, by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, SparseNet)}


def only_network(module: nn.Module) -> str:
    """The name of the only child with parameters."""
    names = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(names) != 1:
        raise UserError(
            f"{type(module).__name__} must have one network, got {', '.join(names) or 'none'}: name the one to prune, "
            "SparsityCallback(method, net='…')"
        )
    return names[0]
