"""Training runs: a config, a loop, a folder. Reading order: config, recipes, loop, run; then, for several processes,
team (who they are), joint (their step), joint_norm."""

from __future__ import annotations

from dcil.train.config import Config
from dcil.train.loop import Diverged, Trainer, train
from dcil.train.recipes import RECIPES
from dcil.train.run import RunFolder
from dcil.train.team import Team

__all__ = ["RECIPES", "Config", "Diverged", "RunFolder", "Team", "Trainer", "train"]
