"""A network sharded in every way that is supported, trained beside one process: shared by the tests of sharding."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import said, together
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcil import METHODS, SparseNet
from dcil.sharding import whole

#: How a network is sharded, and on which mesh of w processes.
MESHES = {"hsdp": (2, -1), "fsdp x tp": (-1, 2)}
OURS = {"dcil": {"warmup": 0.3}, "rigl": {"until": 1.0}}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 2)
        self.down = nn.Linear(2 * width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd widths, so that no dimension divides by the number of processes everywhere."""

    def __init__(self, width: int = 7, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mesh_for(how: str) -> DeviceMesh:
    world = dist.get_world_size()
    shape = next((shape for name, shape in MESHES.items() if how.startswith(name)), (world,))
    known = -world // min(shape[0] * shape[-1], -1) if len(shape) == 2 else world
    names = ("replicate", "shard") if how.startswith("hsdp") else ("data", "tensor")[: len(shape)]
    return init_device_mesh("cpu", tuple(known if n == -1 else n for n in shape), mesh_dim_names=names)


def shard(model: nn.Module, outer: nn.Module | None, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if outer is not None:
        fully_shard(outer, mesh=mesh)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))


def build(name: str, how: str, steps: int, seed: int = 0, net: type[nn.Module] = Net, **settings: Any):
    """How: "plain", "before" (blocks and model, then wrapped), "root" (the model alone, then wrapped), "after"
    (wrapped, then blocks and net), "net" (wrapped, then net alone), "tp"; the same with "hsdp " or "fsdp x tp "."""
    torch.manual_seed(seed)
    model = net().double()
    mesh = None if how == "plain" else mesh_for(how)
    if mesh is not None and "tp" in how:
        parallelize(model, mesh["tensor"] if mesh.ndim == 2 else mesh)
        mesh = mesh["data"] if mesh.ndim == 2 else None
    when = how.split()[-1]
    if when == "before":
        shard(model, model, mesh)
    elif when == "root":
        fully_shard(model, mesh=mesh)
    method = METHODS[name](**({"sparsity": 0.7, "steps": steps, "every": 5} | OURS.get(name, {}) | settings))
    net = SparseNet(model, method)
    if when == "after":
        shard(net.model, net, mesh)
    elif when == "net":
        fully_shard(net, mesh=mesh)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    net.attach(opt)
    return net, opt


def share(how: str) -> tuple[int, int]:
    """(which part of a batch, of how many) this process gets: processes of one tensor-parallel group get the same."""
    if how == "plain" or how == "tp":
        return 0, 1
    rank, world = dist.get_rank(), dist.get_world_size()
    return (rank // 2, world // 2) if how.startswith("fsdp x tp") else (rank, world)


def train(net: SparseNet, opt: torch.optim.Optimizer, how: str, steps: int, first: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    rank, world = share(how)
    for step in range(steps):
        x = torch.randn(8, 5, generator=generator, dtype=torch.double)
        y = torch.randint(0, 4, (8,), generator=generator)
        if step < first:
            continue
        loss = net.loss(net(x[rank::world]), y[rank::world])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return x


def same_as_alone(name: str, how: str, steps: int, **settings: Any) -> None:
    """Train in these processes and in each one alone, and compare everything."""
    warnings.simplefilter("ignore")
    alone, opt = build(name, "plain", steps, **settings)
    train(alone, opt, "plain", steps)
    net, opt = build(name, how, steps, **settings)
    x = train(net, opt, how, steps)
    compare(net, alone, x)


def compare(net: SparseNet, alone: SparseNet, x: Tensor) -> None:
    if dist.get_rank() == 0:  # alone: the counts are known since the last update
        assert net.sparsity == alone.sparsity > 0.6
        ours, theirs = net.metrics(), alone.metrics()
        differ = {k: (ours[k], theirs[k]) for k in ours if ours[k] != theirs[k] and not k.startswith("loss")}
        assert not differ, differ
    for key, mask in net.masks.items():
        assert torch.equal(whole(mask), alone.masks[key]), key
    for (key, ours), (_, theirs) in zip(net.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(ours.detach()), theirs.detach(), rtol=1e-7, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert net.groups() == alone.groups()
    assert net.empty_layers() == alone.empty_layers()
    final = net.finalize()
    assert type(final) is type(alone.finalize())
    assert not any(type(p.data) is not Tensor for p in final.parameters())
    torch.testing.assert_close(final(x), alone.finalize()(x), rtol=1e-7, atol=1e-9)
    net.eval()
    torch.testing.assert_close(net(x), final(x), rtol=1e-12, atol=1e-12)
    net.train()


def in_gloo(work, *args: Any) -> None:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    try:
        work(*args)
    finally:
        dist.destroy_process_group()


def run(world: int, folder: Path, work, *args: Any) -> None:
    """``work(*args)`` in that many processes; fails with what they said."""
    assert together(world, folder, in_gloo, work, *args) == [0] * world, said(folder)
