"""Config: everything that decides the result of a run. One frozen dataclass drives flags, help, record and resume."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from typing import Any

import torch

from dcil import METHODS, Filter, Method, Weight, data, models
from dcil.errors import UserError, unknown
from dcil.granularity import Granularity

GRANULARITIES: dict[str, Granularity] = {"weight": Weight(), "filter": Filter()}


def described(default: Any, help: str) -> Any:
    """A field with a default and the sentence that explains it, on the command line as in the record."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Phase:
    """A stretch of training: under the learning-rate schedule, or at one constant rate."""

    name: str
    epochs: int
    lr: float | None = None


@dataclass(frozen=True)
class Config:
    """Times are in epochs here; ``build_method`` turns them into the steps that a method counts in."""

    dataset: str = described("digits", "data set to train on")
    model: str = described("resnet8-digits", "network to train")
    method: str = described("dcil", "training method")
    sparsity: float = described(0.95, "fraction of the weights (or filters) to prune, from 0 to below 1")
    granularity: str = described("weight", "what is pruned as one piece")
    settings: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "further settings of the method, NAME=VALUE (see: dcil list METHOD)"}
    )
    epochs: int = described(60, "epochs of the training proper")
    target_epoch: int = described(45, "epoch at which the sparsity is reached")
    schedule: str = described("epoch", "the sparsity grows with each 'epoch', as the authors do, or with each 'step'")
    finetune_epochs: int = described(0, "epochs of training with fixed masks after that")
    finetune_lr: float = described(0.001, "constant learning rate of the fine-tuning")
    batch: int = described(64, "images per step")
    lr: float = described(0.1, "learning rate")
    milestones: tuple[int, ...] = described((30, 45), "epochs at which the learning rate falls")
    lr_decay: float = described(10.0, "factor by which it falls")
    lr_warmup_epochs: int = described(0, "epochs over which it grows linearly from --lr-warmup-from to --lr")
    lr_warmup_from: float = described(0.1, "learning rate at the start of that")
    momentum: float = described(0.9, "Nesterov momentum of SGD (0 = plain SGD)")
    weight_decay: float = described(1e-4, "L2 weight decay, on every parameter")
    seed: int = described(0, "seed of weights, data order and augmentation")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if self.granularity not in GRANULARITIES:
            raise unknown("granularity", self.granularity, GRANULARITIES)
        if self.dataset not in data.names():
            raise unknown("dataset", self.dataset, data.names())
        if self.schedule not in ("epoch", "step"):
            raise unknown("schedule", self.schedule, ("epoch", "step"))
        with torch.device("meta"):
            models.build(self.model)
        self._require("epochs", self.epochs >= 1, "at least 1")
        self._require("target_epoch", 1 <= self.target_epoch <= self.epochs, f"from 1 to the {self.epochs} epochs")
        self._require("finetune_epochs", self.finetune_epochs >= 0, "0 (none) or more")
        self._require("batch", self.batch >= 1, "at least 1")
        self._require("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        self._require("lr_warmup_epochs", self.lr_warmup_epochs >= 0, "0 (none) or more")
        self._require("weight_decay", self.weight_decay >= 0, "0 or more")
        self._require("seed", self.seed >= 0, "0 or more")
        for name in ("lr", "lr_decay", "finetune_lr", "lr_warmup_from"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value > 0, "a number above 0")
        self._require("milestones", list(self.milestones) == sorted(self.milestones), "epochs in increasing order")
        self.build_method(1)  # every setting of the method is checked before anything is written

    def _require(self, name: str, ok: bool, right: str) -> None:
        if not ok:
            raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} cannot work; it is {right}")

    def build_method(self, epoch_steps: int) -> Method:
        """The method with its times in steps."""
        kind = METHODS[self.method]
        return kind(
            sparsity=self.sparsity if kind.prunes else 0.0,
            steps=self.epochs * epoch_steps,
            ramp=self.target_epoch / self.epochs,
            epoch_steps=epoch_steps if self.schedule == "epoch" else 1,
            granularity=GRANULARITIES[self.granularity],
            **{name: setting(kind, name, value) for name, value in self.settings.items()},
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What happens one after the other."""
        train = Phase("train", self.epochs)
        return (train, Phase("fine-tune", self.finetune_epochs, self.finetune_lr)) if self.finetune_epochs else (train,)

    @property
    def total_epochs(self) -> int:
        return sum(phase.epochs for phase in self.phases)

    def phase_at(self, epoch: int) -> Phase:
        """The phase that an epoch (from 0) belongs to."""
        for phase in self.phases:
            if epoch < phase.epochs:
                return phase
            epoch -= phase.epochs
        return self.phases[-1]

    def lr_at(self, epoch: float) -> float:
        """The learning rate at a point in time, in epochs (10.5 = in the middle of the eleventh)."""
        if (constant := self.phase_at(int(epoch)).lr) is not None:
            return constant
        if epoch < self.lr_warmup_epochs:
            return self.lr_warmup_from + (self.lr - self.lr_warmup_from) * epoch / self.lr_warmup_epochs
        return float(self.lr / self.lr_decay ** sum(epoch >= milestone for milestone in self.milestones))


def setting(kind: type[Method], name: str, value: Any) -> Any:
    """``value`` as the type that the method's field ``name`` has; text from the command line is read as such."""
    fixed = {"sparsity", "steps", "ramp", "epoch_steps", "granularity"}  # these have flags of their own
    allowed = {f.name: f for f in dataclasses.fields(kind) if f.name not in fixed}
    if name not in allowed:
        raise unknown(f"setting of {kind.__name__}", name, allowed)
    wanted = typing.get_type_hints(kind)[name]
    try:
        if wanted is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        return wanted(value)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"--set {name}={value}: {kind.__name__} wants {wanted.__name__} there") from None


def to_json(config: Config, method: Method, classes: int, shape: tuple[int, ...]) -> str:
    """The record of a run: every field, the method as resolved with every setting, what the images are like."""
    record = dataclasses.asdict(config)
    resolved = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    parts = {k: {"type": type(v).__name__, **dataclasses.asdict(v)} for k, v in resolved.items() if _is_part(v)}
    record["method"] = {"name": config.method, "type": type(method).__name__, **resolved, **parts}
    record |= {"total_epochs": config.total_epochs, "classes": classes, "shape": list(shape)}
    return json.dumps(record, indent=1)


def from_record(record: dict[str, Any]) -> Config:
    """The config of a recorded run."""
    flat = record | {"method": record["method"]["name"], "milestones": tuple(record["milestones"])}
    return Config(**{f.name: flat[f.name] for f in dataclasses.fields(Config)})


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
