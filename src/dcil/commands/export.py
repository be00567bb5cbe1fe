"""The finished pruned net of a run as a file, under the model's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcil.commands.parser import Parser, say
from dcil.errors import UserError, unknown
from dcil.export import FORMATS, export
from dcil.train import RunFolder


def main(words: Sequence[str]) -> int:
    parser = Parser("dcil export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--to", required=True, metavar="FORMAT", help="safetensors or torch (a plain state dict)")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
    args = parser.parse(words)
    if args.to not in FORMATS:
        raise unknown("export format", args.to, FORMATS)
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder; give the name of a file")
    folder = RunFolder(args.run)
    net, config = folder.load(), folder.config()
    notes = {"method": config.method, "sparsity": str(net.sparsity), "model": config.model, "dataset": config.dataset}
    export(net.finalize(), args.to, args.out, notes)
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    total = sum(mask.numel() for mask in net.masks.values())
    size = args.out.stat().st_size
    say(f"{args.out}: {args.to}, {size:,} bytes, {kept:,} of {total:,} prunable weights kept; read back and equal")
    return 0
