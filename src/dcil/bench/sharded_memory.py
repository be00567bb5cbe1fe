"""Memory of a process while one network trains in parts (`dcil train --shard`), by the number of processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dcil import SparseNet
from dcil.bench import loops
from dcil.bench.clock import Stopwatch
from dcil.data.batches import Batch
from dcil.engine import EngineSettings, build, shard
from dcil.engine.process_group import ProcessGroup
from dcil.errors import UserError
from dcil.runs.environment import environment
from dcil.runs.outputs import write_output_text
from dcil.sharding import local

MIB = 2**20
#: Fits on two cores: the weights, not the activations, are what takes memory.
SEQUENCES, LENGTH, CLASSES = 4, 64, 256
#: Lets glibc return freed memory at once, so that the peak is that of memory in use.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Row:
    """Of the process that needs most, in MiB.

    held    its parts of the weights, gradients, optimizer state and masks
    peak    all that the steps needed beyond what it had before the network was built
    """

    processes: int
    sharded: bool
    held: float
    peak: float
    step_seconds: float


class OneBatch:
    """The same random batch, or this process's share of it, over and over."""

    def __init__(self, x: Tensor, y: Tensor, steps: int) -> None:
        self.batch, self.steps, self.device = (x, y), steps, x.device

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for _ in range(start, self.steps):
            yield self.batch

    def test(self) -> Iterator[Batch]:
        yield self.batch


def run(model: str, processes: Sequence[int], low_memory: bool, steps: int, device: str, out: Path | None) -> None:
    """Measure in processes of torchrun, one number of them after the other, and print the table."""
    plain = start(1, model, low_memory, steps, device, sharded=False)
    rows = [plain, *(start(number, model, low_memory, steps, device, sharded=True) for number in processes)]
    table = Table("processes", "weights", "held MiB", "x", "peak MiB", "x", "s / step", title=f"{model}, per process")
    for row in rows:
        shares = (f"{row.held:.0f}", f"{row.held / plain.held:.2f}", f"{row.peak:.0f}", f"{row.peak / plain.peak:.2f}")
        table.add_row(str(row.processes), "in parts" if row.sharded else "whole", *shares, f"{row.step_seconds:.2f}")
    Console().print(table)
    if out is not None:
        there = environment(torch.device(device))
        record = {"environment": there, "model": model, "low_memory": low_memory, "rows": [asdict(row) for row in rows]}
        write_output_text(out, json.dumps(record, indent=1) + "\n")


def start(processes: int, model: str, low_memory: bool, steps: int, device: str, sharded: bool) -> Row:
    """Run ``measure`` in that many processes; return what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "dcil", "bench", "shard", "--model", model, "--steps", str(steps), "--device", device]
    command += [*(["--low-memory"] if low_memory else []), "--measure", "parts" if sharded else "whole"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **RETURNING})
    found = re.search(r"^\{.*\}$", done.stdout, re.MULTILINE)
    if found is None:  # what was printed counts: gloo's threads may abort a process that ends after that
        raise UserError(f"{processes} processes must end with a measurement, ended with: {last_line(done.stderr)}")
    return Row(**json.loads(found[0]))


def last_line(text: str) -> str:
    said = [line for line in text.splitlines() if line.startswith("dcil: ")] or text.strip().splitlines() or [""]
    return said[-1]


def measure(model: str, low_memory: bool, steps: int, device: torch.device, group: ProcessGroup) -> Row:
    """Train ``steps`` steps and a mask update of DCIL with AdamW in this process of a connected group."""
    before, case = in_use(device), loops.Case(SEQUENCES, CLASSES, length=LENGTH)
    settings = EngineSettings(engine="eager", low_memory=low_memory).on(device)
    x, y = (tensor[group.rank :: group.world_size].contiguous() for tensor in loops.batch_of(case, device))
    built = loops.build(model, case, torch.device("cpu"))
    net = SparseNet(shard(built, device, settings, group) if group.shard else built.to(device), loops.method_of("dcil"))
    net.set_extra_state(torch.tensor(loops.STEPS // 2))
    optimizer = loops.optimizer_of(model, net)
    engine = build(net, optimizer, OneBatch(x, y, steps), settings, group)
    forget_peak(device)
    watch = Stopwatch(device)
    for _ in engine.epoch(0, lambda i: 1e-4):
        pass
    seconds = watch.seconds() / steps
    net.update_masks(optimizer)
    found = torch.tensor([held(net, optimizer), in_use(device, peak=True) - before], dtype=torch.double, device=device)
    if group.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    most, peak = (found / MIB).tolist()
    return Row(group.world_size, group.shard, most, peak, seconds)


def held(net: SparseNet, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this process's parameters, gradients, optimizer state and masks."""
    tensors = [t for p in net.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    storages = [local(tensor.detach()).untyped_storage() for tensor in (*tensors, *net.masks.values())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def forget_peak(device: torch.device) -> None:
    """Begin to measure the peak anew: what building the network took does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def in_use(device: torch.device, peak: bool = False) -> int:
    """Return the bytes in use on the device, or by this process on the CPU (Linux), now or at most."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def in_this_process(model: str, low_memory: bool, steps: int, device: torch.device, sharded: bool) -> None:
    """Measure in a process that torchrun has started; rank 0 prints the row."""
    group = ProcessGroup.from_environment(os.environ)
    group = ProcessGroup(group.rank, group.world_size, group.local_rank, group.local_world_size, shard=sharded)
    with group.reporting_errors_once():
        device = group.device(device)
    with group.connected(device):
        row = measure(model, low_memory, steps, device, group)
        if group.is_rank_zero:
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
            sys.stdout.flush()
