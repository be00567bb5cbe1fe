"""The networks are the published ones: layer counts, weight counts, keys, and the order the rest of dcil relies on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcil import models
from dcil.errors import UserError
from dcil.models.blocks import BasicBlock, Bottleneck
from dcil.models.wide import WideBlock

SMALL = ["resnet8-digits", "resnet20", "resnet56-bottleneck", "wrn-10-1", "resnet18", "resnet50"]


def convs(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize(
    ("name", "tensors", "weights"),
    [
        ("resnet8-digits", 9, 43_236),
        ("resnet20", 21, 270_256),
        ("resnet32", 33, 463_792),
        ("resnet44", 45, 657_328),
        ("resnet56", 57, 850_864),
        ("resnet110", 111, 1_721_776),
        ("resnet56-bottleneck", 85, 853_936),
        ("wrn-28-2", 28, 1_462_704),
        ("wrn-40-2", 40, 2_236_848),
    ],
)
def test_convolution_counts(name: str, tensors: int, weights: int) -> None:
    found = convs(models.build(name))
    assert len(found) == tensors
    assert sum(conv.weight.numel() for conv in found) == weights
    assert all(conv.bias is None for conv in found)


# Parameter and state-dict entry counts of torchvision.models.resnet*() and of the WRN paper's 36.5M network.
@pytest.mark.parametrize(
    ("name", "classes", "parameters", "entries"),
    [
        ("resnet18", 1000, 11_689_512, 122),
        ("resnet34", 1000, 21_797_672, 218),
        ("resnet50", 1000, 25_557_032, 320),
        ("wrn-28-10", 10, 36_479_194, 155),
    ],
)
def test_large_networks(name: str, classes: int, parameters: int, entries: int) -> None:
    with torch.device("meta"):
        model = models.build(name, classes)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == entries


def test_imagenet_keys_and_strides_are_torchvisions() -> None:
    with torch.device("meta"):
        model = models.build("resnet50", 1000)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer1.0.downsample.1.running_mean"] == (256,)
    assert shapes["layer4.2.conv3.weight"] == (2048, 512, 1, 1)
    assert shapes["layer4.2.bn3.num_batches_tracked"] == ()
    assert shapes["fc.weight"] == (1000, 2048)
    assert {key.split(".")[0] for key in shapes} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    first = model.get_submodule("layer2.0")
    assert isinstance(first, Bottleneck)
    assert (first.conv1.stride, first.conv2.stride) == ((1, 1), (2, 2))


@pytest.mark.parametrize("name", SMALL)
def test_forward_shape_and_gradient_everywhere(name: str) -> None:
    model = models.build(name, classes=7, channels=1)
    out = model(torch.randn(2, 1, 32, 32))
    assert out.shape == (2, 7)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_modules_are_registered_in_the_order_they_run(name: str) -> None:
    model = models.build(name)
    leaves = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d, nn.Linear))]
    ran: list[nn.Module] = []
    for leaf in leaves:
        leaf.register_forward_hook(lambda module, *_: ran.append(module))
    model(torch.randn(2, 3, 32, 32))
    assert ran == leaves
    assert leaves[-1] is model.fc


def test_blocks_are_the_identity_plus_a_branch() -> None:
    """With a silent branch a basic block and a bottleneck give relu(x), a pre-activation block gives x."""
    x = torch.randn(2, 16, 4, 4)
    for block in (BasicBlock(16, 16), Bottleneck(16, 4)):
        nn.init.zeros_((block.bn3 if isinstance(block, Bottleneck) else block.bn2).weight)
        torch.testing.assert_close(block(x), x.relu())
    wide = WideBlock(16, 16)
    nn.init.zeros_(wide.conv2.weight)
    torch.testing.assert_close(wide(x), x)


def test_a_projecting_wide_block_projects_the_activated_input() -> None:
    block, x = WideBlock(16, 32, stride=2), torch.randn(2, 16, 4, 4)
    nn.init.zeros_(block.conv2.weight)
    assert block.shortcut is not None
    torch.testing.assert_close(block(x), block.shortcut(block.bn1(x).relu()))


def test_initialization() -> None:
    torch.manual_seed(0)
    model = models.build("resnet20")
    widening = model.get_submodule("layer3.0.conv1").weight  # 32 to 64 channels: fan in and fan out differ
    assert abs(widening.std().item() / (2 / (64 * 9)) ** 0.5 - 1) < 0.02
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all() and (module.bias == 0).all()
    assert (model.get_submodule("fc").bias != 0).any()
    wide = models.build("wrn-10-1").get_submodule("fc")  # as in the authors' code
    assert (wide.bias == 0).all() and (wide.weight != 0).all()


def test_names_and_unknown_names() -> None:
    assert models.names() == list(models.MODELS)
    assert {"wrn-28-2", "wrn-28-4", "wrn-28-8", "wrn-28-10", "resnet56-bottleneck"} <= set(models.names())
    with pytest.raises(UserError, match="unknown model 'resnet-20': did you mean 'resnet20'"):
        models.build("resnet-20")


@pytest.mark.parametrize(("name", "message"), [("wrn-27-2", "6n \\+ 4.*28"), ("wrn-4-2", "6n"), ("wrn-28-0", "width")])
def test_impossible_wide_networks(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        models.build(name)
    assert "\n" not in str(caught.value) and name in str(caught.value)
