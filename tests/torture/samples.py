"""What is attacked: a tiny finished run, one that was stopped halfway, their exported files; and what they hold."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from forks import Outcome, isolated
from safetensors.torch import load_file

import dcil.runs.folder
import dcil.train.loop
from dcil import models
from dcil.cli import main
from dcil.models.cifar import resnet
from dcil.report import run_figures
from dcil.runs.folder import RunFolder

#: A network of 5,000 weights, so that a training of three epochs of three steps takes a quarter of a second.
models.MODELS["tiny"] = partial(resnet, 8, width=4)
TRAIN = [
    "train",
    "--dataset",
    "digits",
    "--model",
    "tiny",
    "--batch",
    "480",
    "--epochs",
    "3",
    "--sparsity",
    "0.9",
    "--device",
    "cpu",
]
EXPORTS = ("safetensors", "torch", "sparse", "semi-structured", "cpu")
#: Files that may be in a run folder, besides those of its documentation that begin with a dot.
DOCUMENTED = {"config.json", "metrics.jsonl", "checkpoint.safetensors", "checkpoint.json", "model.safetensors"}
DOCUMENTED |= {"summary.json", "report.html"}
DOCUMENTED |= {name for name in (".lock",) if name in (dcil.runs.folder.__doc__ or "")}


@dataclass(frozen=True)
class Samples:
    """Folders that are copied and then attacked; they themselves stay as they are."""

    base: Path

    @property
    def finished(self) -> Path:
        return self.base / "finished"

    @property
    def stopped(self) -> Path:
        return self.base / "stopped"

    @property
    def exports(self) -> dict[str, Path]:
        return {to: self.base / f"exported.{to}" for to in EXPORTS}

    @classmethod
    def build(cls, base: Path) -> Samples:
        samples = cls(base)
        dcil.train.loop.SAVE_EVERY = 0.0  # a checkpoint after every epoch
        done(command(*TRAIN, "--method", "dcil", "--out", str(samples.finished)))
        shutil.copytree(samples.finished, samples.stopped)
        done(isolated(lambda: stop_halfway(samples.stopped)))
        for to, file in samples.exports.items():
            done(command("export", str(samples.finished), "--to", to, "--out", str(file)))
        warm_up(samples)
        return samples


def command(*words: str, limit: float = 60) -> Outcome:
    """Run ``dcil`` with these words in a child."""
    return isolated(lambda: main(words), limit)


def without_pictures(words: Sequence[str]) -> int:
    """Run ``dcil`` with these words; the report has no figures, which take longer than the training."""
    run_figures.pictures = lambda runs, style: []
    return main(words)


def done(outcome: Outcome) -> None:
    """Insist that a sample was made."""
    if outcome.code != 0:
        raise RuntimeError(f"the samples could not be made: {outcome.err or outcome}")


def warm_up(samples: Samples) -> None:
    """Import here what commands import when they run: every child would do it anew."""
    list_of_modules = samples.base / "modules"

    def all_commands() -> None:
        main([*TRAIN, "--method", "dcil", "--out", str(samples.base / "warm")])
        main(["eval", str(samples.base / "warm")])
        for to in EXPORTS:
            main(["export", str(samples.finished), "--to", to, "--out", str(samples.base / "warm" / to)])
        list_of_modules.write_text("\n".join(sys.modules))

    done(isolated(all_commands))
    for name in list_of_modules.read_text().split():
        with suppress(Exception):
            import_module(name)
    shutil.rmtree(samples.base / "warm")


def stop_halfway(folder: Path) -> int:
    """Train the run in ``folder`` anew, and stop it after its second epoch."""
    from dcil.train import train
    from dcil.train.restore import config_of

    config = config_of(RunFolder(folder))
    shutil.rmtree(folder)
    train(config, RunFolder(folder), folder, torch.device("cpu"), until=2)
    return 0


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of its own, which is the current one; away at the end, whatever was done to its permissions."""
    base, before = Path(tempfile.mkdtemp(prefix="torture-")), Path.cwd()
    os.chdir(base)
    try:
        yield base
    finally:
        os.chdir(before)
        for folder, _, _ in os.walk(base):
            os.chmod(folder, 0o700)
        shutil.rmtree(base)


def leftovers(run: Path) -> list[str]:
    """Return the names in a run folder that are not documented."""
    return sorted(path.name for path in run.iterdir() if path.name not in DOCUMENTED)


def result(run: Path) -> dict[str, Any]:
    """Return all that a finished run says, but times: weights and masks bit for bit, metrics, summary."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    for record in (*rows, summary):
        record.pop("seconds")
    for name in ("environment", "metrics_sha256", "sha256"):  # the checksums are those of the times, too
        summary.pop(name)
    tensors = {}
    for name in ("model", "checkpoint"):
        for key, tensor in load_file(run / f"{name}.safetensors").items():
            tensors[f"{name}.{key}"] = (str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
    return {"metrics": rows, "summary": summary, **tensors}


def difference(run: Path, want: dict[str, Any]) -> str:
    """Name the first thing in which a run differs from ``want``, else ""."""
    found = result(run)
    return next((key for key in want.keys() | found.keys() if want.get(key) != found.get(key)), "")


def copied(source: Path, folder: Path) -> Path:
    """Copy a sample into ``folder``."""
    target = folder / source.name
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return target
