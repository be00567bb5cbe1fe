"""Sharded weights (FSDP2, tensor parallel) and DDP in two processes: the same masks, counts and network as in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shards import Net, build, compare, mesh_for, parallelize, run, same_as_alone, shard, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dcil
from dcil import EMA, METHODS, OBS, SparseNet, UserError
from dcil.granularity import NM, Filter, Weight
from dcil.scope import Global, Uniform
from dcil.selection import count_changes, keep_largest, keep_largest_of_all, largest_among, select
from dcil.sharding import count_true, is_sharded, like, local, whole
from dcil.weight import PrunableWeight

STEPS = 25


# -- selection ---------------------------------------------------------------------------------------------------------


def scores_of(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.randn(shape, dtype=dtype)
    if kind == "ties":
        found = found.mul(2).round().div(2)  # with zeros of both signs
    return found.square() if kind == "squares" else found


def placed(tensors, placements):
    mesh = mesh_for("1-D")
    return [distribute_tensor(t, mesh, [p]) if p is not None else t for t, p in zip(tensors, placements, strict=True)]


def ranks_exactly() -> None:
    shapes = [(5, 3), (1, 4), (6, 2, 3, 3), (9,)]
    layouts = [[Shard(0)] * 4, [Shard(1), Shard(1), Shard(2), None], [None, Shard(0), Replicate(), Shard(0)]]
    torch.manual_seed(0)
    for kind in ("normal", "ties", "squares"):
        for dtype in (torch.float32, torch.float64):
            scores = [scores_of(kind, dtype, shape) for shape in shapes]
            flat = torch.cat([score.flatten() for score in scores])
            for pruned in (0, 1, 2 * len(flat) // 3, len(flat)):
                expected = keep_largest(flat, pruned)
                for placements in layouts:
                    kept = keep_largest_of_all(placed(scores, placements), pruned)
                    found = torch.cat([whole(mask).flatten() for mask in kept])
                    assert torch.equal(found, expected), (kind, dtype, pruned, placements)
    candidates, noise = torch.rand(7, 5) < 0.5, torch.rand(7, 5).mul(4).floor()
    expected = largest_among(candidates, noise, 9)
    assert torch.equal(whole(largest_among(*placed([candidates, noise], [Shard(0)] * 2), 9)), expected)
    changes = count_changes(placed([candidates], [Shard(1)]), placed([expected], [Shard(1)]))
    assert torch.equal(changes, count_changes([candidates], [expected]))
    assert int(candidates.sum()) == int(count_true(placed([candidates], [Shard(0)])))


def test_a_ranking_of_shards_is_that_of_the_whole(tmp_path):
    run(2, tmp_path, ranks_exactly)


def prunes_groups() -> None:
    mesh = mesh_for("1-D")
    torch.manual_seed(0)
    shapes = [((5, 8), {}), ((3, 8, 3, 3), {}), ((4, 6, 3), {"transposed": True, "conv_groups": 2})]
    weights = [nn.Parameter(torch.randn(shape).mul(2).round()) for shape, _ in shapes]
    for granularity in (Weight(), Filter(), NM()):
        for scope in (Global(), Uniform()):
            found = []
            for split in (False, True):
                layers = []
                for weight, (_, layout) in zip(weights, shapes, strict=True):
                    w = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)])) if split else weight
                    layers.append(PrunableWeight("w", w, torch.ones_like(w, dtype=torch.bool), **layout))
                layers = [layer for layer in layers if granularity.supports(layer)]
                scores = [granularity.groups(layer, layer.weight.detach().square()) for layer in layers]
                for layer, kept in zip(layers, select(scores, 0.45, scope, layers, min_kept=1), strict=True):
                    layer.mask.copy_(like(granularity.mask(layer, kept), layer.mask))
                found.append(([whole(layer.mask) for layer in layers], [granularity.count_pruned(x) for x in layers]))
            assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True)), (granularity, scope)
            assert found[0][1] == found[1][1]


def test_groups_are_those_of_the_whole(tmp_path):
    run(2, tmp_path, prunes_groups)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("dcil", "before"),
        ("dcil", "after"),
        ("dpf", "net"),
        ("gmp", "root"),
        ("rigl", "after"),
        ("granet", "after"),
        ("dcil", "tp"),
    ],
)
def test_two_processes_are_one(name, how, tmp_path):
    run(2, tmp_path, same_as_alone, name, how, STEPS)


def resumes(folder: Path) -> None:
    alone, opt = build("dcil", "plain", STEPS)
    x = train(alone, opt, "plain", STEPS)
    net, opt = build("dcil", "after", STEPS)
    train(net, opt, "after", 12)
    dcp.save(dict(zip(("net", "opt"), get_state_dict(net, opt), strict=True)), checkpoint_id=folder / "sharded")
    everything = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))

    other, opt = build("dcil", "after", STEPS, seed=1)
    state = dict(zip(("net", "opt"), get_state_dict(other, opt), strict=True))
    assert other.steps_done == 0  # torch takes an empty step to create the optimizer's state
    dcp.load(state, checkpoint_id=folder / "sharded")
    set_state_dict(other, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])
    assert other.steps_done == 12
    assert other.sparsity == net.sparsity > 0
    train(other, opt, "after", STEPS, first=12)
    compare(other, alone, x)

    third, opt = build("dcil", "before", STEPS, seed=2)  # a whole state dict into shards that lie elsewhere
    set_model_state_dict(third, dict(everything), options=StateDictOptions(full_state_dict=True))
    assert third.sparsity == net.sparsity
    for key, mask in third.masks.items():
        assert torch.equal(whole(mask), everything[f"_masks.{key}"])
    weights = Net().double().state_dict()  # weights of a plain model, into every path
    third.load_model(weights)
    for name, parameter in third.named_parameters():
        assert torch.equal(whole(parameter.detach()), weights[name.split(".", 1)[1]]), name
    plain, _ = build("dcil", "plain", STEPS, seed=3)
    plain.load_state_dict(everything)
    assert plain.steps_done == third.steps_done == 12
    assert plain.sparsity == net.sparsity
    assert all(
        torch.equal(a, b) for a, b in zip(plain.finalize().parameters(), net.finalize().parameters(), strict=True)
    )


@pytest.mark.filterwarnings("ignore")
def test_state_dicts_are_the_whole_network(tmp_path):
    run(2, tmp_path, resumes, tmp_path)


def hands_back_plain_tensors() -> None:
    """Buffers too, where distribute_module has replicated them."""
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    distribute_module(model, mesh_for("1-D"))
    final = SparseNet(model, dcil.DPF(sparsity=0.5, steps=9)).finalize()
    assert {type(tensor) for tensor in final.state_dict().values()} == {torch.Tensor}
    assert final(torch.randn(4, 5)).shape == (4, 3)


@pytest.mark.filterwarnings("ignore")
def test_finalize_gives_plain_tensors(tmp_path):
    run(2, tmp_path, hands_back_plain_tensors)


def averages(folder: Path) -> None:
    alone, opt = build("dcil", "plain", STEPS)
    x = train(alone, opt, "plain", STEPS)
    net, opt = build("dcil", "plain", STEPS)
    ddp, rank = DistributedDataParallel(net), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(8, 5, generator=generator, dtype=torch.double)
        y = torch.randint(0, 4, (8,), generator=generator)
        loss = net.loss(ddp(batch[rank::2]), y[rank::2])
        opt.zero_grad()
        loss.backward()
        opt.step()
        for mask in net.masks.values():
            both = [torch.empty_like(mask) for _ in range(2)]
            dist.all_gather(both, mask)
            assert torch.equal(*both)
    compare(net, alone, x)


def test_ddp_with_attach_keeps_the_masks_equal(tmp_path):
    run(2, tmp_path, averages, tmp_path)


# -- memory ------------------------------------------------------------------------------------------------------------


def bytes_held(net: SparseNet, opt: torch.optim.Optimizer) -> int:
    """Parameters, gradients, optimizer state and masks of this process."""
    tensors = [t for p in net.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in opt.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    tensors += list(net.masks.values())
    storages = [local(t.detach()).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())  # a block's gradients share one


class Wide(Net):
    def __init__(self) -> None:
        super().__init__(width=64)


def falls(factor: float, how: str) -> None:
    found = []
    for way in ("plain", how):
        net, opt = build("dcil", way, 6, net=Wide)
        train(net, opt, way, 6)
        found.append(bytes_held(net, opt))
    assert found[1] < factor * found[0], found


@pytest.mark.parametrize("how", ["before", "after"])
def test_memory_falls_with_the_processes(how, tmp_path):
    run(2, tmp_path, falls, 0.52, how)


def logs_on_one_process() -> None:
    """Before the first mask update, and sharded after wrapping: no process waits for the others."""
    for how in ("after", "before", "tp"):
        net, opt = build("dcil", how, 40, every=30)
        train(net, opt, how, 2)
        if dist.get_rank() == 0:
            assert net.metrics()["sparsity"] == net.sparsity == 0
        dist.barrier()


def test_one_process_may_log_alone(tmp_path):
    run(2, tmp_path, logs_on_one_process)


def frees_views() -> None:
    """Between the passes a process holds no gathered weight but those of the root, which fully_shard keeps too."""
    net, opt = build("dcil", "before", 9)
    found, tensors = {}, net.tensors

    def recorded(path, names=None, views=None):
        seen = tensors(path, names, views)
        found.update({(path, name): tensor for name, tensor in seen.items() if name in net.masks})
        return seen

    net.tensors = recorded
    x, y = torch.randn(4, 5, dtype=torch.double), torch.randint(0, 4, (4,))
    loss = net.loss(net(x), y)
    sizes = {key: view.untyped_storage().nbytes() for key, view in found.items()}
    assert {name.split(".")[0] for (_, name), size in sizes.items() if size} == {"stem"}
    assert len(sizes) == 2 * len(net.masks)
    loss.backward()
    opt.step()


def test_views_are_freed_between_the_passes(tmp_path):
    run(2, tmp_path, frees_views)


# -- refused -----------------------------------------------------------------------------------------------------------


class Mine(dcil.DPF):
    def update(self, context):
        super().update(context)


def refuses() -> None:
    for name in ("sm", "dsr", "autoprune", "mil", "st3", "feather", "topkast", "srste"):
        for how in ("before", "after", "tp"):
            with pytest.raises(UserError, match=r"must see whole weights.*DistributedDataParallel\(net\)"):
                net, opt = build(name, how, 9, sparsity=0.0 if name == "mil" else 0.5)
                train(net, opt, how, 1)
    for settings in ({"criterion": OBS()}, {"weights": True}, {"c": 0.5}):
        name = {"criterion": "gmp", "weights": "rewind", "c": "dns"}[next(iter(settings))]
        with pytest.raises(UserError, match=r"DistributedDataParallel\(net\)"):
            build(name, "before", 9, **settings)
    METHODS["mine"] = Mine
    with pytest.raises(UserError, match=r"declare shards\(\)"):
        build("mine", "before", 9)
    net, opt = build("dcil", "plain", 9)
    shard(net.model, None, mesh_for("1-D"))
    with pytest.raises(UserError, match=r"every parameter must be sharded where some are.*fully_shard\(net\)"):
        train(net, opt, "after", 1)
    net, opt = build("dcil", "plain", 9)
    parallelize(net.model, mesh_for("1-D"))
    with pytest.raises(UserError, match=r"head.weight must be sharded in the same way.*before SparseNet"):
        train(net, opt, "tp", 1)
    for keep in (True, False):
        net, _ = build("dcil", "plain", 9)
        whole_net = FullyShardedDataParallel(net, use_orig_params=keep, device_id=torch.device("cpu"))
        opt = torch.optim.SGD(whole_net.parameters(), lr=0.1)
        with pytest.raises(UserError, match=r"fully_shard\(net\) keeps them"):
            net.loss(whole_net(torch.randn(4, 5).double()), torch.zeros(4, dtype=torch.long)).backward()
            opt.step()
            net.update_masks()
    with pytest.raises(UserError, match="which flattens weights"):
        SparseNet(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), dcil.DPF(sparsity=0.5, steps=9))
    net, opt = build("dcil", "after", 9)
    with pytest.raises(UserError, match="EMA"):
        EMA(net)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_right_is_refused(tmp_path):
    run(2, tmp_path, refuses)


def refuses_nan_of_another_process(how: str) -> None:
    net, opt = build("dcil", how, STEPS)
    train(net, opt, how, 4)
    sharded = next(layer for layer in net.layers if is_sharded(layer.weight))
    if dist.get_rank() == 1:
        local(sharded.weight.detach()).view(-1)[-1] = torch.nan
    before = [local(mask).clone() for mask in net.masks.values()]
    with pytest.raises(dcil.Diverged, match=sharded.name):
        net.update_masks(opt)
    assert all(map(torch.equal, before, map(local, net.masks.values())))


@pytest.mark.parametrize("how", ["before", "tp"])
def test_nan_in_one_process_is_refused_in_all(how, tmp_path):
    run(2, tmp_path, refuses_nan_of_another_process, how)


@pytest.mark.parametrize("how", ["after", "before"])
def test_one_process_needs_none_of_this(how, tmp_path):
    """FSDP2 with one process, as a script that is started without torchrun has it."""
    run(1, tmp_path, same_as_alone, "dcil", how, STEPS)
