"""Config: everything that decides the result of a run. One frozen dataclass drives options, help, record and resume."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from dcil import METHODS, Method, data, models
from dcil.errors import UserError, unknown
from dcil.schedule import Phase
from dcil.train.method_settings import FLAGS, check_settings, granularity_named, parse_settings, settings_to_json
from dcil.validation import Validated, is_a

#: The largest counts, which others are computed from, and the largest rate: float32 ends at 3e38.
MAX_EPOCHS, MAX_BATCH, MAX_MILESTONES, MAX_RATE, MAX_LENGTH = 1_000_000, 10**9, 100, 1e30, 10**6
#: What each path may have for itself (--private), and the values that are allowed.
PRIVATE = ("norms,head", "norms", "head", "none")
OPTIMIZERS, LR_SCHEDULES, DECAYED = ("sgd", "adamw"), ("steps", "cosine"), ("all", "matrices")


def described(default: Any, help: str) -> Any:
    """Return a field with a default and its help text."""
    return field(default=default, metadata={"help": help})


def added(default: Any, help: str) -> Any:
    """Return a field that earlier runs do not record: they were trained with what is its default."""
    return field(default=default, metadata={"help": help, "added": True})


@cache  # a config is read many times, and a large network takes half a second even without memory
def check_model(name: str, dropout: float, tokens: bool) -> None:
    """Refuse a network that cannot be built, or not for the kind of data."""
    models.check_reads(name, tokens)
    try:
        with torch.device("meta"):
            models.build(name, dropout=dropout)
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
    batch: int = described(64, "images per step, or sequences of a text")
    lr: float = described(0.1, "learning rate")
    milestones: tuple[int, ...] = described((30, 45), "epochs at which the learning rate is divided by --lr-decay")
    lr_decay: float = described(10.0, "factor that the learning rate is divided by at each milestone")
    lr_warmup_epochs: int = described(0, "epochs of linear warm-up of the learning rate, from --lr-warmup-from to --lr")
    lr_warmup_from: float = described(0.1, "learning rate at the start of the warm-up")
    momentum: float = described(0.9, "Nesterov momentum of SGD (0: plain SGD)")
    weight_decay: float = described(1e-4, "weight decay: L2 with SGD, decoupled with AdamW")
    seed: int = described(0, "seed of initial weights, data order, augmentation and dropout")
    optimizer: str = added("sgd", "sgd or adamw")
    betas: tuple[float, ...] = added((0.9, 0.999), "AdamW's decay rates of the means of gradients and of their squares")
    eps: float = added(1e-8, "what AdamW adds to the root of the squares' mean")
    decay_on: str = added("all", "weight decay on all parameters, or on matrices: no biases, norms and embeddings")
    lr_schedule: str = added("steps", "steps: divide at the milestones; cosine: fall to --lr-floor at the last epoch")
    lr_floor: float = added(0.0, "learning rate at the end of the cosine")
    label_smoothing: float = added(0.0, "part of each target that is spread evenly over the classes")
    clip_norm: float = added(0.0, "largest norm of the gradient of all parameters together (0: any)")
    dropout: float = added(0.0, "part of the activations that a transformer drops in training")
    tokens: str = added("characters", "what a token of a text is: characters or bytes")
    length: int = added(256, "tokens of a sequence of a text")
    color_jitter: float = added(0.0, "largest change of brightness, contrast and saturation of images in files")
    private: str = added(PRIVATE[0], "what each path has for itself: norms,head or norms or head or none")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("settings", isinstance(self.settings, dict), "a dict of settings by name")
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        granularity_named(self.granularity)
        if self.dataset not in data.names():
            raise unknown("dataset", self.dataset, data.names())
        for name, allowed in NAMED.items():
            if getattr(self, name) not in allowed:
                raise unknown(f"--{name.replace('_', '-')}", getattr(self, name), allowed)
        self._check_fractions()
        check_model(self.model, self.dropout, self.dataset in data.TEXTS)
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
        self.require("lr_floor", 0 <= self.lr_floor <= self.lr, f">= 0 and <= --lr ({self.lr:g})")
        self.require("length", 1 <= self.length <= MAX_LENGTH, f"from 1 to {MAX_LENGTH}")
        known = isinstance(self.milestones, tuple) and len(self.milestones) <= MAX_MILESTONES
        known = known and all(is_a("int", epoch) and 0 <= epoch <= MAX_EPOCHS for epoch in self.milestones)
        self.require("milestones", known, f"at most {MAX_MILESTONES} epochs from 0 to {MAX_EPOCHS}")
        self.require("milestones", list(self.milestones) == sorted(self.milestones), "in increasing order")
        self.require("lr_decay", 1e-3 <= self.lr_decay <= 1e3, "from 0.001 to 1000")
        last = self.lr * (1 / self.lr_decay) ** len(self.milestones)
        self.require("lr_decay", 0 < last <= MAX_RATE, f"such that the last learning rate is > 0 and <= {MAX_RATE:g}")

    def _check_fractions(self) -> None:
        for name in ("label_smoothing", "dropout"):
            self.require(name, 0 <= getattr(self, name) < 1, ">= 0 and < 1")
        in_files = self.dataset in data.IMAGES_IN_FILES
        self.require("color_jitter", 0 <= self.color_jitter <= 1, "from 0 to 1", "0 leaves colours as they are")
        self.require("color_jitter", in_files or not self.color_jitter, f"0 for {self.dataset}")
        self.require("clip_norm", 0 <= self.clip_norm <= MAX_RATE, f">= 0 and <= {MAX_RATE:g}", "0 does not clip")
        self.require("eps", 0 < self.eps <= 1, "> 0 and <= 1")
        known = isinstance(self.betas, tuple) and len(self.betas) == 2
        known = known and all(is_a("float", beta) and 0 <= beta < 1 for beta in self.betas)
        self.require("betas", known, "two numbers >= 0 and < 1, such as 0.9,0.999")

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
        if self.lr_schedule == "cosine":
            part = (epoch - self.lr_warmup_epochs) / max(1, self.epochs - self.lr_warmup_epochs)
            return self.lr_floor + (self.lr - self.lr_floor) * (1 + math.cos(math.pi * min(1.0, part))) / 2
        return float(self.lr / self.lr_decay ** sum(epoch >= milestone for milestone in self.milestones))


#: Fields whose values have names.
NAMED = {
    "schedule": ("epoch", "step"),
    "optimizer": OPTIMIZERS,
    "decay_on": DECAYED,
    "lr_schedule": LR_SCHEDULES,
    "tokens": data.TOKENS,
    "private": PRIVATE,
}
#: What earlier runs were trained with, where their config.json does not say.
EARLIER: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config) if "added" in f.metadata}


def to_json(config: Config, method: Method, data_record: Mapping[str, Any]) -> str:
    """Return the text of config.json: every field, the method with every setting, and what the data are."""
    record = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    record["settings"] = settings_to_json(type(method), config.settings)
    resolved = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    resolved = {name: _as_json(value) for name, value in resolved.items()}
    record["method"] = {"name": config.method, "type": type(method).__name__, **resolved}
    record |= {"total_epochs": config.total_epochs, **data_record}
    return json.dumps(record, indent=1)


def from_record(record: dict[str, Any]) -> Config:
    """Return the config of a recorded run."""
    method = record["method"]["name"]
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    settings = earlier_defaults(method, record["method"]) | parse_settings(METHODS[method], record["settings"])
    record = EARLIER | record
    typed: dict[str, Any] = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
    typed |= {"method": method, "settings": settings}
    return Config(**{f.name: typed.get(f.name, record[f.name]) for f in dataclasses.fields(Config)})


def earlier_defaults(method: str, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a run was begun with because they were defaults then, and are no longer."""
    changed = [field for field in dataclasses.fields(METHODS[method]) if "before" in field.metadata]
    before = {field.name: field.metadata["before"] for field in changed if field.name not in FLAGS}
    return {name: value for name, value in before.items() if recorded.get(name) == _as_json(value)}


def _as_json(value: Any) -> Any:
    """Return a setting as config.json has it: a part with its type and fields."""
    is_part = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return {"type": type(value).__name__, **dataclasses.asdict(value)} if is_part else value
