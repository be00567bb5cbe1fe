"""Training runs: a config, a loop, a folder. Reading order: config, recipes, trainer, loop, run; then, for several
processes, team (who they are), joint (their step), sync_batch_norm."""

from __future__ import annotations

from dcil.engine import Diverged
from dcil.engine.process_group import ProcessGroup
from dcil.runs.folder import RunFolder
from dcil.train.config import Config
from dcil.train.loop import train
from dcil.train.recipes import RECIPES
from dcil.train.trainer import Trainer

__all__ = ["RECIPES", "Config", "Diverged", "ProcessGroup", "RunFolder", "Trainer", "train"]
