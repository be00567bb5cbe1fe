"""Write the pruned network of a run to a file that is checked against the run before it is put in place.

torch, safetensors   a state dict under the model's own keys, zeros in place
sparse               kept values and compressed masks; dcil.export.load_sparse reads it back
compact              the physically smaller network of a filter-pruned run; torch.export.load runs it
cpu                  a plan that dcil_runtime.load runs fast on an ordinary CPU, with numpy alone
onnx                 for ONNX Runtime and others; with --compact the smaller network
semi-structured      2:4 weights, half the size; dcil.export.to_semi_structured runs them on a GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from torch import nn

from dcil import SparseNet, models
from dcil.cli import export_int8
from dcil.cli.eval import cost_table, finished, layer_table, unit_of
from dcil.cli.parser import Parser, say, utf8_path, whole
from dcil.export import BLOCKS, FORMATS, PROGRAMS, Compact, Written, check_options, compact, export
from dcil.export.semi import coverage
from dcil.runs.cost import Cost, measure_cost
from dcil.runs.outputs import check_output
from dcil.train import RunFolder
from dcil.train.restore import config_of, load_net


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil export", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=utf8_path, metavar="RUN", help="run folder")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=", ".join([*FORMATS, *PROGRAMS]))
    parser.add_argument("--out", required=True, type=utf8_path, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--dtype", default=None, help=f"fp32 (default), fp16, bf16, cpu: int8; fp32 only: {', '.join(PROGRAMS)}"
    )
    parser.add_argument("--compact", action="store_true", help="with --to onnx: write the compact network")
    parser.add_argument("--block", type=whole, default=None, help="compact: channels in multiples of it (1; onnx: 8)")
    export_int8.add_arguments(parser)
    args = parser.parse(words)
    int8 = export_int8.is_wanted(args)
    check_options(args.to, None if int8 else args.dtype, args.compact, args.block)
    check_output(args.out)
    folder = RunFolder(args.run)
    net, config, record = load_net(folder), config_of(folder), folder.record()
    fields = ("method", "granularity", "model", "dataset")
    notes = {name: getattr(config, name) for name in fields}
    notes |= {"sparsity": str(net.sparsity), "run": str(args.run.resolve().name)}
    model = finished(folder, net)
    inputs = models.example(record["shape"], record["classes"], 1 if args.to == "cpu" else 2)
    if int8:
        written = export_int8.write_int8(args, folder, model, notes)
        show(net, measure_cost(model, inputs), None, unit_of(record["shape"]), args.to, written, "int8")
        return 0
    written = export(model, args.to, args.out, notes, inputs, dtype=args.dtype, small=args.compact, block=args.block)
    cost = measure_cost(model, inputs[:1])
    small = None
    if args.to == "compact" or args.compact:
        small = compact(model, inputs[:1], BLOCKS[args.to] if args.block is None else args.block)
    after = measure_cost(small.model, inputs[:1]) if small else None
    show(net, cost, after, unit_of(record["shape"]), args.to, written)
    for line in remarks(model, args.to, small, after is not None and after.parameters == cost.parameters):
        say(line)
    return 0


def remarks(model: nn.Module, to: str, small: Compact | None, as_large: bool) -> Iterator[str]:
    """Return the remarks printed below the tables."""
    yield from (f"left as it was: {line}" for line in (small.left if small else []))
    if as_large:
        yield "no filter is dead, so the compact network is as large as the dense one; train with --granularity filter"
    if to == "semi-structured":
        runs, left = coverage(model)
        yield f"2:4 layers that torch runs on a GPU's sparse units: {', '.join(runs) or 'none'}"
        for why in dict.fromkeys(left.values()):
            yield f"stays dense there, {why}: {', '.join(name for name in left if left[name] == why)}"


def show(net: SparseNet, cost: Cost, small: Cost | None, unit: str, to: str, written: Written, how: str = "") -> None:
    console = Console()
    console.print(layer_table(cost))
    console.print(cost_table(net, cost, unit, small))
    console.print(size_table(to, written))
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    total = sum(mask.numel() for mask in net.masks.values())
    how = how or ("computes the same" if to in PROGRAMS else "read back and equal")
    off = "" if written.error is None else f"; outputs differ by at most {written.error:.1e}"
    say(f"{written.file}: {to}, {written.size:,} bytes, {kept:,} of {total:,} prunable weights kept; {how}{off}")


def size_table(to: str, written: Written) -> Table:
    """Return the table of the file's size, beside the dense one and the lower bound of any mask code."""
    table = Table("file", "bytes", "x dense", "x bound")
    table.add_row("dense fp32", f"{written.dense:,}", "1.000", "")
    bound = f"{written.bound:,}", f"{written.bound / written.dense:.3f}", "1.000"
    if to in ("sparse", "semi-structured"):
        table.add_row("values + entropy of each mask", *bound)
    over = f"{written.size / written.bound:.3f}" if to in ("sparse", "semi-structured") else ""
    table.add_row(to, f"{written.size:,}", f"{written.size / written.dense:.3f}", over)
    return table
