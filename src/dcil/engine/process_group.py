"""The processes that torchrun started. Only rank 0 writes files and logs.

    torchrun --nproc-per-node 4 -m dcil train --dataset imagefolder …

Every process reads its shard of each batch; config, weights and masks are the same in all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dcil.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Rank 0 may read a folder of a million images from a slow disk while the others wait.
TIMEOUT = timedelta(hours=1)
EXIT_DELAY = 5.0  # seconds that a process waits before it exits, while another reports the error


class ProcessLost(UserError):
    """Another process of the group has ended."""

    exit_code = 1


@dataclass(frozen=True)
class ProcessGroup:
    """
    rank, world_size               of this process among all
    local_rank, local_world_size   of this process on its machine
    local_norms                    batch norms see this process's shard only, not the global batch: no communication
                                   in the forward pass, but the result depends on the number of processes
    shard                          each process holds its part of the weights, also where there is one process only
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    local_norms: bool = False
    shard: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ProcessGroup:
        """Read the variables that torchrun sets; without them, or with one process, return a group of one."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not all(name in environment for name in (*names, "MASTER_ADDR")) or environment["WORLD_SIZE"] == "1":
            return cls()
        rank, world_size, local_rank, local_world_size = (int(environment[name]) for name in names)
        return cls(rank, world_size, local_rank, local_world_size)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def is_plain(self) -> bool:
        """Whether this process trains the whole network by itself."""
        return self.world_size == 1 and not self.shard

    @contextmanager
    def reporting_errors_once(self) -> Iterator[None]:
        """Let rank 0 alone report errors that every process finds in the same command, before they are connected.

        The output of the others is silenced from here on. They delay their exit, because torchrun ends all processes
        with the first one that ends; if they are still running then, rank 0 has not found the error.
        """
        if not self.is_rank_zero:
            silence_output()
        if self.world_size > 1 and self.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(self.local_rank)  # the device that "cuda" means in this process
        try:
            yield
        except Exception:
            if not self.is_rank_zero:
                time.sleep(EXIT_DELAY)
                restore_output()
            raise

    def device(self, asked: torch.device) -> torch.device:
        """Return the device of this process: under torchrun, the GPU of its local rank."""
        if self.world_size == 1 or asked.type != "cuda":
            return asked
        if asked.index is not None:
            raise UserError(f"--device {asked}: under torchrun every process has its own GPU; say --device cuda")
        if self.local_world_size > (gpus := torch.cuda.device_count()):
            raise UserError(f"{self.local_world_size} processes need as many GPUs, and this machine has {gpus}")
        return torch.device("cuda", self.local_rank)

    # -- communication -----------------------------------------------------------------------------------------------

    @contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Connect the processes; of several that fail, only the first to do so reports its error."""
        if self.is_plain:
            yield
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store: Store = dist.HashStore()  # type: ignore[attr-defined]
        if self.world_size > 1:
            shared, _, _ = next(rendezvous("env://", self.rank, self.world_size, timeout=TIMEOUT))
            # torchrun keeps the store when it starts the processes again, with the addresses of those that ended.
            store = dist.PrefixStore(f"restart {restarts(os.environ)}", shared)  # type: ignore[attr-defined]
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT)
        try:
            yield
        except BaseException as error:
            if not failed_first(store):
                silence_output()
                if not isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all of them at once
                    time.sleep(EXIT_DELAY)  # as above: torchrun would end the process that reports
                raise SystemExit(1) from None
            restore_output()
            if is_lost_process(error):
                raise ProcessLost("another process was killed, or ran out of memory; --resume continues") from None
            raise
        dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the processes, in place: the same bits in each of them."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def decided(self, mine: bool, device: torch.device) -> bool:
        """Return what rank 0 decided; ``mine`` is what this process would."""
        if self.world_size == 1:
            return mine
        return bool(self.sum(torch.tensor(float(mine and self.is_rank_zero), device=device)))

    def gathered(self, mine: list[str]) -> list[str]:
        """Return what all processes have found, in order, each once."""
        if self.world_size == 1:
            return mine
        everyone: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everyone, mine)
        return sorted({line for found in everyone for line in found})

    def check_equal(self, what: str, value: Tensor) -> None:
        """Raise an error in every process if ``value`` is not the same in all of them."""
        if self.world_size == 1:
            return
        values = [torch.empty_like(value) for _ in range(self.world_size)]
        dist.all_gather(values, value)
        if odd := [rank for rank, other in enumerate(values) if not torch.equal(other, values[0])]:
            raise UserError(f"{what} must be equal in all processes, but rank {odd[0]} differs from rank 0")

    @contextmanager
    def local_rank_zero_first(self, device: torch.device) -> Iterator[None]:
        """Run the block in one process of each machine before the others: it may download what all then read."""
        if self.local_rank:
            self.sum(torch.zeros(1, device=device))
        yield
        if not self.local_rank:
            self.sum(torch.zeros(1, device=device))

    def record(self) -> dict[str, str]:
        """Return what the summary of a run says about the processes."""
        sharded = {"weights": "sharded"} if self.shard else {}
        if self.world_size == 1:
            return sharded
        return sharded | {"processes": str(self.world_size), "norms": "local" if self.local_norms else "joint"}


SINGLE_PROCESS = ProcessGroup()


def restarts(environment: Mapping[str, str]) -> int:
    """Return how many times torchrun has started the processes again (--max-restarts)."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def silence_output() -> None:
    """Discard what this process prints from now on."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends


def restore_output() -> None:
    """Print again."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def failed_first(store: Store) -> bool:
    """Return True in the first process that calls this."""
    try:
        return bool(store.add("failed", 1) == 1)
    except RuntimeError:  # torchrun, which keeps the store, has ended
        return False


def is_lost_process(error: BaseException) -> bool:
    """Return True if this is how gloo, NCCL or the store report that another process has ended."""
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in ("peer", "ncclRemoteError"))
    return said or isinstance(error, dist.DistNetworkError)


def require_single_process(command: str) -> None:
    """Refuse torchrun for commands that would do the same work in every process."""
    group = ProcessGroup.from_environment(os.environ)
    if group.world_size > 1:
        with group.reporting_errors_once():
            raise UserError(f"{command} does not run under torchrun: start it as one process")
