"""ProcessGroup: the processes that torchrun started, if it did. One is first: it alone writes files and speaks.

    torchrun --nproc-per-node 4 -m dcil train --dataset imagefolder …

Every process reads its share of each batch; config, weights and masks are the same in all of them.
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

#: The first process may read a folder of a million images from a slow disk while the others wait.
PATIENCE = timedelta(hours=1)
PAUSE = 5.0  # seconds that a process waits for another to say what went wrong


class Lost(UserError):
    """Another process of the team is gone."""

    exit_code = 1


@dataclass(frozen=True)
class ProcessGroup:
    """
    rank, world          this process's place among all
    local, neighbours    and among those on its machine
    local_norms          batch norms see this process's share only, not the joint batch: no communication in the
                         forward pass, but then the result depends on the number of processes
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    neighbours: int = 1
    local_norms: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProcessGroup:
        """What torchrun says; without it, or with one process, a team of one."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not all(name in environment for name in (*names, "MASTER_ADDR")) or environment["WORLD_SIZE"] == "1":
            return cls()
        rank, world, local, neighbours = (int(environment[name]) for name in names)
        return cls(rank, world, local, neighbours)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Before they are connected, all processes find the same mistakes in the same command: the first says so.

        It alone speaks from here on. The others wait with their exit, because torchrun ends all processes with the
        first one that ends; if nothing happens, they have found something that the first did not.
        """
        if not self.first:
            hush()
        if self.world > 1 and self.local < torch.cuda.device_count():
            torch.cuda.set_device(self.local)  # what asks for "cuda" means this one
        try:
            yield
        except Exception:
            if not self.first:
                time.sleep(PAUSE)
                speak()
            raise

    def device(self, asked: torch.device) -> torch.device:
        """The device of this process: each has a GPU for itself."""
        if self.world == 1 or asked.type != "cuda":
            return asked
        if asked.index is not None:
            raise UserError(f"--device {asked}: under torchrun every process has its own GPU; say --device cuda")
        if self.neighbours > (gpus := torch.cuda.device_count()):
            raise UserError(f"{self.neighbours} processes need as many GPUs, and this machine has {gpus}")
        return torch.device("cuda", self.local)

    # -- working together --------------------------------------------------------------------------------------------

    @contextmanager
    def working(self, device: torch.device) -> Iterator[None]:
        """While open, the processes are connected; of several that fail, the first to do so says why."""
        if self.world == 1:
            yield
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, _, _ = next(rendezvous("env://", self.rank, self.world, timeout=PATIENCE))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=PATIENCE)
        try:
            yield
        except BaseException as error:
            if not failed_first(store):
                hush()
                if not isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all of them at once
                    time.sleep(PAUSE)  # for the same reason as above: until the one that speaks has spoken
                raise SystemExit(1) from None
            speak()
            if is_loss(error):
                raise Lost("another process of the team was killed, or ran out of memory; --resume goes on") from None
            raise
        dist.destroy_process_group()

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` becomes the sum over the team, in place: the same bits everywhere."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, what: str, value: Tensor) -> None:
        """An error in every process if ``value`` is not the same in all of them."""
        if self.world == 1:
            return
        everyone = [torch.empty_like(value) for _ in range(self.world)]
        dist.all_gather(everyone, value)
        if odd := [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]:
            raise UserError(f"the processes do not agree on {what}: {odd[0]} differs from 0")

    @contextmanager
    def one_before_the_others(self, device: torch.device) -> Iterator[None]:
        """One process of each machine goes first: it may have to download what all then read."""
        if self.local:
            self.sum(torch.zeros(1, device=device))
        yield
        if not self.local:
            self.sum(torch.zeros(1, device=device))

    def record(self) -> dict[str, str]:
        """For the summary of a run."""
        if self.world == 1:
            return {}
        return {"processes": str(self.world), "norms": "local" if self.local_norms else "joint"}


SINGLE_PROCESS = ProcessGroup()  # a process on its own


def hush() -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends


def speak() -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def failed_first(store: Store) -> bool:
    """Is this the first process to say that it failed?"""
    try:
        return bool(store.add("failed", 1) == 1)
    except RuntimeError:  # torchrun, which keeps the store, is gone itself
        return False


def is_loss(error: BaseException) -> bool:
    """Is this how gloo, NCCL or the store says that another process is gone?"""
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in ("peer", "ncclRemoteError"))
    return said or isinstance(error, dist.DistNetworkError)


def alone(command: str) -> None:
    """For commands that know nothing of teams: several processes would do the same work side by side."""
    team = ProcessGroup.of(os.environ)
    if team.world > 1:
        with team.planning():
            raise UserError(f"{command} does not run under torchrun: start it as one process")
