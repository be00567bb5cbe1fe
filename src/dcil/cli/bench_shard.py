"""Measure memory by the number of processes: the command `dcil bench shard`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcil import models
from dcil.bench import sharded_memory
from dcil.cli.parser import Parser, device, each_up_to, filepath, up_to
from dcil.errors import UserError
from dcil.runs.outputs import check_output


def bench_shard(words: Sequence[str]) -> int:
    parser = Parser("dcil bench shard", sharded_memory.__doc__)
    parser.add_argument("--model", default="gpt-8-512", help="a network that reads tokens (gpt-8-512)")
    parser.add_argument("--processes", type=each_up_to(64), default=(1, 2, 4), help="numbers of processes (1,2,4)")
    parser.add_argument("--steps", type=up_to(1000), default=3, help="training steps (3)")
    parser.add_argument("--low-memory", action="store_true", help="keep one path's activations at a time")
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda or auto: cuda where there is one")
    parser.add_argument("--out", type=filepath, default=None, help="write all numbers to this JSON file")
    parser.add_argument("--measure", choices=("whole", "parts"), help="measure here: what torchrun is to start")
    args = parser.parse(words)
    if not models.reads_tokens(args.model):
        raise UserError(f"--model must read tokens (gpt-LAYERS-WIDTH), got {args.model}")
    if sys.platform != "linux":
        raise UserError(f"dcil bench shard must run on Linux, which tells a process's peak memory, got {sys.platform}")
    if args.measure:
        sharded = args.measure == "parts"
        sharded_memory.in_this_process(args.model, args.low_memory, args.steps, args.device, sharded)
        return 0
    if args.out is not None:
        check_output(args.out)
    where = args.device.type
    sharded_memory.run(args.model, args.processes, args.low_memory, args.steps, where, args.out)
    return 0
