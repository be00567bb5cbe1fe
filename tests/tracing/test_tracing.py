"""The graph of a network: what it holds, that it computes the same, and that tracing touches nothing else."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS
from torch import Tensor, nn

from dcil import models
from dcil.tracing import TracingError, trace

aten = torch.ops.aten


def same(model: nn.Module, *shapes: tuple[int, ...], **options) -> torch.fx.GraphModule:
    """The graph of a network in evaluation, which computes the same for several batch sizes."""
    model.eval()
    graph = trace(model, [torch.randn(1, *shape) for shape in shapes], **options)
    for size in (1, 2, 3, 8) if 1 in options.get("sizes", ()) else (2, 3, 8):
        inputs = [torch.randn(size, *shape) for shape in shapes]
        torch.testing.assert_close(copy.deepcopy(graph)(*inputs), copy.deepcopy(model)(*inputs))
    return graph


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("level", ["modules", "operators"])
def test_networks_of_many_kinds(name, level):
    make, shape = NETWORKS[name]
    same(make(), shape, **({} if level == "modules" else {"leaf": lambda module: False}))


def test_layers_of_torch_are_one_node_each_and_the_models_own():
    model = models.build("resnet8-digits", 4, 2)
    graph = same(model, (2, 8, 8), sizes=(2, 7, 1))
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d, nn.Linear))]
    assert [graph.get_submodule(node.target) for node in calls] == [model.get_submodule(n.target) for n in calls]
    assert {id(model.get_submodule(node.target)) for node in calls} == {id(m) for m in layers}
    functions = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert functions == {aten.relu.default, aten.add.Tensor, aten.mean.dim}
    assert calls[0].meta["shape"] == (2, 12, 8, 8) and calls[1].meta["module"] == ("bn1", "BatchNorm2d")


def test_a_single_layer_is_a_network_too():
    graph = same(nn.Linear(4, 3), (4,), sizes=(2, 7, 1))
    assert [node.target for node in graph.graph.nodes if node.op == "get_attr"] == ["weight", "bias"]


def test_tracing_changes_nothing():
    """Neither the model's numbers, nor its modes, nor the random numbers."""
    model = models.build("resnet8-digits", 4, 2).train()
    model.layer1.eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    torch.manual_seed(0)
    trace(model, torch.randn(2, 2, 8, 8), training=True)
    after = torch.randn(3)
    torch.manual_seed(0)
    torch.randn(2, 2, 8, 8)
    assert torch.equal(after, torch.randn(3))
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_training_and_evaluation_have_graphs_of_their_own():
    class Modes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            return y if self.training else y.flip(1)

    model, x = Modes(nn.Linear(3, 3)), torch.randn(1, 3)
    trained, evaluated = (trace(model, x, training=mode).graph for mode in (True, False))
    assert "flip" in str(evaluated) and "flip" not in str(trained)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    assert len({str(trace(plain, x, training=mode).graph) for mode in (True, False)}) == 1


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.scale = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        before = y.clone()
        y += x.sum((1, 2, 3), keepdim=True)
        self.act(y)
        F.hardtanh_(y, 0, 2)
        y.flatten(1).sum()  # a view of what was changed before
        return torch.cat([y * self.scale, before.clamp_(max=0.5)], 1).view(len(x), -1)


def test_nothing_in_the_graph_works_in_place():
    graph = same(InPlace(), (3, 5, 6), leaf=lambda module: False)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert not any(target._schema.is_mutable for target in targets)
    assert targets[-1] is aten.flatten.using_ints
    assert [node.target for node in graph.graph.nodes if node.op == "get_attr"] == ["conv.weight", "conv.bias", "scale"]


class Batch(nn.Module):
    """Numbers that depend on the batch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if self.what == "multiples":
            return self.linear(x.reshape(3 * n, 2).repeat(1, 3)).reshape(n, 18)
        if self.what == "half":
            return self.linear(x)[: n // 2]
        if self.what == "mean":
            return self.linear(x) / n
        return self.linear(x).relu() if n > (1 if self.what == "one" else 4) else self.linear(x)


def test_the_graph_holds_for_every_batch_size_or_is_refused():
    for what in ("multiples", "mean"):
        same(Batch(what), (6,), sizes=(2, 7, 1))
    for what in ("half", "several", "one"):
        with pytest.raises(TracingError, match="batch of"):
            trace(Batch(what).eval(), torch.randn(1, 6), sizes=(2, 7, 1))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_the_graph_holds_for_images_of_other_sizes(mode):
    class Sizes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = F.interpolate(F.relu(self[0](x)), scale_factor=2, mode=mode)
            return F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1).flatten(1)

    model = Sizes(nn.Conv2d(2, 4, 3)).eval()
    graph, x = trace(model, torch.randn(1, 2, 8, 8)), torch.randn(2, 2, 11, 7)
    assert torch.equal(graph(x), model(x))


def test_several_inputs_and_nested_outputs():
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
            return {"sum": x + y, "both": (x, [y * 2])}

    graph = trace(Two(), [torch.randn(1, 4), torch.randn(1, 4)])
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(graph(x, y), Two()(x, y))


class Refused(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner = what, nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.what == "a value" and y.sum() > 0:
            return y
        if self.what == "an item":
            return y * y[0, 0].item()
        if self.what == "shared memory":
            view = y[:, :2]
            y.relu_()
            return view
        if self.what == "an error":
            raise RuntimeError("no\nsecond line")
        return torch.add(x, y, out=y)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("a value", "value of a tensor"),
        ("an item", "value of a tensor"),
        ("shared memory", "memory that another tensor shares"),
        ("an error", "Refused cannot be traced: in the network itself, no$"),
        ("out", "aten.add.out writes into its operands"),
    ],
)
def test_what_cannot_be_a_graph_is_refused_in_one_line(what, why):
    with pytest.raises(TracingError, match=why) as found:
        trace(Refused(what), torch.randn(1, 4))
    assert "\n" not in str(found.value)


def test_an_error_names_the_module():
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    with pytest.raises(TracingError, match=r"in module '1\.0' \(Inner\), it asks for the value"):
        trace(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner())), torch.randn(1, 4))


def test_hooks_belong_to_their_module():
    """One on a layer is run when the graph calls it; one on a block of layers is in the graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    same(model, (4,))


def test_tracing_leaves_the_modules_of_other_threads_alone():
    """torch.fx and torch.export redirect the calls of all modules while they trace; another run may be training."""
    other, failures, done = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)), [], threading.Event()
    optimizer = torch.optim.SGD(other.parameters(), 0.01)

    def train() -> None:
        try:
            while not done.is_set():
                out = other(torch.ones(3, 4))
                assert type(out) is Tensor and out.device.type == "cpu" and not torch.compiler.is_compiling()
                out.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    graphs = [trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), torch.ones(1, 4)) for _ in range(3)]
    done.set()
    thread.join()
    assert not failures
    assert all(len(graph.graph.nodes) == 102 for graph in graphs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tracing_a_network_on_a_gpu_uses_none_of_it():
    model = models.build("resnet8-digits", 4, 2).cuda()
    x = torch.randn(2, 2, 8, 8, device="cuda")
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"]
    trace(model, x, training=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == taken
