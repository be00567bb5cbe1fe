"""Loggers: the metrics arrive in TensorBoard, W&B and MLflow, through Lightning's callback and from a plain loop."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import mlflow
import pytest
import torch
import wandb
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import dcil
from dcil.integrations.lightning import SparsityCallback

STEPS = 8
METHOD = dcil.DCIL(sparsity=0.5, steps=STEPS, every=2, warmup=0.25, kl=0.5)
#: What must be logged: loss parts, KL weight, flips, sparsity in all and by layer.
WANTED = {"loss/pruned", "loss/super", "loss/kl", "kl_weight", "flips/revived", "flips/dropped"}
WANTED |= {"sparsity", "layer_sparsity/0.weight", "layer_sparsity/2.weight"}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(STEPS)]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = network()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = self.net.loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_lightning(folder: Path, *loggers: Any) -> dict[str, float]:
    module = Module()
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "log_every_n_steps": 2,
        "default_root_dir": folder,
    }
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(logger=list(loggers), callbacks=[SparsityCallback(METHOD)], **settings)
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return {name.replace("loss/", "losses/"): value for name, value in checked(module.net).items()}


def checked(net: dcil.SparseNet) -> dict[str, float]:
    """The metrics at the end, after a look at them."""
    metrics = net.metrics()
    assert metrics.keys() >= WANTED and metrics["step"] == net.steps_done == STEPS
    assert metrics["sparsity"] == pytest.approx(net.sparsity) and metrics["kl_weight"] == 0.5
    whole = sum(metrics[f"layer_sparsity/{name}"] * mask.numel() for name, mask in net.masks.items())
    assert whole == pytest.approx(sum(int((~mask).sum()) for mask in net.masks.values()))
    return metrics


def assert_logged(got: dict[str, float], metrics: dict[str, float]) -> None:
    assert got.keys() >= metrics.keys() - {"step"}
    for name in metrics.keys() - {"step"}:
        assert got[name] == pytest.approx(metrics[name], rel=1e-5), name


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    (events,) = folder.rglob("events.*")
    found = EventAccumulator(str(events)).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_by_the_callback(tmp_path):
    metrics = train_with_lightning(tmp_path, TensorBoardLogger(tmp_path), CSVLogger(tmp_path / "csv"))
    logged = read_tensorboard(tmp_path)
    assert_logged({name: values[-1][1] for name, values in logged.items()}, metrics)
    assert [step for step, _ in logged["sparsity"]] == [1, 3, 5, 7]  # every second, as Lightning logs
    with open(tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for name in ("sparsity", "loss"):  # at the same steps as what the module logs
        assert [int(row["step"]) for row in rows if row[name]] == [1, 3, 5, 7]


def test_wandb_by_the_callback(tmp_path):
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    metrics = train_with_lightning(tmp_path, logger)
    assert_logged(dict(logger.experiment.summary), metrics)
    wandb.finish()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store in files, which has folders for the slashes in names."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield (tmp_path / "mlruns").as_uri()
    mlflow.set_tracking_uri(None)  # global, and set by Lightning's logger too


def test_mlflow_by_the_callback(tmp_path, store):
    logger = MLFlowLogger(tracking_uri=store)
    metrics = train_with_lightning(tmp_path, logger)
    assert_logged(logger.experiment.get_run(logger.run_id).data.metrics, metrics)
    history = logger.experiment.get_metric_history(logger.run_id, "sparsity")
    assert [point.step for point in history] == [1, 3, 5, 7]


def train_plainly(log: Any) -> dict[str, float]:
    net = dcil.SparseNet(network(), METHOD)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net.attach(opt)
    for x, y in batches():
        opt.zero_grad()
        net.loss(net(x), y).backward()
        opt.step()
        log(net)
    return checked(net)


def test_tensorboard_in_a_plain_loop(tmp_path):
    with SummaryWriter(tmp_path) as writer:

        def log(net: dcil.SparseNet) -> None:
            for name, value in net.metrics().items():
                writer.add_scalar(name, value, net.steps_done)

        metrics = train_plainly(log)
    assert_logged({name: values[-1][1] for name, values in read_tensorboard(tmp_path).items()}, metrics)


def test_wandb_in_a_plain_loop(tmp_path):
    with wandb.init(mode="offline", dir=tmp_path) as run:
        metrics = train_plainly(lambda net: run.log(net.metrics()))
        assert_logged(dict(run.summary), metrics)


def test_mlflow_in_a_plain_loop(store):
    mlflow.set_tracking_uri(store)
    with mlflow.start_run(experiment_id="0") as run:
        metrics = train_plainly(lambda net: mlflow.log_metrics(net.metrics(), step=net.steps_done))
    assert_logged(mlflow.get_run(run.info.run_id).data.metrics, metrics)
