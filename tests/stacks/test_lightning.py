"""Lightning: two lines, and the same training bit for bit as in a plain loop."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torchvision_operators  # noqa: F401 - first, for child processes: Lightning imports torchvision

# isort: split
import lightning as L
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from processes import said, together
from torch import Tensor, nn
from torch.utils.data import DataLoader
from two_networks import assert_gradients, dcil_loss, gradients

import dcil
from dcil.integrations.lightning import SparsityCallback

STEPS = 24
METHOD = dcil.DCIL(sparsity=0.8, steps=STEPS, every=4, warmup=0.25)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(12)]


def loader() -> DataLoader:
    return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


class Module(L.LightningModule):
    """A user's module as it was before, but for the loss."""

    def __init__(self, method: dcil.Method | None = None) -> None:
        super().__init__()
        self.net: Any = network()
        if method is not None:
            self.net = dcil.SparseNet(self.net, method)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return self.net.loss(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Checking(Module):
    """Holds the gradients of every optimizer step against two plain networks."""

    def __init__(self, method: dcil.Method | None = None) -> None:
        super().__init__(method)
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.checked = 0

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.batches.append(batch)
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        def loss(pruned: nn.Module, super_net: nn.Module) -> Tensor:
            parts = [dcil_loss(self.net, pruned(x), super_net(x), y) for x, y in self.batches]
            return torch.stack(parts).mean()

        assert_gradients(self.net, gradients(self.net, loss), 1e-9)
        self.batches.clear()
        self.checked += 1


def trainer(folder: Path, *callbacks: Any, package: Any = L, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    quiet |= {"default_root_dir": folder, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return package.Trainer(callbacks=list(callbacks), **(quiet | {"max_epochs": 2, "devices": 1} | settings))


def plain_loop(method: dcil.Method = METHOD, accumulate: int = 1) -> dcil.SparseNet:
    net = dcil.SparseNet(network(), method)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.attach(opt)
    for number, (x, y) in enumerate(batches() * 2):
        (net.loss(net(x), y) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            opt.step()
            opt.zero_grad()
    return net


def assert_same(net: dcil.SparseNet, other: dcil.SparseNet) -> None:
    assert net.steps_done == other.steps_done
    state = other.state_dict()
    assert net.state_dict().keys() == state.keys()
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("package", [L, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def test_two_lines_train_as_a_plain_loop_does(tmp_path, package):
    base = type("Plain", (package.LightningModule,), {k: v for k, v in vars(Module).items() if k != "__init__"})
    module = base()
    module.net = network()
    trainer(tmp_path, SparsityCallback(METHOD), package=package).fit(module, loader())
    assert_same(module.net, plain_loop())
    assert module.net.steps_done == STEPS and module.net.sparsity == pytest.approx(0.8, abs=2e-3)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_those_of_two_plain_networks(tmp_path, accumulate):
    module = Checking(dcil.DCIL(sparsity=0.8, steps=STEPS // accumulate, every=2, warmup=0.25))
    run = trainer(tmp_path, SparsityCallback(), accumulate_grad_batches=accumulate, precision="64-true")
    run.fit(module, loader())
    assert module.checked == module.net.steps_done == STEPS // accumulate
    assert module.net.sparsity > 0.75


def test_accumulation_is_counted_once_per_optimizer_step(tmp_path):
    module = Module(METHOD)
    trainer(tmp_path, SparsityCallback(), accumulate_grad_batches=4).fit(module, loader())
    assert_same(module.net, plain_loop(accumulate=4))
    assert module.net.steps_done == 6


def test_finalize_is_the_pruned_path(tmp_path):
    module = Module()
    trainer(tmp_path, SparsityCallback(METHOD)).fit(module, loader())
    x = torch.randn(5, 6)
    sparse = module.net.finalize()
    assert type(sparse) is nn.Sequential and torch.equal(sparse(x), module.net.eval()(x))
    zeros = sum(int((sparse.get_parameter(name) == 0).sum()) for name in module.net.masks)
    assert zeros == int(0.8 * sum(mask.numel() for mask in module.net.masks.values()))


class Manual(Module):
    """Manual optimization, an optimizer step every second batch."""

    def __init__(self, method: dcil.Method) -> None:
        super().__init__(method)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        opt = self.optimizers()
        self.manual_backward(super().training_step(batch, index) / 2)
        if index % 2:
            opt.step()
            opt.zero_grad()


def test_manual_optimization_counts_the_steps_taken(tmp_path):
    module = Manual(METHOD)
    trainer(tmp_path, SparsityCallback()).fit(module, loader())
    assert_same(module.net, plain_loop(accumulate=2))


class TwoNets(L.LightningModule):
    """Two networks, each with its own optimizer, stepping at different paces."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = (dcil.SparseNet(network(), METHOD) for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        for number, (net, opt) in enumerate(zip((self.one, self.two), self.optimizers(), strict=True)):
            self.manual_backward(net.loss(net(x), y))
            if number == 0 or index % 2:
                opt.step()
                opt.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.two)]


def test_every_net_counts_its_own_optimizers_steps(tmp_path):
    module = TwoNets()
    trainer(tmp_path, SparsityCallback()).fit(module, loader())
    assert (module.one.steps_done, module.two.steps_done) == (24, 12)


class Overflowing(Module):
    """Every third loss is infinite, as half precision gives now and then."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) * (float("inf") if index % 3 == 2 else 1.0)


def test_steps_that_the_scaler_skips_are_not_counted(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module = Overflowing(METHOD)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    trainer(tmp_path, SparsityCallback(), plugins=[plugin]).fit(module, loader())
    assert module.net.steps_done == 16  # 8 of 24 were skipped


def test_bf16_precision(tmp_path):
    module = Module(METHOD)
    trainer(tmp_path, SparsityCallback(), precision="bf16-mixed").fit(module, loader())
    assert module.net.steps_done == STEPS and module.net.sparsity == pytest.approx(0.8, abs=2e-3)


@pytest.mark.parametrize("wrap_in_callback", [True, False])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, wrap_in_callback):
    def parts() -> tuple[Module, SparsityCallback]:
        return (Module(), SparsityCallback(METHOD)) if wrap_in_callback else (Module(METHOD), SparsityCallback())

    module, callback = parts()
    saving = ModelCheckpoint(tmp_path, filename="middle", every_n_train_steps=12, save_top_k=-1)
    trainer(tmp_path, callback, saving, max_epochs=1, enable_checkpointing=True).fit(module, loader())
    again, callback = parts()
    trainer(tmp_path, callback).fit(again, loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert_same(again.net, plain_loop())


def test_a_checkpoint_is_loaded_and_tested_elsewhere(tmp_path):
    module = Module(METHOD)
    run = trainer(tmp_path, SparsityCallback())
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "end.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "end.ckpt", method=METHOD)
    assert_same(loaded.net, module.net)
    fresh = Module()
    run = trainer(tmp_path, SparsityCallback(METHOD))
    (result,) = run.validate(fresh, loader(), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    sparse = module.net.finalize()
    want = torch.stack([F.cross_entropy(sparse(x), y) for x, y in batches()]).mean()
    assert result["val_loss"] == pytest.approx(float(want), rel=1e-5)


def test_a_second_fit_does_not_count_double(tmp_path):
    module = Module(METHOD)
    trainer(tmp_path, SparsityCallback(), max_epochs=1).fit(module, loader())
    trainer(tmp_path, SparsityCallback(), max_epochs=1).fit(module, loader())
    assert module.net.steps_done == STEPS


def test_weights_are_averaged_with_the_latest_masks_or_not_at_all(tmp_path):
    with pytest.raises(dcil.UserError, match=r"must not average buffers.*use_buffers=False"):
        trainer(tmp_path, SparsityCallback(METHOD), EMAWeightAveraging()).fit(Module(), loader())
    for average in (EMAWeightAveraging(use_buffers=False), StochasticWeightAveraging(0.1)):
        with pytest.raises(dcil.UserError, match="must come after SparsityCallback"):
            trainer(tmp_path, average, SparsityCallback(METHOD)).fit(Module(), loader())
    module, plain = Module(), plain_loop()
    trainer(tmp_path, SparsityCallback(METHOD), EMAWeightAveraging(use_buffers=False)).fit(module, loader())
    assert all(torch.equal(mask, plain.masks[name]) for name, mask in module.net.masks.items())
    assert not torch.equal(module.net.model[0].weight, plain.model[0].weight)


def test_stochastic_weight_averaging(tmp_path):
    module = Module()
    run = trainer(tmp_path, SparsityCallback(METHOD), StochasticWeightAveraging(0.01, swa_epoch_start=1))
    run.fit(module, loader())
    # Its last pass, for the batch norms, ends in an optimizer step without gradients, which Lightning counts too.
    assert module.net.steps_done == run.global_step == STEPS + 1
    assert module.net.sparsity == pytest.approx(0.8, abs=2e-3)
    x = torch.randn(5, 6)
    assert torch.equal(module.net.finalize()(x), module.net.eval()(x))


def test_the_search_for_a_learning_rate_leaves_no_trace(tmp_path):
    class Searching(Module):
        lr = 0.1

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    module = Searching()
    run = trainer(tmp_path, SparsityCallback(METHOD))
    Tuner(run).lr_find(module, loader(), num_training=10, update_attr=False)
    assert module.net.steps_done == 0 and module.net.sparsity == 0
    run.fit(module, loader())
    assert_same(module.net, plain_loop())


def test_a_network_made_in_configure_model(tmp_path):
    class Late(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = dcil.SparseNet(network(), METHOD)

    module = Late()
    trainer(tmp_path, SparsityCallback()).fit(module, loader())
    assert_same(module.net, plain_loop())


def test_fabric_needs_no_adapter():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    net = dcil.SparseNet(network(), METHOD)
    wrapped, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    net.attach(opt)
    for x, y in batches() * 2:
        opt.zero_grad()
        fabric.backward(net.loss(wrapped(x), y))
        opt.step()
    assert_same(net, plain_loop())


def test_what_cannot_be_right_is_refused(tmp_path):
    with pytest.raises(dcil.UserError, match=r"must have a SparseNet, got none.*SparsityCallback\(dcil.DCIL"):
        trainer(tmp_path, SparsityCallback()).fit(Module(), loader())

    class Forgetting(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.model.parameters(), lr=0.1)

    with pytest.raises(dcil.UserError, match=r"must hold every parameter of net.*super\."):
        trainer(tmp_path, SparsityCallback(METHOD)).fit(Forgetting(), loader())
    module = Module()
    module.other = network()
    with pytest.raises(dcil.UserError, match=r"one network, got net, other.*net="):
        trainer(tmp_path, SparsityCallback(METHOD)).fit(module, loader())


def test_a_callback_can_be_copied():
    assert copy.deepcopy(SparsityCallback(METHOD, net="net")).method == METHOD


# -- two processes -------------------------------------------------------------------------------------------------


def without_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def one_of_two(folder: Path) -> None:
    """What each process does; torchrun's environment keeps Lightning from starting processes by itself."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    rank = int(os.environ["RANK"])
    module = Module()
    module.net = without_batch_norm()
    share = DataLoader(batches()[rank::2], batch_size=None)  # type: ignore[arg-type]
    settings = {"strategy": "ddp", "devices": 2, "precision": "64-true", "use_distributed_sampler": False}
    trainer(folder, SparsityCallback(METHOD), max_epochs=4, **settings).fit(module, share)
    torch.save(module.net.state_dict(), folder / f"{rank}.pt")


def test_two_processes_are_one_with_the_joint_batch(tmp_path):
    assert together(2, tmp_path / "said", one_of_two, tmp_path) == [0, 0], said(tmp_path / "said")
    net = dcil.SparseNet(without_batch_norm().double(), METHOD)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.attach(opt)
    data = batches()
    for (x, y), (more_x, more_y) in list(zip(data[::2], data[1::2], strict=True)) * 4:
        opt.zero_grad()
        net.loss(net(torch.cat([x, more_x]).double()), torch.cat([y, more_y])).backward()
        opt.step()
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt")
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{name}: {text}")
