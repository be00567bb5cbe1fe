"""Training runs. Reading order: method_settings, config, recipes, plan and sweep (options to configs), trainer (one
epoch), loop (one run), parallel (several runs), restore."""

from __future__ import annotations

from dcil.engine import Diverged
from dcil.engine.process_group import ProcessGroup
from dcil.runs.folder import RunFolder
from dcil.train.config import Config
from dcil.train.loop import train
from dcil.train.recipes import RECIPES
from dcil.train.trainer import Trainer

__all__ = ["RECIPES", "Config", "Diverged", "ProcessGroup", "RunFolder", "Trainer", "train"]
