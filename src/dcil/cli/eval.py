"""Print accuracy of both paths, sparsity, parameters and multiply-adds of a run."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from dcil import SparseNet, data
from dcil.cli.parser import Parser, device, filepath, say, utf8_path
from dcil.data import Batches
from dcil.engine.evaluate import evaluate
from dcil.errors import UserError
from dcil.runs.cost import Cost, entropy_bound, measure_cost
from dcil.runs.printable import quoted
from dcil.train import RunFolder
from dcil.train.restore import config_of, load_net


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil eval", __doc__)
    parser.add_argument("run", type=utf8_path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--data-dir", type=filepath, default=Path("data"), metavar="DIR", help="folder of the data sets"
    )
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, cuda:N or auto (cuda if available)")
    help = "print a row for every layer (default)"
    parser.add_argument("--layers", action=argparse.BooleanOptionalAction, default=True, help=help)
    args = parser.parse(words)
    folder = RunFolder(args.run)
    net, config = load_net(folder), config_of(folder)
    dataset = data.load(config.dataset, args.data_dir)
    trained_on = folder.record()["classes"], tuple(folder.record()["shape"])
    if trained_on != (dataset.classes, tuple(dataset.shape)):
        raise UserError(
            f"{args.run} was trained on {trained_on[0]} classes of images {trained_on[1]}, {config.dataset} has "
            f"{dataset.classes} of {dataset.shape}; give the --data-dir that it was trained with"
        )
    model = finished(folder, net)
    cost = measure_cost(model, torch.zeros(1, *dataset.shape))
    batches = dataset.loader(256, args.device, config.seed)
    console = Console()
    if args.layers:
        console.print(layer_table(cost))
    console.print(cost_table(net, cost))
    console.print(size_table(model))
    console.print(accuracy_table(net.to(args.device), batches))
    return 0


def finished(folder: RunFolder, net: SparseNet) -> nn.Module:
    """Finalize the network; print a note if the run is not complete or a layer has lost every weight."""
    if folder.summary() is None:
        epochs, total = net.steps_done // net.method.epoch_steps, config_of(folder).total_epochs
        resume = f"dcil train --resume --out {quoted(folder.path)}"
        say(f"note: {folder.path} ends at epoch {epochs} of {total}; {resume} continues it")
    for name in net.empty_layers():
        say(f"note: layer {name} has lost every weight: its output is constant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return net.finalize()


def accuracy_table(net: SparseNet, batches: Batches) -> Table:
    """Return the accuracy of every path."""
    table = Table("path", "top-1 %", "top-5 %")
    for path, (top1, top5) in evaluate(net, batches).items():
        table.add_row(path, f"{top1:.2f}", f"{top5:.2f}")
    return table


def cost_table(net: SparseNet, cost: Cost, small: Cost | None = None) -> Table:
    """Return the counts before and after pruning; ``small`` are those of the compact network, without dead filters."""
    table = Table("", "dense", "kept", "kept %", "sparsity", *(["compact"] if small else []))
    prunable = sum(mask.numel() for mask in net.masks.values())
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    rows = [
        ("prunable weights", prunable, kept, None),
        ("all parameters", cost.parameters, cost.parameters_kept, small and small.parameters),
        ("multiply-adds per image", cost.macs, cost.macs_kept, small and small.macs),
    ]
    for label, dense, left, really in rows:
        last = [f"{really:,}" if really is not None else ""] if small else []
        table.add_row(label, f"{dense:,}", f"{left:,}", f"{100 * left / dense:.2f}", f"{1 - left / dense:.4f}", *last)
    return table


def size_table(model: nn.Module) -> Table:
    """Return the size of a file of the network, dense and sparse, without writing one."""
    state = model.state_dict()
    dense, bound = sum(value.nbytes for value in state.values()), entropy_bound(state)
    table = Table("file", "bytes", "x dense")
    table.add_row("all values", f"{dense:,}", "1.000")
    table.add_row("kept values + entropy of the masks", f"{bound:,}", f"{bound / dense:.3f}")
    return table


def layer_table(cost: Cost) -> Table:
    """Return the counts of every layer."""
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
