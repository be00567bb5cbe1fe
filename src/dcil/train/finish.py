"""Finish a run: write the pruned network and the summary that marks the run as complete."""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any, Literal

import torch
from torch import nn

from dcil import SparseNet, models
from dcil.engine import Diverged
from dcil.runs.atomic import write_text
from dcil.runs.checkpoint import metrics_digest
from dcil.runs.cost import summarise_cost
from dcil.runs.environment import environment
from dcil.runs.folder import RunFolder
from dcil.runs.seal import sealed
from dcil.runs.summary import best_epoch, summarise, summarise_loss
from dcil.runs.tensors import whole, write_tensors
from dcil.sharding import whole as gathered
from dcil.train.building import build_empty
from dcil.train.trainer import Trainer

#: Name in summary.json, after "val_loss_" -> field of a Summary.
LOSS_NAMES: dict[str, Literal["last", "best", "std"]] = {"last": "last", "best": "best", "std_last_10pct": "std"}


def finish(folder: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """Write the finalized model and, last, the summary; every process calls this, and rank 0 writes and returns."""
    network, record = network_of(trainer.net), folder.record()
    if trainer.group.shard:
        empty = build_empty(trainer.config, record["classes"], tuple(record["shape"]))
        model = gathered_into(empty, trainer.net, trainer.group.is_rank_zero)
    elif trainer.group.is_rank_zero:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the summary has them as notes
            model = trainer.net.finalize()
    if not trainer.group.is_rank_zero:
        return {}
    if broken := [name for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise Diverged(f"the trained weights must be finite, {broken[0]} is not; try a smaller learning rate")
    file, rows = folder.path / "model.safetensors", folder.metrics()
    write_tensors(file, whole(model.state_dict()))
    digests = {"model_sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "metrics_sha256": metrics_digest(rows)}
    summary = summary_of(trainer, rows, network) | digests
    example = models.example(record["shape"], record["classes"]).to(next(model.parameters()).device)
    summary["cost"] = summarise_cost(model, example)
    write_text(folder.path / "summary.json", json.dumps(sealed(summary), indent=1))
    return summary


@torch.no_grad()
def gathered_into(model: nn.Module, net: SparseNet, keep: bool) -> nn.Module:
    """Fill ``model`` with the pruned network of a sharded ``net``, one tensor at a time; without ``keep`` only gather.

    ``net.finalize()`` would hold all of it on every device at once.
    """
    layers = {layer.name: layer for layer in net.layers}
    own = model.state_dict()
    for name, tensor in net.model.state_dict().items():
        if (layer := layers.get(name)) is not None:
            tensor = net.method.product(layer, net.state).masked_fill(~layer.mask, 0)
        value = gathered(tensor)
        if keep:
            own[name].copy_(value)
    return model.eval()


def network_of(net: SparseNet) -> dict[str, Any]:
    """Return what the summary says of the network and its masks; every process calls this."""
    counts = zip(net.masks.items(), net.kept.tolist(), strict=True)
    layers = {name: {"weights": mask.numel(), "kept": kept} for (name, mask), kept in counts}
    return {
        "sparsity": net.sparsity,
        "weights": sum(layer["weights"] for layer in layers.values()),
        "kept": sum(layer["kept"] for layer in layers.values()),
        "layers": layers,
        "notes": net.notes(),
    }


def summary_of(trainer: Trainer, rows: list[dict[str, Any]], network: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run, from its metrics and what ``network_of`` returned."""
    top1, sparsity = ([row[name] for row in rows] for name in ("top1", "sparsity"))
    found, best = summarise(top1), rows[best_epoch(top1, sparsity)]
    loss = summarise_loss([row.get("val_loss") for row in rows], sparsity)
    return {
        "top1_last": found["last"],
        "top1_best": best["top1"],
        "best_epoch": best["epoch"],
        "std_last_10pct": found["std"],
        "top5_last": rows[-1]["top5"],
        **({f"val_loss_{name}": loss[key] for name, key in LOSS_NAMES.items()} if loss else {}),
        **network,
        "epochs": len(rows),
        "phases": [[phase.name, phase.steps] for phase in trainer.config.phases],
        "seconds": sum(row["seconds"] for row in rows),
        "environment": environment(trainer.loader.device)
        | trainer.engine.settings.record(trainer.engine.name)
        | trainer.group.record(),
        "complete": True,
    }
