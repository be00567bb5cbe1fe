"""Training runs: a config, a loop, a folder. Reading order: config, recipes, trainer, loop, run; then, for several
processes, team (who they are), joint (their step), joint_norm."""

from __future__ import annotations

from dcil.engine import Diverged
from dcil.train.config import Config
from dcil.train.loop import train
from dcil.train.recipes import RECIPES
from dcil.train.run import RunFolder
from dcil.train.team import Team
from dcil.train.trainer import Trainer

__all__ = ["RECIPES", "Config", "Diverged", "RunFolder", "Team", "Trainer", "train"]
