"""What a recording finds against what torch.export finds; whatever it cannot follow is left to torch.export."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_runtime import Branches, Everything, pruned
from torch import nn

from dcil import UserError, models
from dcil.export import export
from dcil.runtime import load
from dcil.runtime import lower as lowering
from dcil.runtime.lower import RULES, Lowering, lower
from dcil.runtime.record import NotRecordedError, record


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


def recorded(model, x):
    with torch.no_grad():
        return Lowering(*record(model.eval(), x, RULES)).run()


def exported(model, x, monkeypatch):
    """As `lower` was before there were recordings."""

    def refused(*_):
        raise NotRecordedError

    with monkeypatch.context() as patch:
        patch.setattr(lowering, "record", refused)
        return lower(model, x)


@pytest.mark.parametrize("make", [Named, Everything, Branches, *(["resnet20", "wrn-10-1", "resnet18", "resnet50"])])
def test_the_same_plan_as_from_torch_export(make, monkeypatch):
    torch.manual_seed(0)
    model, x = pruned(models.build(make) if isinstance(make, str) else make()), torch.randn(2, 3, 64, 48)
    found, want = recorded(model, x), exported(model, x, monkeypatch)
    assert (found.input, found.input_rank, found.output_rank) == (want.input, want.input_rank, want.output_rank)
    assert len(found.ops) == len(want.ops)
    for a, b in zip(found.ops, want.ops, strict=True):
        assert a.arrays.keys() == b.arrays.keys()
        assert all(np.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)
        assert replace(a, arrays={}) == replace(b, arrays={})


def test_known_networks_do_without_torch_export(monkeypatch):
    monkeypatch.setattr(torch.export, "export", None)
    assert len(lower(pruned(models.build("resnet20")), torch.randn(1, 3, 32, 32)).ops) == 23


class Odd(nn.Module):
    """Something that no list of operators holds."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what, self.loose = nn.Conv2d(3, 3, 1), what, torch.ones(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        y = self.conv(x)
        if self.what == "looks at numbers" and y.sum() > 0:
            return y
        if self.what == "asks for a number" and y.mean((2, 3)).flatten()[0].item() > 0:
            return y
        if self.what == "another tensor":
            return y + self.loose
        if self.what == "an unknown argument":
            return y.mean(axis=(2, 3))
        if self.what == "weights made on the way":
            return F.conv2d(x, 2 * self.conv.weight)
        return [y] if self.what == "a list" else y * 2


ODD = ["looks at numbers", "asks for a number", "another tensor", "an unknown argument", "weights made on the way"]


@pytest.mark.parametrize("what", [*ODD, "a list", "an operator without a kernel"])
def test_what_cannot_be_followed_is_not_recorded(what):
    with pytest.raises(NotRecordedError):
        recorded(Odd(what), torch.randn(2, 3, 8, 8))


def test_torch_export_takes_over():
    """A layer that is called as no recording knows it, and one that only torch.export can name."""
    x = torch.randn(1, 3, 8, 8)
    assert [op.kind for op in lower(Odd("an unknown argument"), x).ops] == ["conv", "mean"]
    with pytest.raises(UserError, match="mul in module 'the network itself'"):
        lower(Odd("an operator without a kernel"), x)


def test_dropout_that_stays_on_is_refused():
    class Always(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5, training=True)

    with pytest.raises(UserError, match="training mode"):
        lower(Always(), torch.randn(1, 3, 8, 8))


@torch.jit.script
def scripted_relu_(x: torch.Tensor) -> torch.Tensor:
    return x.relu_()


class Unseen(nn.Module):
    """What a recording could take for something else."""

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

    with pytest.raises(UserError, match="only the mean over height and width"):
        lower(Mean(), torch.randn(1, 3, 8, 8))


def test_a_network_that_asks_for_the_size_of_the_batch_is_refused(tmp_path):
    class Asks(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self[0](x)
            return (y.relu() if len(x) > 1 else y).mean((2, 3))

    with pytest.raises(UserError, match="does not treat one image as it treats several"):
        export(Asks(nn.Conv2d(3, 4, 1)), "cpu", tmp_path / "net.dcil", example=torch.randn(1, 3, 8, 8))
