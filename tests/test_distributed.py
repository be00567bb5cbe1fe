"""DistributedDataParallel(net): two processes end with the same masks, and with what one makes of both halves."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from networks import NETWORKS, batch
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from dcil import METHODS, SparseNet

STEPS = 12


def build(name: str):
    torch.manual_seed(0)
    warm = {"warmup": 0.0} if name == "dcil" else {}
    method = METHODS[name](sparsity=0.6, steps=STEPS, every=3, **warm)
    net = SparseNet(NETWORKS["no-norm"][0]().double(), method)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def batches():
    torch.manual_seed(1)
    return [batch(NETWORKS["no-norm"][1], 8) for _ in range(STEPS)]


def go(net, model, opt, data):
    for x, y in data:
        loss = net.loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        net.step(opt)


def work(rank: int, port: int, name: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    net, opt = build(name)
    halves = [(x[rank::2], y[rank::2]) for x, y in batches()]
    go(net, DistributedDataParallel(net), opt, halves)
    torch.save(net.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["dcil", "rigl"])
def test_two_processes_are_one(name, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(work, (port, name, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    net, opt = build(name)
    go(net, net, opt, batches())
    alone = net.state_dict()
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
    assert net.sparsity == pytest.approx(0.6, abs=0.01)
