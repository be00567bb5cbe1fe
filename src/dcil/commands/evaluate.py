"""Accuracy of both paths, sparsity, parameters and multiply-adds of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dcil import SparseNet, data
from dcil.account import Cost, account
from dcil.commands.parser import Parser, device
from dcil.data import Batches
from dcil.train import RunFolder
from dcil.train.evaluate import evaluate


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil eval", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets are")
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, … or auto: cuda where there is one")
    parser.add_argument("--layers", action="store_true", help="also every layer")
    args = parser.parse(words)
    folder = RunFolder(args.run)
    net, config = folder.load(), folder.config()
    shape = folder.record()["shape"]
    cost = account(net.finalize(), torch.zeros(1, *shape))
    batches = data.load(config.dataset, args.data_dir).loader(256, args.device, config.seed)
    console = Console()
    console.print(accuracy_table(net.to(args.device), batches))
    console.print(cost_table(net, cost))
    if args.layers:
        console.print(layer_table(cost))
    return 0


def accuracy_table(net: SparseNet, batches: Batches) -> Table:
    table = Table("path", "top-1 %", "top-5 %")
    for path, (top1, top5) in evaluate(net, batches).items():
        table.add_row(path, f"{top1:.2f}", f"{top5:.2f}")
    return table


def cost_table(net: SparseNet, cost: Cost) -> Table:
    """Counts before and after pruning."""
    table = Table("", "dense", "kept", "kept %", "sparsity")
    prunable = sum(mask.numel() for mask in net.masks.values())
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    rows = [
        ("prunable weights", prunable, kept),
        ("all parameters", cost.parameters, cost.parameters_kept),
        ("multiply-adds per image", cost.macs, cost.macs_kept),
    ]
    for label, dense, left in rows:
        table.add_row(label, f"{dense:,}", f"{left:,}", f"{100 * left / dense:.2f}", f"{1 - left / dense:.4f}")
    return table


def layer_table(cost: Cost) -> Table:
    table = Table("layer", "weights", "kept", "sparsity", "multiply-adds", "kept")
    for layer in cost.layers:
        table.add_row(
            layer.name,
            f"{layer.weights:,}",
            f"{layer.kept:,}",
            f"{layer.sparsity:.4f}",
            f"{layer.macs:,}",
            f"{layer.macs_kept:,}",
        )
    return table
