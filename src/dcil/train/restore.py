"""Restore the config and the network of a run folder."""

from __future__ import annotations

import torch

from dcil import SparseNet, models
from dcil.errors import UserError
from dcil.runs.damage import naming_file
from dcil.runs.folder import RunFolder
from dcil.train.config import Config, from_record


def config_of(folder: RunFolder) -> Config:
    """Return the config of a recorded run."""
    record = folder.record()
    with naming_file(folder.path / "config.json"):
        return from_record(record)


def load_net(folder: RunFolder) -> SparseNet:
    """Load the network of the last checkpoint, on the CPU."""
    record, config = folder.record(), config_of(folder)
    with torch.device("meta"):  # without initial weights, which the checkpoint replaces anyway
        model = models.build(config.model, record["classes"], record["shape"][0])
    # What to_empty does, without its slow import of sympy.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
    steps = record["method"]["steps"] // config.epochs
    net = SparseNet(model, config.build_method(steps))
    if not folder.restore(net):
        raise UserError(f"{folder.path} has no checkpoint yet; train it further with dcil train --resume")
    return net.eval()
