"""FSDP2, HSDP and FSDP with tensor parallel in two and four processes: 100 steps with twenty mask updates, and after
them the masks of one process bit for bit."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from shards import build, mesh_for, run, same_as_alone, shard, train
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dcil import DCIL, SparseNet
from dcil.sharding import whole

STEPS = 100


@pytest.mark.parametrize("name", ["dcil", "dpf", "gmp", "rigl"])
@pytest.mark.parametrize(("how", "world"), [("before", 2), ("after", 4)])
def test_fsdp_has_the_masks_of_one_process(name, how, world, tmp_path):
    run(world, tmp_path, same_as_alone, name, how, STEPS)


@pytest.mark.parametrize("how", ["hsdp before", "hsdp after", "fsdp x tp after", "tp"])
def test_other_meshes_too(how, tmp_path):
    run(4 if " " in how else 2, tmp_path, same_as_alone, "dcil", how, 40)


@pytest.mark.parametrize("name", ["set", "oneshot", "dns"])
def test_further_methods(name, tmp_path):
    run(2, tmp_path, same_as_alone, name, "after", 30)


def computes_in_bfloat16() -> None:
    """FSDP's mixed precision: views and private copies have the dtype of the gathered parameters."""
    warnings.simplefilter("ignore")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outputs = []
    for before in (True, False):
        net, _ = build("dcil", "plain", STEPS)
        model = net.model.float()
        for block in model.blocks if before else ():
            fully_shard(block, mp_policy=policy)
        if before:
            fully_shard(model, mp_policy=policy)
        net = SparseNet(model, DCIL(sparsity=0.7, steps=20, every=5))
        if not before:
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(net, mp_policy=policy)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.attach(opt)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(20):
            x, y = torch.randn(8, 5, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            outputs = net(x)
            assert {out.dtype for out in outputs.values()} == {torch.bfloat16}
            loss = net.loss({path: out.float() for path, out in outputs.items()}, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        assert all(p.dtype == torch.float32 for p in net.parameters())
        assert 0.69 < net.sparsity < 0.71
        dense = sum(int((whole(p.detach()) == 0).sum()) for n, p in net.named_parameters() if n.endswith("up.weight"))
        assert dense == 0  # DCIL's pruned weights live on in the super net


def test_mixed_precision(tmp_path):
    run(2, tmp_path, computes_in_bfloat16)


class Convolutional(nn.Module):
    """Batch norms, whose statistics are each process's own, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
                nn.Sequential(nn.ConvTranspose2d(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()),
            ]
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def normalises() -> None:
    """Every process gets the same batch, so that the statistics, and everything else, are those of one process."""
    warnings.simplefilter("ignore")
    nets = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net = SparseNet(Convolutional().double(), DCIL(sparsity=0.6, steps=30, every=4))
        if sharded:
            shard(net.model, net, mesh_for("1-D"))
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.attach(opt)
        for _ in range(30):
            loss = net.loss(net(torch.randn(8, 1, 6, 6, dtype=torch.double)), torch.randint(0, 4, (8,)))
            opt.zero_grad()
            loss.backward()
            opt.step()
        nets.append(net)
    ours, theirs = (net.state_dict() for net in nets)
    for key in ours.keys() - {"_extra_state"}:
        torch.testing.assert_close(
            whole(theirs[key]), ours[key], rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_batch_norms_and_transposed_convolutions(tmp_path):
    run(2, tmp_path, normalises)


def accumulates() -> None:
    """Two micro-batches without synchronising gradients in between are one batch."""
    warnings.simplefilter("ignore")
    found = []
    for parts in (1, 2):
        net, opt = build("dcil", "after", 20)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(20):
            x = torch.randn(8, 5, generator=generator, dtype=torch.double)
            y = torch.randint(0, 4, (8,), generator=generator)
            opt.zero_grad()
            for part in range(parts):
                net.set_requires_gradient_sync(part == parts - 1)
                (net.loss(net(x[part::parts]), y[part::parts]) / parts).backward()
            opt.step()
        assert net.steps_done == 20
        found.append(net.finalize())
    for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_accumulated_gradients(tmp_path):
    run(2, tmp_path, accumulates)


def evaluates_between_steps() -> None:
    """An evaluation leaves the root's parameters gathered; updates and results work on the sharded ones."""
    warnings.simplefilter("ignore")
    alone, opt = build("dcil", "plain", 20)
    x = train(alone, opt, "plain", 20)
    net, opt = build("dcil", "after", 20)
    train(net, opt, "after", 10)
    net.eval()
    with torch.no_grad():
        net(x)
    before = net.kept.clone()
    net.update_masks(opt)
    assert torch.equal(net.kept, before)
    assert isinstance(net.finalize()(x), torch.Tensor)
    net.train()
    train(net, opt, "after", 20, first=10)
    for key, mask in net.masks.items():
        assert torch.equal(whole(mask), alone.masks[key]), key


def test_evaluation_between_steps(tmp_path):
    run(2, tmp_path, evaluates_between_steps)
