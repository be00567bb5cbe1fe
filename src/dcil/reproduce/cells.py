"""Cells: one configuration each, trained with several seeds to be compared with a printed number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dcil import METHODS, models
from dcil.errors import unknown
from dcil.reproduce.paper import PrintedNumber
from dcil.train import RECIPES, Config
from dcil.train.recipes import scaled_epochs

#: The paper's names for methods -> names in METHODS. A method that the paper quotes is trained here like the others.
METHOD_NAMES = {"dpf-rerun": "dpf", "incremental": "gmp", "dense-quoted": "dense", "dcil-nokl": "dcil"}
#: The authors' "ResNet-56" is a bottleneck network; methods quoted with the basic-block network keep that one.
BOTTLENECK, BASIC_BLOCK = {"resnet56": "resnet56-bottleneck"}, ("sfp", "fpgm", "mil")
#: Texts whose networks have a recipe of their own: what a CPU trains.
TEXT_RECIPES = {"pydoc": "gpt-pydoc"}
#: Epochs before the KL terms in the main tables: with these, a number of the warm-up table belongs to a main cell.
MAIN_WARMUP = {"cifar10": 70, "cifar100": 70, "imagenet": 10}


@dataclass(frozen=True)
class Cell:
    """One configuration; ``warmup``, ``target`` and ``finetune`` (epochs), ``private`` (what each path has for itself)
    and ``share`` (of the batch that the super net takes) are None or 0 where the main recipe holds."""

    dataset: str
    model: str
    method: str
    sparsity: float = 0.0
    granularity: str = "weight"
    kl: bool = True
    warmup: int | None = None
    target: int | None = None
    finetune: int = 0
    private: str | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        """Name within a network: dense, dcil-0.95, dcil-nokl-filter0.4, dcil-0.95-target100, …"""
        words = [self.method if self.kl else f"{self.method}-nokl"]
        if METHODS[self.method].prunes:
            words.append(f"{'' if self.granularity == 'weight' else self.granularity}{self.sparsity:g}")
        for word, value in (("warmup", self.warmup), ("target", self.target), ("finetune", self.finetune or None)):
            if value is not None:
                words.append(f"{word}{value}")
        if self.private is not None:
            words.append(f"private-{self.private}")
        if self.share is not None:
            words.append(f"share{self.share:g}")
        return "-".join(words)

    @property
    def id(self) -> str:
        return f"{self.dataset}/{self.model}/{self.name}"

    @property
    def dense(self) -> Cell:
        """The cell of the unpruned network that this one is compared with."""
        return Cell(self.dataset, self.model, "dense")

    @property
    def is_text(self) -> bool:
        """Whether the network is trained on a text, so that it is measured by its loss."""
        return models.reads_tokens(self.model)

    @property
    def is_transformer(self) -> bool:
        return self.is_text or self.model.startswith("vit-")

    @property
    def recipe(self) -> str:
        if self.is_transformer:
            return TEXT_RECIPES.get(self.dataset, "gpt-text") if self.is_text else f"vit-{self.dataset}"
        name = "digits" if self.dataset == "digits" else f"{self.dataset}-{self.model}"
        return name if self.target is None else f"{name}-target{self.target}"

    def config(self, seed: int, epochs: int | None = None) -> Config:
        """Return the recipe with this cell's changes; ``epochs`` shortens it for a trial."""
        if self.recipe not in RECIPES:
            raise unknown("recipe", self.recipe, RECIPES, nearest_only=True)
        config = RECIPES[self.recipe](method=self.method)
        changes: dict[str, Any] = {"seed": seed, "finetune_epochs": self.finetune}
        if self.is_transformer:  # a recipe is for all sizes, and that of texts for all of these
            changes |= {"dataset": self.dataset, "model": self.model}
        if self.private is not None:
            changes["private"] = self.private
        if METHODS[self.method].prunes:
            changes |= {"sparsity": self.sparsity, "granularity": self.granularity}
        if not self.kl:
            changes["settings"] = config.settings | {"kl": 0.0}
        if self.warmup is not None:
            changes["settings"] = config.settings | {"warmup": self.warmup / config.epochs}
        if self.share is not None:
            changes["settings"] = config.settings | {"super_share": self.share}
        config = replace(config, **changes)
        return config if epochs is None else replace(config, **scaled_epochs(config, epochs))


def cell_for(number: PrintedNumber, model: str | None = None) -> Cell | None:
    """Return the cell to train for a number; None for a number of two models, unless ``model`` names one."""
    model = model or number.model
    if model is None:
        return None
    method = METHOD_NAMES.get(number.method, number.method)
    # Dense numbers quoted from those papers (not DPF's) are of the basic-block network too.
    basic = method in BASIC_BLOCK or number.dense_source in [f"{name}-paper" for name in BASIC_BLOCK]
    model = model if basic else BOTTLENECK.get(model, model)
    if not METHODS[method].prunes:
        return Cell(number.dataset, model, method)
    usual = number.warmup_epochs in (None, MAIN_WARMUP.get(number.dataset))
    nokl = number.method == "dcil-nokl"
    return Cell(
        dataset=number.dataset,
        model=model,
        method=method,
        sparsity=number.sparsity,
        granularity=number.granularity,
        kl=not nokl,
        warmup=None if usual or nokl else number.warmup_epochs,
        target=number.target_epoch if method == "dcil" else None,
        finetune=number.finetune_epochs,
    )
