"""Training runs: a config, a loop, a folder. Reading order: config, recipes, loop, run."""

from __future__ import annotations

from dcil.train.config import Config
from dcil.train.loop import Diverged, Trainer, train
from dcil.train.recipes import RECIPES
from dcil.train.run import RunFolder

__all__ = ["RECIPES", "Config", "Diverged", "RunFolder", "Trainer", "train"]
