"""Config: everything that decides the result of a run. One frozen dataclass drives options, help, record and resume."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from dcil import METHODS, Method, data, models
from dcil.errors import UserError, unknown
from dcil.method import Phase
from dcil.train.method_settings import check_settings, granularity_named, parse_settings, settings_to_json
from dcil.validation import Validated, is_a

#: The largest counts, which others are computed from, and the largest rate: float32 ends at 3e38.
MAX_EPOCHS, MAX_BATCH, MAX_MILESTONES, MAX_RATE = 1_000_000, 10**9, 100, 1e30


def described(default: Any, help: str) -> Any:
    """Return a field with a default and its help text."""
    return field(default=default, metadata={"help": help})


@cache  # a config is read many times, and a large network takes half a second even without memory
def check_model(name: str) -> None:
    """Refuse a network that cannot be built."""
    try:
        with torch.device("meta"):
            models.build(name)
    except RuntimeError as error:
        raise UserError(
            f"--model must name a network that can be built, got {name}: {str(error).splitlines()[0]}"
        ) from None


@dataclass(frozen=True)
class Config(Validated):
    """The settings of a run. Times are in epochs; ``build_method`` converts them to the steps that a method counts in.

    ``settings`` holds further fields of the method by name, as values of their types: ``parse_settings`` converts text
    and JSON to these.
    """

    dataset: str = described("digits", "data set to train on")
    model: str = described("resnet8-digits", "network to train")
    method: str = described("dcil", "training method; several (comma-separated), or all, for a comparison")
    sparsity: float = described(0.95, "fraction of the weights (or filters) to prune, from 0 to below 1")
    granularity: str = described("weight", "what is pruned as one group: weight, filter or N:M such as 2:4")
    settings: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "further settings of the method, NAME=VALUE (see: dcil list METHOD)"}
    )
    epochs: int = described(60, "epochs of training before any fine-tuning")
    target_epoch: int = described(45, "epoch at which the sparsity is reached")
    schedule: str = described("epoch", "when the sparsity grows: every epoch (as in the authors' code) or every step")
    finetune_epochs: int = described(0, "epochs of fine-tuning with fixed masks after the training")
    finetune_lr: float = described(0.001, "constant learning rate of the fine-tuning")
    batch: int = described(64, "images per step")
    lr: float = described(0.1, "learning rate")
    milestones: tuple[int, ...] = described((30, 45), "epochs at which the learning rate is divided by --lr-decay")
    lr_decay: float = described(10.0, "factor that the learning rate is divided by at each milestone")
    lr_warmup_epochs: int = described(0, "epochs of linear warm-up of the learning rate, from --lr-warmup-from to --lr")
    lr_warmup_from: float = described(0.1, "learning rate at the start of the warm-up")
    momentum: float = described(0.9, "Nesterov momentum of SGD (0: plain SGD)")
    weight_decay: float = described(1e-4, "L2 weight decay, on every parameter")
    seed: int = described(0, "seed of initial weights, data order and augmentation")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("settings", isinstance(self.settings, dict), "a dict of settings by name")
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        granularity_named(self.granularity)
        if self.dataset not in data.names():
            raise unknown("dataset", self.dataset, data.names())
        if self.schedule not in ("epoch", "step"):
            raise unknown("schedule", self.schedule, ("epoch", "step"))
        check_model(self.model)
        check_settings(METHODS[self.method], self.settings)
        self._check_ranges()
        self.build_method(1)  # every setting of the method is checked before anything is written

    def _check_ranges(self) -> None:
        for name in (each.name for each in dataclasses.fields(self) if each.type == "float"):
            object.__setattr__(self, name, float(getattr(self, name)))  # torch takes no whole numbers beyond 64 bits
        for name, least in {"epochs": 1, "finetune_epochs": 0, "lr_warmup_epochs": 0}.items():
            self.require(name, getattr(self, name) >= least, f">= {least}")
            self.require(name, getattr(self, name) <= MAX_EPOCHS, f"<= {MAX_EPOCHS}")
        self.require("target_epoch", 1 <= self.target_epoch <= self.epochs, f"from 1 to --epochs ({self.epochs})")
        self.require("batch", 1 <= self.batch <= MAX_BATCH, f"from 1 to {MAX_BATCH}")
        self.require("momentum", 0 <= self.momentum < 1, ">= 0 and < 1")
        self.require("weight_decay", 0 <= self.weight_decay <= MAX_RATE, f">= 0 and <= {MAX_RATE:g}")
        self.require("seed", self.seed >= 0, ">= 0")
        self.require("seed", self.seed < 2**64, "less than 2**64")
        for name in ("lr", "finetune_lr", "lr_warmup_from"):
            self.require(name, 0 < getattr(self, name) <= MAX_RATE, f"> 0 and <= {MAX_RATE:g}")
        known = isinstance(self.milestones, tuple) and len(self.milestones) <= MAX_MILESTONES
        known = known and all(is_a("int", epoch) and 0 <= epoch <= MAX_EPOCHS for epoch in self.milestones)
        self.require("milestones", known, f"at most {MAX_MILESTONES} epochs from 0 to {MAX_EPOCHS}")
        self.require("milestones", list(self.milestones) == sorted(self.milestones), "in increasing order")
        self.require("lr_decay", 1e-3 <= self.lr_decay <= 1e3, "from 0.001 to 1000")
        last = self.lr * (1 / self.lr_decay) ** len(self.milestones)
        self.require("lr_decay", 0 < last <= MAX_RATE, f"such that the last learning rate is > 0 and <= {MAX_RATE:g}")

    def _called(self, field: str) -> str:
        return f"--{field.replace('_', '-')}"

    def build_method(self, epoch_steps: int) -> Method:
        """Build the method, with its times in steps."""
        kind = METHODS[self.method]
        common: dict[str, Any] = {
            "sparsity": self.sparsity if kind.prunes else 0.0,
            "steps": self.epochs * epoch_steps,
            "finetune": self.finetune_epochs * epoch_steps,
            "ramp": self.target_epoch / self.epochs,
            "epoch_steps": epoch_steps,
            "smooth": self.schedule == "step",
            "granularity": granularity_named(self.granularity),
            "seed": self.seed,
        }
        return kind(**common | self.settings)

    @cached_property  # the learning rate asks for it at every step
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the training in their order; their steps are epochs here."""
        return self.build_method(1).phases()

    @property
    def total_epochs(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, epoch: int) -> tuple[Phase, int]:
        """Return the phase that an epoch (from 0) belongs to, and the epochs before that phase."""
        before = 0
        for phase in self.phases:
            if epoch < before + phase.steps:
                return phase, before
            before += phase.steps
        return self.phases[-1], before - self.phases[-1].steps

    def lr_at(self, epoch: float) -> float:
        """Return the learning rate at a point in time, in epochs (10.5: in the middle of the eleventh)."""
        phase, before = self.phase_at(int(epoch))
        if phase.start is None:
            return self.finetune_lr
        epoch += phase.start - before
        if epoch < self.lr_warmup_epochs:
            return self.lr_warmup_from + (self.lr - self.lr_warmup_from) * epoch / self.lr_warmup_epochs
        return float(self.lr / self.lr_decay ** sum(epoch >= milestone for milestone in self.milestones))


def to_json(config: Config, method: Method, classes: int, shape: tuple[int, ...]) -> str:
    """Return the text of config.json: every field, the method with every setting, the classes and the image shape."""
    record = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    record["settings"] = settings_to_json(type(method), config.settings)
    resolved = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    parts = {k: {"type": type(v).__name__, **dataclasses.asdict(v)} for k, v in resolved.items() if _is_part(v)}
    record["method"] = {"name": config.method, "type": type(method).__name__, **resolved, **parts}
    record |= {"total_epochs": config.total_epochs, "classes": classes, "shape": list(shape)}
    return json.dumps(record, indent=1)


def from_record(record: dict[str, Any]) -> Config:
    """Return the config of a recorded run."""
    method = record["method"]["name"]
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    settings = parse_settings(METHODS[method], record["settings"])
    typed = {"method": method, "milestones": tuple(record["milestones"]), "settings": settings}
    return Config(**{f.name: typed.get(f.name, record[f.name]) for f in dataclasses.fields(Config)})


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
