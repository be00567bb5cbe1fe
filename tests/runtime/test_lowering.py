"""From a network to the operators of a plan: unusual calls are computed right or refused in one line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_runtime import TOLERANCE, Branches, Everything, difference, pruned, quick
from torch import nn

from dcil import UserError, models
from dcil.export import export
from dcil.runtime import load
from dcil.runtime.lower import lower


class Named(nn.Module):
    """Arguments by name, sizes asked for, results written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.act, self.tanh = nn.ReLU(inplace=True), nn.Hardtanh(-1.0, 2.0, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tanh(self.bn(self.conv(input=x)))
        y += F.dropout(y, p=0.5, training=self.training)
        y = self.act(torch.cat(tensors=[y, y.clamp(min=0.1)], dim=1).contiguous())
        y = F.max_pool2d(y, kernel_size=2, stride=1) if y.shape[1] == 16 else y
        return y.mean(dim=(2, 3)).view(x.size(0), -1)


@pytest.mark.parametrize("make", [Named, Everything, Branches, *(["resnet20", "wrn-10-1", "resnet18", "resnet50"])])
def test_the_plan_computes_what_torch_exports_program_computes(make):
    """torch.export finds the operators of a network in another way."""
    torch.manual_seed(0)
    model, x = pruned(models.build(make) if isinstance(make, str) else make()), torch.randn(2, 3, 64, 48)
    program = torch.export.export(model, (x,), strict=False).module()
    with torch.no_grad():
        assert difference(quick(lower(model, x))(x.numpy()), program(x)) < TOLERANCE


def test_known_networks_have_one_operator_per_layer_and_pool():
    network = lower(pruned(models.build("resnet20")), torch.randn(1, 3, 32, 32))
    assert [op.kind for op in network.ops].count("conv") == 21 and len(network.ops) == 23


class Odd(nn.Module):
    """Something that a plan does not hold."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what = nn.Conv2d(3, 3, 1), what

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        y = self.conv(x)
        if self.what == "looks at numbers" and y.sum() > 0:
            return y
        if self.what == "asks for a number" and y.mean((2, 3)).flatten()[0].item() > 0:
            return y
        if self.what == "another item":
            return y + y.flip(0)
        if self.what == "noise":
            return y + torch.rand(3, 8, 8)
        if self.what == "weights from the input":
            return F.conv2d(x, x[:1, :, :1, :1])
        return [] if self.what == "nothing" else y.sin()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("looks at numbers", "Odd cannot be traced: in the network itself, it asks for the value of a tensor"),
        ("asks for a number", "Odd cannot be traced: in the network itself, it asks for the value of a tensor"),
        ("another item", "add in the network itself: an operand that mixes the items of a batch"),
        ("noise", "no CPU kernel for rand in the network itself"),
        ("weights from the input", "a weight that depends on the network's input"),
        ("nothing", "must return tensors"),
        ("an operator without a kernel", "no CPU kernel for sin in the network itself"),
    ],
)
def test_what_a_plan_cannot_hold_is_refused(what, why):
    with pytest.raises(UserError, match=why) as found:
        lower(Odd(what), torch.randn(2, 3, 8, 8))
    assert "\n" not in str(found.value)


class Made(nn.Module):
    """Weights that the forward makes of its parameters, uneven padding, arguments by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(3, 4, 4, padding="same", dilation=(1, 2)), nn.Parameter(torch.rand(4, 1, 1, 1))
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(x))
        y = F.conv2d(F.pad(y, (2, 0, 1, 3)), self.gain * self.second.weight, stride=2, padding=1)
        return y.mean(axis=(2, 3))


@torch.no_grad()
def test_weights_are_computed_once_and_padding_may_be_uneven():
    torch.manual_seed(0)
    model, x = Made().eval(), torch.randn(3, 3, 9, 11)
    network = lower(model, x)
    assert [op.kind for op in network.ops] == ["conv", "conv", "mean"]
    assert difference(quick(network)(x.numpy()), model(x)) < TOLERANCE


def test_dropout_that_stays_on_is_refused():
    class Always(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5, training=True)

    with pytest.raises(UserError, match=r"no CPU kernel for .*bernoulli in the network itself"):
        lower(Always(), torch.randn(1, 3, 8, 8))


@torch.jit.script
def scripted_relu_(x: torch.Tensor) -> torch.Tensor:
    return x.relu_()


class Unseen(nn.Module):
    """Calls that could be taken for something else."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.bn, self.what = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), what
        self.bn.running_mean.normal_(), self.bn.running_var.uniform_(0.5, 2), self.bn.weight.data.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.what == "a scripted function":
            scripted_relu_(y)
            return y.mean((2, 3))
        if self.what == "statistics at the end":
            n = self.bn
            y = torch.batch_norm(
                y, n.weight, n.bias, n.running_mean, n.running_var,
                training=False, momentum=0.1, eps=1e-5, cudnn_enabled=False,
            )  # fmt: skip
        if self.what == "one after the other in place":
            y.relu_().add_(self.conv(x))
        return y.mean((2, 3))


@pytest.mark.parametrize("what", ["a scripted function", "statistics at the end", "one after the other in place"])
def test_unusual_calls_are_computed_right(what, tmp_path):
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 8, 8), Unseen(what).eval()
    export(model, "cpu", tmp_path / "net.dcil", example=x)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(load(tmp_path / "net.dcil")(x.numpy())), model(x))


def test_an_operator_of_the_same_name_is_not_torchs(tmp_path):
    relu6 = torch.library.custom_op(
        "dcil_test::relu6", lambda x: x.clamp(0, 8), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    relu6.register_fake(lambda x: torch.empty_like(x))

    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.dcil_test.relu6(self[0](x))

    with pytest.raises(UserError, match="no CPU kernel for"):
        export(Own(nn.Conv2d(3, 4, 1)), "cpu", tmp_path / "net.dcil", example=torch.randn(1, 3, 8, 8))


class Shared(nn.Module):
    """In place on a view, or on what a view was taken of; then the other one is read."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.conv, self.view = nn.Conv2d(3, 4, 1), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        flat = y.flatten(1)
        (flat if self.view else y).clamp_(-20, 20)
        return y.mean((2, 3)) if self.view else flat


@pytest.mark.parametrize("view", [True, False])
def test_shared_memory_changed_in_place_is_refused(view, tmp_path):
    with pytest.raises(UserError, match="memory that another tensor shares"):
        export(Shared(view), "cpu", tmp_path / "net.dcil", example=torch.randn(1, 3, 8, 8))
    assert not (tmp_path / "net.dcil").exists()


def test_the_mean_over_one_dimension_is_refused_in_one_line():
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(3)

    with pytest.raises(UserError, match="only the mean over all dimensions but the batch and the channels"):
        lower(Mean(), torch.randn(1, 3, 8, 8))


def test_a_network_that_asks_for_the_size_of_the_batch_is_refused(tmp_path):
    class Asks(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self[0](x)
            return (y.relu() if len(x) > 1 else y).mean((2, 3))

    with pytest.raises(UserError, match="does not treat one image as it treats several"):
        export(Asks(nn.Conv2d(3, 4, 1)), "cpu", tmp_path / "net.dcil", example=torch.randn(1, 3, 8, 8))
