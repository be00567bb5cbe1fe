"""Restore the config and the network of a run folder."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from dcil import SparseNet, models
from dcil.errors import UserError
from dcil.runs.checkpoint import check_settings
from dcil.runs.damage import naming_file
from dcil.runs.folder import RunFolder
from dcil.train.config import Config, from_record, to_json


def config_of(folder: RunFolder) -> Config:
    """Return the config of a recorded run."""
    return settings_of(folder)[0]


def settings_of(folder: RunFolder) -> tuple[Config, dict[str, Any]]:
    """Return the config of a recorded run and all its settings as config.json has them, which must agree."""
    record, file = folder.record(), folder.path / "config.json"
    with naming_file(file):
        config = from_record(record)
        method = config.build_method(record["method"]["steps"] // config.epochs)
        settings = json.loads(to_json(config, method, record["classes"], record["shape"]))
        check_settings(file, record, settings)
    return config, settings


def load_net(folder: RunFolder) -> SparseNet:
    """Load the network of the last checkpoint, on the CPU."""
    config, settings = settings_of(folder)
    with torch.device("meta"):  # without initial weights, which the checkpoint replaces anyway
        model = models.build(config.model, settings["classes"], settings["shape"][0])
    # What to_empty does, without its slow import of sympy.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
    net = SparseNet(model, config.build_method(settings["method"]["epoch_steps"]))
    if not folder.restore(net, config=settings):
        raise UserError(f"{folder.path} has no checkpoint yet; train it further with dcil train --resume")
    check_result(folder, net)
    return net.eval()


def check_result(folder: RunFolder, net: SparseNet) -> None:
    """Refuse the summary and model of a finished run that are not those of its checkpoint."""
    if (summary := folder.summary()) is None:
        return
    advice = f"remove summary.json, and dcil train --resume --out {folder.path} writes both again"
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    if (summary["kept"], summary["sparsity"]) != (kept, net.sparsity):
        raise UserError(f"{folder.path / 'summary.json'} must fit the checkpoint beside it, and does not; {advice}")
    file = folder.path / "model.safetensors"
    with naming_file(file, advice):
        if summary.get("model_sha256", said := hashlib.sha256(file.read_bytes()).hexdigest()) != said:
            raise ValueError("its checksum is not the one in summary.json")
