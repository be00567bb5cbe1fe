"""The small network computes what the large one computes: the paper's networks, random ones, and training in it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, batch
from torch import Tensor, nn

import dcil.reproduce
from dcil import DCIL, Filter, SparseNet, models
from dcil.errors import UserError
from dcil.export import carry_optimizer, compact
from dcil.runs.cost import measure_cost


def live_norms(model: nn.Module) -> None:
    """Norm layers as after training, so that dead filters send constants of either sign."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.5)
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)


@torch.no_grad()
def kill(model: nn.Module, share: float) -> nn.Module:
    """The filters of each layer dead with probability ``share``, and one layer in eight dead as a whole."""
    live_norms(model)
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            dead = torch.rand(len(module.weight)) < (share if torch.rand(()) > 0.125 else 1.1)
            module.weight[dead] = 0
    return model.eval()


@torch.no_grad()
def assert_same(model: nn.Module, x: Tensor, block: int = 1) -> nn.Module:
    """Equal to the last digits in double, and within 1e-5 in float."""
    exact, small = model.double(), compact(model.double(), x.double(), block).model
    want = exact(x.double())
    assert small(x.double()).shape == want.shape
    torch.testing.assert_close(small(x.double()), want, rtol=1e-9, atol=1e-9)
    single = copy.deepcopy(model).float()
    small = compact(single, x, block).model
    want = single(x)
    assert float((small(x) - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))
    return small


# -- the paper's networks --------------------------------------------------------------------------

PAPER = json.loads((Path(dcil.reproduce.__file__).parent / "paper.json").read_text())
CELLS = sorted({(cell["model"], cell["sparsity"]) for cell in PAPER if cell["granularity"] == "filter"})
CELLS = [cell for cell in CELLS if cell[1]] + [("resnet56-bottleneck", 0.5)]


def test_the_paper_has_structured_sparsities():
    assert {("resnet32", 0.4), ("resnet56", 0.5), ("wrn-28-2", 0.8), ("wrn-28-8", 0.8)} <= set(CELLS)


@pytest.mark.parametrize(("name", "sparsity"), CELLS)
def test_the_papers_networks_at_its_structured_sparsities(name, sparsity):
    """That share of all filters dead, unevenly over the layers as global pruning leaves them."""
    masked = kill_globally(models.build(name, 10), sparsity)
    x = torch.randn(2, 3, *((8, 8) if name in ("wrn-28-4", "wrn-28-8") else (16, 16)))
    small = assert_same(masked, x)
    before, after = measure_cost(masked.float(), x[:1]), measure_cost(small, x[:1])
    assert after.parameters < before.parameters_kept
    assert after.macs < before.macs_kept


@pytest.mark.parametrize("sparsity", [0.3, 0.4])
def test_what_is_left_of_resnet32_is_as_predicted(sparsity):
    """Rows: the live filters. Columns: those of the layer before, or all that were ever added to the stream."""
    masked = kill_globally(models.build("resnet32", 10), sparsity)
    small, x = compact(masked, torch.zeros(1, 3, 32, 32)), torch.zeros(1, 3, 32, 32)
    live = {name: m.weight.flatten(1).any(1) for name, m in masked.named_modules() if isinstance(m, nn.Conv2d)}
    predicted = {"conv1": (live["conv1"], torch.ones(3, dtype=torch.bool))}
    stream = live["conv1"]
    for block in [f"layer{stage}.{i}" for stage in (1, 2, 3) for i in range(5)]:
        first, second, short = (live.get(f"{block}.{part}") for part in ("conv1", "conv2", "downsample.0"))
        predicted[f"{block}.conv1"], predicted[f"{block}.conv2"] = (first, stream), (second, first)
        if short is not None:
            predicted[f"{block}.downsample.0"] = (short, stream)
        stream = second | (stream if short is None else short)
    macs = 0
    counted = {layer.name: layer for layer in measure_cost(small.model, x).layers}
    for name, (rows, columns) in predicted.items():
        cut = small.cuts[f"{name}.weight"]
        assert torch.equal(cut.rows, rows.nonzero()[:, 0])
        assert torch.equal(cut.columns, columns.nonzero()[:, 0])
        kernel = masked.get_submodule(name).weight[0, 0].numel()
        # One column more where constants meet a padded edge.
        assert counted[name].weights == int(rows.sum()) * (int(columns.sum()) + cut.extra) * kernel
        assert cut.extra in ((0, 1) if kernel > 1 else (0,))
        macs += counted[name].weights * (32 if "layer" not in name else 64 >> int(name[5])) ** 2
    assert counted["fc"].weights == 10 * int(stream.sum())
    assert measure_cost(small.model, x).macs == macs + counted["fc"].weights


@torch.no_grad()
def kill_globally(model: nn.Module, sparsity: float) -> nn.Module:
    live_norms(model)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    scores = [torch.rand(len(conv.weight)) + 0.3 * torch.rand(()) for conv in convs]
    level = torch.cat(scores).quantile(sparsity)
    for conv, score in zip(convs, scores, strict=True):
        conv.weight[score < level] = 0
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20", "resnet110", "resnet18", "resnet34", "resnet50"])
def test_the_larger_ones(name):
    size = 64 if name in ("resnet18", "resnet34", "resnet50") else 32
    assert_same(kill(models.build(name, 10), 0.5), torch.randn(2, 3, size, size))


def test_what_is_left_is_counted_exactly():
    """Two layers by hand: 2 of 4 filters live in the first, 3 of 5 in the second."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 5, 3, bias=False))
    with torch.no_grad():
        net[0].weight[[1, 3]] = 0
        net[2].weight[[0, 4]] = 0
    small = compact(nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)), torch.zeros(1, 3, 8, 8))
    shapes = {name: tuple(p.shape) for name, p in small.model.named_parameters()}
    assert shapes == {"0.0.weight": (2, 3, 3, 3), "0.2.weight": (3, 2, 3, 3), "3.weight": (2, 3), "3.bias": (2,)}


# -- random networks -------------------------------------------------------------------------------


def some(*choices):
    return choices[int(torch.randint(len(choices), ()))]


def random_conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    size = some(1, 3, 5)
    mode = some("zeros", "zeros", "reflect", "circular")
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=some(True, False), padding_mode=mode)


def activation() -> nn.Module:
    return some(nn.ReLU(inplace=True), nn.ReLU(), nn.Hardswish(), nn.GELU(), nn.LeakyReLU(0.1), nn.Sigmoid())


class PostBlock(nn.Module):
    """relu(F(x) + shortcut(x)), the sum in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = some(3, 5, 8)
        self.conv1, self.bn1, self.act1 = random_conv(inputs, width, stride), nn.BatchNorm2d(width), activation()
        self.conv2, self.bn2 = random_conv(width, outputs), nn.BatchNorm2d(outputs)
        self.short = None
        if stride > 1 or inputs != outputs or torch.rand(()) < 0.3:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        out += x if self.short is None else self.short(x)
        return self.relu(out)


class PreBlock(nn.Module):
    """F(act(bn(x))) + shortcut, and the in-place activation that changes x for the shortcut as well."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(inputs), activation()
        self.conv1, self.conv2 = random_conv(inputs, outputs, stride), random_conv(outputs, outputs)
        self.short = random_conv(inputs, outputs, stride) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.act(self.bn(x))
        out = self.conv2(F.relu(self.conv1(active), inplace=True))
        return (x if self.short is None else self.short(active)) + 0.5 * out


class Mobile(nn.Module):
    """Depthwise convolution, squeeze and excitation, linear bottleneck."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 2 * inputs
        self.up, self.bn1 = nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=some(True, False))
        self.bn2 = nn.BatchNorm2d(wide)
        self.down, self.bn3 = nn.Conv2d(wide, outputs, 1), nn.BatchNorm2d(outputs)
        self.squeeze, self.excite = nn.Conv2d(wide, 3, 1), nn.Conv2d(3, wide, 1)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu6(self.bn2(self.depth(F.relu6(self.bn1(self.up(x))))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(out, 1)))).sigmoid()
        out = self.bn3(self.down(out * gate))
        return x + out if self.adds else out


class Dense(nn.Module):
    """Concatenation, pooling of several kinds."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.left, self.right = random_conv(inputs, 4), nn.Sequential(random_conv(inputs, 5), nn.BatchNorm2d(5))
        self.mix = nn.Conv2d(inputs + 9, outputs, 1)
        self.pool = some(
            nn.MaxPool2d(3, stride, 1), nn.AvgPool2d(3, stride, 1), nn.AvgPool2d(3, stride, 1, True, False)
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.pool(self.mix(torch.cat([self.left(x), x, self.right(x)], dim=1))))


class RandomNet(nn.Module):
    def __init__(self, flat: bool) -> None:
        super().__init__()
        widths = [some(4, 6, 9) for _ in range(4)]
        self.stem, self.bn = random_conv(2, widths[0]), nn.BatchNorm2d(widths[0])
        kinds = [some(PostBlock, PreBlock, Mobile, Dense) for _ in range(3)]
        pairs = zip(kinds, widths, [some(w, widths[i + 1]) for i, w in enumerate(widths[:-1])], strict=False)
        blocks, now = [], widths[0]
        for kind, _, width in pairs:
            blocks.append(kind(now, width, some(1, 1, 2)))
            now = width
        self.blocks = nn.Sequential(*blocks)
        self.flat = flat
        with torch.no_grad():
            features = self.features(torch.zeros(1, 2, 9, 9)).shape[1]
        self.fc = nn.Linear(features, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        self.blocks.eval()
        self.bn.eval()
        x = self.blocks(torch.relu(self.bn(self.stem(x))))
        return x.view(x.size(0), -1) if self.flat else x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.fc(self.features(x)))))


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_random_residual_networks_with_random_filters_dead(share, block):
    for seed in range(4):
        torch.manual_seed(seed)
        model = kill(RandomNet(flat=seed % 2 == 0), share)
        with torch.no_grad():
            for linear in (model.fc, model.head):
                linear.weight[torch.rand(len(linear.weight)) < share / 2] = 0
        small = assert_same(model, torch.randn(2, 2, 9, 9), block)
        if seed % 2 and block == 1:  # nothing in it depends on the image's size
            x = torch.randn(3, 2, 12, 11)
            torch.testing.assert_close(small(x), model.float()(x), rtol=1e-5, atol=1e-5)
        pads = any(isinstance(m, nn.AvgPool2d) and m.count_include_pad for m in model.modules())
        if block == 1 and not pads:  # whose average is not constant at the edges
            rows = [p.flatten(1).any(1) for n, p in small.named_parameters() if n.endswith("weight") and p.ndim == 4]
            assert sum(int((~row).sum()) for row in rows if len(row) > 1) == 0


class Branches(nn.Module):
    """Blocks of two branches, both with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = random_conv(2, 5)
        shapes = [(5, 7, some(1, 2)), (7, 6, 1), (6, 9, 2)]
        self.blocks = nn.Sequential(*(some(PostBlock, PreBlock)(*shape) for shape in shapes))
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@torch.no_grad()
@pytest.mark.parametrize("dead", [("short",), ("conv2",), ("conv1",), ("conv1", "conv2"), ("short", "conv2")], ids=str)
def test_whole_branches_dead(dead):
    """Any block's shortcut, its other branch, or both; what is dead leaves nothing behind but its constant."""
    for seed in range(6):
        torch.manual_seed(seed)
        model = kill(Branches(), 0.3)
        place = seed % 3
        for name in dead:
            for module in getattr(model.blocks[place], name).modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.zero_()
        small = assert_same(model, torch.randn(2, 2, 9, 9), block=1 if seed < 3 else 4)
        assert_same_at_other_sizes(model.float(), small)
        if seed >= 3:
            continue
        # One filter may stay, to carry batch and image size.
        for name, parameter in small.named_parameters():
            of_the_dead = [f"blocks.{place}.{part}." for part in dead]
            assert len(parameter) <= 1 or not name.startswith(tuple(of_the_dead)), name


@torch.no_grad()
def assert_same_at_other_sizes(model: nn.Module, small: nn.Module) -> None:
    for size in ((12, 11), (6, 7)):
        x = torch.randn(3, 2, *size, dtype=next(model.parameters()).dtype)
        torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 5])
def test_constants_end_at_the_edge_whatever_the_size_of_the_example(groups):
    """On a single pixel every constant looks the same everywhere; on larger images it does not."""
    model = nn.Sequential(nn.Conv2d(2, 5, 1), nn.BatchNorm2d(5), nn.Conv2d(5, 5, 3, padding=1, groups=groups))
    live_norms(model)
    model[0].weight[:3] = 0
    small = compact(model.eval(), torch.zeros(1, 2, 1, 1)).model
    assert_same_at_other_sizes(model, small)
    model[0].weight.zero_()  # constants alone
    assert_same_at_other_sizes(model, compact(model, torch.zeros(1, 2, 1, 1)).model)


def test_a_whole_network_of_dead_layers_is_a_constant():
    model = models.build("resnet8-digits", 4, 2)
    live_norms(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.zero_()
    small = assert_same(model.eval(), torch.randn(2, 2, 8, 8))
    assert sum(p.numel() for p in small.parameters()) < 100


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("transformer", "buffers")])
def test_networks_of_many_kinds(name):
    """What cannot be made smaller stays as it is, is named, and computes the same."""
    make, shape = NETWORKS[name]
    model = kill(make(), 0.5)
    assert_same(model, batch(shape, 2, torch.float)[0])


def test_what_is_not_understood_is_named():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = 0
    left = compact(model.eval(), torch.zeros(1, 2, 8, 8)).left
    assert left[0].startswith("1 (GroupNorm)")


def test_a_network_that_cannot_be_traced_is_refused():
    class Branchy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UserError, match=r"Branchy cannot be traced: .* it asks for the value of a tensor"):
        compact(Branchy(), torch.zeros(1, 2))


# -- training goes on ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:these layers lost")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_training_goes_on_with_the_same_momentum(kind):
    torch.manual_seed(1)
    model = models.build("resnet8-digits", 4, 2)
    net = SparseNet(model, DCIL(sparsity=0.5, steps=4, granularity=Filter(), warmup=0.0))
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[kind]
    old = optimizer(net.parameters())
    for _ in range(5):
        x, y = batch((2, 8, 8), dtype=torch.float)
        loss = net.loss(net(x), y)
        old.zero_grad()
        loss.backward()
        old.step()
        net.step(old)
    small = compact(net.finalize(), x)
    new = optimizer(small.model.parameters())
    old.param_groups[0]["lr"] *= 0.5  # as a schedule would
    carry_optimizer(old, net.model, new, small)
    assert new.param_groups[0]["lr"] == old.param_groups[0]["lr"]
    key = {"sgd": "momentum_buffer", "adam": "exp_avg"}[kind]
    carried = dict(small.model.named_parameters())["fc.bias"]
    assert torch.equal(new.state[carried][key], old.state[model.fc.bias][key])
    cut, weight = small.cuts["layer1.0.conv1.weight"], small.model.get_parameter("layer1.0.conv1.weight")
    large = old.state[model.layer1[0].conv1.weight][key]
    inside = new.state[weight][key][:, : len(cut.columns)]
    assert torch.equal(inside, large[cut.rows][:, cut.columns])
    small.model.train()
    before = F.cross_entropy(small.model(x), y)
    for _ in range(4):
        new.zero_grad()
        F.cross_entropy(small.model(x), y).backward()
        new.step()
    assert F.cross_entropy(small.model(x), y).item() < before.item()
