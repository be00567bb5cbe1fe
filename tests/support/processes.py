"""Several gloo processes in a test. They come from a server that has torch loaded and never saw a GPU: importing torch
takes longer than what they do, and a process that has used CUDA, or threads, cannot be forked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing

from dcil.train import ProcessGroup

CPU = torch.device("cpu")
SERVER = multiprocessing.get_context("forkserver")
WANTED = ["dcil.cli.train", "dcil.report.page", "torch._dynamo", "pytest", "PIL.Image", "torch.distributed.fsdp"]
SERVER.set_forkserver_preload(WANTED)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    store = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return store | {name: str(number) for name, number in numbers.items()}


def child(rank: int, world: int, port: int, out: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What ``work`` writes goes to files, its exit code is the process's."""
    os.environ |= environment(rank, world, port)
    torch.set_num_threads(1)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.exit(work(*args))


def together(world: int, out: Path, work: Callable[..., Any], *args: Any, kind: bool = False) -> list[int]:
    """Run ``work(*args)``, a function of a module, in ``world`` processes; their exit codes. What they said is in
    ``out``. When one fails, the others are terminated, as torchrun does, unless ``kind``."""
    out.mkdir(parents=True, exist_ok=True)
    # Here, as torchrun has it, and on a port that it takes itself: one that was free before may be taken meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    team = [SERVER.Process(target=child, args=(rank, world, store.port, out, work, args)) for rank in range(world)]
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}):
        for process in team:
            process.start()
    end = time.monotonic() + 120
    while any(process.is_alive() for process in team):
        time.sleep(0.01)
        if time.monotonic() > end or (not kind and any(process.exitcode for process in team)):
            for process in team:
                process.terminate()
    del store
    return [process.exitcode for process in team]


def said(out: Path) -> str:
    """All that the processes wrote to standard error, and which did."""
    return "".join(f"[{file.stem}] {file.read_text()}" for file in sorted(out.glob("*.stderr")) if file.read_text())


def in_group(work: Callable[..., None], *args: Any) -> None:
    """``work(group, *args)`` inside the process group."""
    group = ProcessGroup.from_environment(os.environ)
    with group.connected(CPU):
        work(group, *args)
