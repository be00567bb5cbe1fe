"""Several processes: they end with the same masks, and with what one process makes of the joint batch."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks import NETWORKS, batch
from processes import in_group, said, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dcil import METHODS, OBD, SparseNet
from dcil import engine as engines
from dcil.engine import EagerEngine, EngineSettings
from dcil.engine.data_parallel import fingerprint
from dcil.engine.process_group import ProcessGroup
from dcil.engine.sync_batch_norm import CpuSyncBatchNorm
from dcil.errors import UserError

STEPS = 12
SIZES = [8] * 5 + [1] + [7] * 5 + [5]  # of the joint batches: shares differ, and one is empty


def build(name: str, network: str = "no-norm"):
    torch.manual_seed(0)
    more = {"dcil": {"warmup": 0.5}, "obd": {"criterion": OBD()}, "autoprune": {"rate": 0.1}}.get(name, {})
    if name == "half dcil":
        name, more = "dcil", {"warmup": 0.0, "super_share": 0.5}
    method = METHODS["dpf" if name == "obd" else name](sparsity=0.6, steps=STEPS, **({"every": 3} | more))
    net = SparseNet(NETWORKS[network][0]().double(), method)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def batches(network: str = "no-norm", sizes=SIZES):
    torch.manual_seed(1)
    return [batch(NETWORKS[network][1], n) for n in sizes]


class Given:
    """A loader of given batches, the test images among them."""

    device = torch.device("cpu")

    def __init__(self, data, group: ProcessGroup) -> None:
        self.data, self.steps = (
            [(x[group.rank :: group.world_size], y[group.rank :: group.world_size]) for x, y in data],
            len(data),
        )

    def train(self, epoch: int, start: int = 0):
        return iter(self.data)

    def test(self):
        return iter(self.data)


def go(group: ProcessGroup, name: str, network: str, sizes, low_memory: bool):
    """All the steps and an evaluation; what came of them."""
    net, opt = build(name, network)
    settings = EngineSettings(low_memory=low_memory)
    engine = engines.build(net, opt, Given(batches(network, sizes), group), settings, group)
    for _ in engine.epoch(0, lambda step: 0.1):
        pass
    return net, engine.totals(), engine.evaluate()


def go_and_save(group: ProcessGroup, folder: Path, *args) -> None:
    net, totals, scores = go(group, *args)
    torch.save(
        (net.state_dict(), totals, {path: tuple(found) for path, found in scores.items()}), folder / f"{group.rank}.pt"
    )


def same_as_alone(folder: Path, name: str, network: str, sizes=SIZES, low_memory: bool = False, world: int = 2) -> None:
    what = (name, network, sizes, low_memory)
    assert together(world, folder, in_group, go_and_save, folder, *what) == [0] * world, said(folder)
    net, totals, scores = go(ProcessGroup(), *what)
    alone, ours = net.state_dict(), [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    first = ours[0][0]
    for state, found_totals, found in ours:
        assert found_totals == pytest.approx(totals, rel=1e-9)
        assert found == {path: (*hits, pytest.approx(loss, rel=1e-6)) for path, (*hits, loss) in scores.items()}
        for key, value in alone.items():
            assert torch.equal(first[key], state[key]), key
            torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["dcil", "rigl", "set", "dsr", "sm", "dns", "obd", "autoprune", "srste", "feather"])
def test_two_processes_are_one(name, tmp_path):
    same_as_alone(tmp_path, name, "no-norm")


@pytest.mark.parametrize("network", ["residual", "conv1d", "buffers"])
def test_norms_see_the_joint_batch(network, tmp_path):
    sizes = [n + (network == "buffers") for n in SIZES]  # without places, one image has no variance
    same_as_alone(tmp_path, "dcil", network, sizes, world=3)


def test_the_super_net_sees_the_same_share_of_a_batch_that_is_divided(tmp_path):
    same_as_alone(tmp_path, "half dcil", "residual", [8] * STEPS)


def test_one_path_at_a_time(tmp_path):
    same_as_alone(tmp_path, "dcil", "residual", low_memory=True)


def by_hand(group: ProcessGroup, folder: Path) -> None:
    """The README's way, without the command line."""
    net, opt = build("dcil")
    model = DistributedDataParallel(net)
    for x, y in batches(sizes=[8] * STEPS):
        loss = net.loss(model(x[group.rank :: 2]), y[group.rank :: 2])
        opt.zero_grad()
        loss.backward()
        opt.step()
        net.step(opt)
    torch.save(net.state_dict(), folder / f"{group.rank}.pt")


def test_ddp_by_hand(tmp_path):
    assert together(2, tmp_path, in_group, by_hand, tmp_path) == [0, 0], said(tmp_path)
    net, _, _ = go(ProcessGroup(), "dcil", "no-norm", [8] * STEPS, False)
    for rank in (0, 1):
        state = torch.load(tmp_path / f"{rank}.pt")
        for key, value in net.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


def disagree(group: ProcessGroup) -> None:
    net, opt = build("dcil")
    engine = engines.build(net, opt, Given([], group), EngineSettings(), group)
    engine.synchronise()
    if group.rank == 1:
        mask = net.layers[0].mask.flatten()
        mask[3] = False
    with pytest.raises(UserError, match="the masks must be equal in all processes, but rank 1 differs"):
        engine.synchronise()


def test_masks_that_differ_are_noticed(tmp_path):
    assert together(2, tmp_path, in_group, disagree) == [0, 0], said(tmp_path)


def vanish(group: ProcessGroup) -> None:
    group.sum(torch.ones(1))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.sum(torch.ones(1))


def telling(work, *args) -> int:
    try:
        return work(*args) or 0
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def test_a_process_that_is_killed_is_missed(tmp_path):
    assert together(2, tmp_path, telling, in_group, vanish, kind=True) == [1, -signal.SIGKILL]
    assert said(tmp_path) == "[0] another process was killed, or ran out of memory; --resume continues\n"


def test_a_fingerprint_knows_every_place():
    mask = torch.zeros(3, 4, dtype=torch.bool)
    places = [mask.flatten().index_fill(0, torch.tensor([i]), True).view(3, 4) for i in range(12)]
    assert len({int(fingerprint([m])) for m in places}) == 12
    assert int(fingerprint([places[0], places[1]])) != int(fingerprint([places[1], places[0]]))


def norms_of_its_own(group: ProcessGroup, folder: Path) -> None:
    net, opt = build("dcil", "residual")
    group = replace(group, local_norms=True)
    engine = engines.build(net, opt, Given(batches("residual", [8, 8]), group), EngineSettings(), group)
    for _ in engine.epoch(0, lambda step: 0.1):
        pass
    before = {k: v.clone() for k, v in net.named_buffers() if "running" in k}
    engine.evaluate()
    torch.save((before, net.state_dict()), folder / f"{group.rank}.pt")


def test_norms_of_its_own_are_averaged_at_the_end_of_an_epoch(tmp_path):
    """--local-norms: each process normalises its share; what is evaluated and saved is one network."""
    assert together(2, tmp_path, in_group, norms_of_its_own, tmp_path) == [0, 0], said(tmp_path)
    (own, state), (other, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(state[key], same[key]) for key in state)
    for key, value in own.items():
        assert not torch.equal(value, other[key])
        torch.testing.assert_close(state[key], (value + other[key]) / 2)


def test_the_graph_engine_is_for_one_process():
    net, opt = build("dcil")
    with pytest.raises(UserError, match="--engine graph trains in one process"):
        engines.build(net, opt, Given([], ProcessGroup()), EngineSettings("graph"), ProcessGroup(0, 2))
    assert type(engines.build(net, opt, Given([], ProcessGroup()), EngineSettings(), ProcessGroup())) is EagerEngine
    assert not any(isinstance(module, (CpuSyncBatchNorm, nn.SyncBatchNorm)) for module in net.modules())
