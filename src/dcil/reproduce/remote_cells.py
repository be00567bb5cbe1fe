"""Runs of cells as text, for processes on other machines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from dcil.reproduce import iterations
from dcil.reproduce.cells import Cell
from dcil.reproduce.pool import remove_working_files
from dcil.reproduce.session import CellRun, RunOptions, resume_run
from dcil.runs.progress import Progress
from dcil.train.remote_runs import Place, load_once


def to_text(run: CellRun, options: RunOptions, tidy: bool) -> str:
    """Return what ``train_text`` trains."""
    place = Place(options.data_dir, options.device.type, options.settings)
    return json.dumps(
        {
            "cell": dataclasses.asdict(run.cell),
            "seed": run.seed,
            "out": str(run.out.absolute()),
            "epochs": run.epochs,
            "place": place.record(),
            "at_once": options.at_once,
            "tidy": tidy,
        }
    )


def train_text(text: str, progress: Progress) -> None:
    """Train the run that ``text`` describes, and write its record."""
    given = json.loads(text)
    place = Place.of(given["place"])
    device = torch.device(place.device)
    options = RunOptions(place.data_dir, device, place.settings, given["at_once"], load_once)
    run = CellRun(Cell(**given["cell"]), given["seed"], Path(given["out"]), given["epochs"])
    with run.locked():
        resume_run(run, options, progress, iterations.snapshots(run))
        if given["tidy"]:
            remove_working_files(run)
