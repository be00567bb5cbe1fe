"""Print accuracy and loss of both paths, sparsity, parameters and multiply-adds of a run."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from dcil import SparseNet, data, models
from dcil.cli.parser import DATA_DIR, DATA_DIR_HELP, Parser, add_damaged, device, filepath, say, utf8_path
from dcil.data import Batches
from dcil.engine.evaluate import evaluate
from dcil.report.formatting import bits_per_byte
from dcil.runs.cost import ATTENTION, Cost, entropy_bound, measure_cost
from dcil.runs.printable import quoted
from dcil.train import RunFolder
from dcil.train.building import describe_data
from dcil.train.restore import check_data, config_of, load_net

#: Evaluated at once: images, or tokens in all.
MOST_IMAGES, MOST_TOKENS = 256, 2**14


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil eval", __doc__)
    parser.add_argument("run", type=utf8_path, metavar="RUN", help="run folder")
    parser.add_argument("--data-dir", type=filepath, default=DATA_DIR, metavar="DIR", help=DATA_DIR_HELP)
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, cuda:N or auto (cuda if available)")
    help = "print a row for every layer (default)"
    parser.add_argument("--layers", action=argparse.BooleanOptionalAction, default=True, help=help)
    add_damaged(parser)
    args = parser.parse(words)
    folder = RunFolder(args.run)
    net, config = load_net(folder), config_of(folder)
    loaded = data.skipping(data.load(config.dataset, args.data_dir), args.damaged == "skip")
    dataset = data.prepare(loaded, config.tokens, config.length)
    trained_on = check_data(folder, describe_data(dataset))
    model = finished(folder, net)
    cost = measure_cost(model, models.example(dataset.shape, dataset.classes))
    batches = dataset.loader(batch_size(dataset.shape), args.device, config.seed)
    console = Console()
    if args.layers:
        console.print(layer_table(cost))
    console.print(cost_table(net, cost, unit_of(dataset.shape)))
    console.print(size_table(model))
    console.print(score_table(net.to(args.device), batches, trained_on.get("text")))
    return 0


def batch_size(shape: tuple[int, ...]) -> int:
    """Return how many images, or sequences, are evaluated at once."""
    return max(1, MOST_TOKENS // shape[0]) if len(shape) == 1 else MOST_IMAGES


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


def score_table(net: SparseNet, batches: Batches, text: Mapping[str, Any] | None) -> Table:
    """Return accuracy and loss of every path; of a text the loss comes first, in bits per byte, too."""
    accuracies = ("top-1 %", "top-5 %")
    table = Table("path", *(("nats per token", "bits per byte", *accuracies) if text else (*accuracies, "loss, nats")))
    for path, (top1, top5, loss) in evaluate(net, batches).items():
        found = f"{top1:.2f}", f"{top5:.2f}"
        if text:
            table.add_row(path, f"{loss:.4f}", f"{bits_per_byte(loss, text):.4f}", *found)
        else:
            table.add_row(path, *found, f"{loss:.4f}")
    return table


def unit_of(shape: Sequence[int]) -> str:
    """Return what multiply-adds are counted for, in words."""
    return "sequence" if len(shape) == 1 else "image"


def cost_table(net: SparseNet, cost: Cost, unit: str, small: Cost | None = None) -> Table:
    """Return the counts before and after pruning, multiply-adds per ``unit``.

    ``small`` are those of the compact network, without dead filters.
    """
    table = Table("", "dense", "kept", "kept %", "sparsity", *(["compact"] if small else []))
    prunable = sum(mask.numel() for mask in net.masks.values())
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    rows = [
        ("prunable weights", prunable, kept, None),
        ("all parameters", cost.parameters, cost.parameters_kept, small and small.parameters),
        (f"multiply-adds per {unit}", cost.macs, cost.macs_kept, small and small.macs),
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
    if cost.attention:
        table.add_row(ATTENTION, "", "", "", f"{cost.attention:,}", f"{cost.attention:,}")
    return table
