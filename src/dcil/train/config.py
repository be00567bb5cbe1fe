"""Config: everything that decides the result of a run. One frozen dataclass drives flags, help, record and resume."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from dcil import (
    ERK,
    METHODS,
    NM,
    OBD,
    OBS,
    Criterion,
    Filter,
    Global,
    Gradient,
    Granularity,
    Magnitude,
    Method,
    Scope,
    Taylor,
    Uniform,
    Weight,
    data,
    models,
)
from dcil.errors import UserError, unknown
from dcil.method import Phase

GRANULARITIES: dict[str, Granularity] = {"weight": Weight(), "filter": Filter()}
CRITERIA: dict[str, Criterion] = {
    "magnitude": Magnitude(),
    "gradient": Gradient(),
    "taylor": Taylor(),
    "obd": OBD(),
    "obs": OBS(),
}
SCOPES: dict[str, Scope] = {"global": Global(), "uniform": Uniform(), "er": ERK(kernel=False), "erk": ERK()}
#: Settings whose values have names on the command line.
PARTS: dict[Any, Mapping[str, Any]] = {Criterion: CRITERIA, Scope: SCOPES}


def described(default: Any, help: str) -> Any:
    """A field with a default and the sentence that explains it, on the command line as in the record."""
    return field(default=default, metadata={"help": help})


@cache  # a config is read many times, and a large network takes half a second even without memory
def check_model(name: str) -> None:
    """Refuse names of networks that cannot be built."""
    try:
        with torch.device("meta"):
            models.build(name)
    except RuntimeError as error:
        raise UserError(f"--model {name} cannot be built: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class Config:
    """Times are in epochs here; ``build_method`` turns them into the steps that a method counts in."""

    dataset: str = described("digits", "data set to train on")
    model: str = described("resnet8-digits", "network to train")
    method: str = described("dcil", "training method; several with commas, or all, are compared")
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
        granularity_named(self.granularity)
        if self.dataset not in data.names():
            raise unknown("dataset", self.dataset, data.names())
        if self.schedule not in ("epoch", "step"):
            raise unknown("schedule", self.schedule, ("epoch", "step"))
        check_model(self.model)
        self._require("epochs", self.epochs >= 1, "at least 1")
        self._require("target_epoch", 1 <= self.target_epoch <= self.epochs, f"from 1 to the {self.epochs} epochs")
        self._require("finetune_epochs", self.finetune_epochs >= 0, "0 (none) or more")
        self._require("batch", self.batch >= 1, "at least 1")
        self._require("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        self._require("lr_warmup_epochs", self.lr_warmup_epochs >= 0, "0 (none) or more")
        self._require("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more, and finite")
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
        settings: dict[str, Any] = {
            "sparsity": self.sparsity if kind.prunes else 0.0,
            "steps": self.epochs * epoch_steps,
            "finetune": self.finetune_epochs * epoch_steps,
            "ramp": self.target_epoch / self.epochs,
            "epoch_steps": epoch_steps,
            "smooth": self.schedule == "step",
            "granularity": granularity_named(self.granularity),
            "seed": self.seed,
        }
        return kind(**settings | {name: setting(kind, name, value) for name, value in self.settings.items()})

    @cached_property  # the learning rate asks for it at every step
    def phases(self) -> tuple[Phase, ...]:
        """What happens one after the other; with an epoch as the step, a phase's steps are its epochs."""
        return self.build_method(1).phases()

    @property
    def total_epochs(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, epoch: int) -> tuple[Phase, int]:
        """The phase that an epoch (from 0) belongs to, and the epochs before that phase."""
        before = 0
        for phase in self.phases:
            if epoch < before + phase.steps:
                return phase, before
            before += phase.steps
        return self.phases[-1], before - self.phases[-1].steps

    def lr_at(self, epoch: float) -> float:
        """The learning rate at a point in time, in epochs (10.5 = in the middle of the eleventh)."""
        phase, before = self.phase_at(int(epoch))
        if phase.start is None:
            return self.finetune_lr
        epoch += phase.start - before
        if epoch < self.lr_warmup_epochs:
            return self.lr_warmup_from + (self.lr - self.lr_warmup_from) * epoch / self.lr_warmup_epochs
        return float(self.lr / self.lr_decay ** sum(epoch >= milestone for milestone in self.milestones))


def granularity_named(name: str) -> Granularity:
    """weight, filter, or any N:M such as 2:4."""
    if pattern := re.fullmatch(r"(\d+):(\d+)", name):
        return NM(int(pattern[1]), int(pattern[2]))
    if name not in GRANULARITIES:
        raise unknown("granularity", name, [*GRANULARITIES, "2:4"])
    return GRANULARITIES[name]


#: Settings that have flags of their own.
FLAGS = {
    "sparsity": "--sparsity",
    "steps": "--epochs",
    "finetune": "--finetune-epochs",
    "ramp": "--target-epoch",
    "epoch_steps": "--batch",
    "smooth": "--schedule",
    "granularity": "--granularity",
    "seed": "--seed",
}


def setting(kind: type[Method], name: str, value: Any) -> Any:
    """``value`` as the method's field ``name`` wants it; text from the command line is read as such."""
    allowed = {f.name for f in dataclasses.fields(kind)} - FLAGS.keys()
    if name not in allowed:
        if name in FLAGS:
            raise UserError(f"--set {name}={value}: that follows from {FLAGS[name]}")
        raise unknown(f"setting of {kind.__name__}", name, allowed)
    wanted = typing.get_type_hints(kind)[name]
    if wanted in PARTS:
        parts = PARTS[wanted]
        if str(value) not in parts:
            raise unknown(name, str(value), parts)
        return parts[str(value)]
    optional = types.NoneType in typing.get_args(wanted)
    plain = next(t for t in typing.get_args(wanted) if t is not types.NoneType) if optional else wanted
    try:
        if optional and str(value).lower() == "none":
            return None
        if plain is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        return plain(value)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"--set {name}={value}: {kind.__name__} wants {plain.__name__} there") from None


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
