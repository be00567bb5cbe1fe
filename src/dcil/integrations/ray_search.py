"""Searches by Ray Tune: trials are run folders, ASHA stops the worst of them early, Optuna draws if it is installed.

ASHA: asynchronous successive halving (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcil.errors import UserError, missing_extra
from dcil.integrations.ray import PATIENCE, witness
from dcil.integrations.ray_cluster import Share
from dcil.integrations.ray_worker import Terms, terms_text, try_to_lock, why_unfit
from dcil.runs.folder import RunFolder
from dcil.runs.progress import Board, Progress
from dcil.train.budget import Budget
from dcil.train.memory import keep_freed_memory
from dcil.train.parallel import reason
from dcil.train.remote_runs import Place, train_at
from dcil.train.search_record import COMPLETE, FAILED, STOPPED, SearchRecord, Trial
from dcil.train.search_space import Axis, combinations, config_with, not_tried, trial_name
from dcil.train.sweep import option_types, typed_options

try:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
except ImportError as error:
    raise missing_extra("ray", "ray") from error

REDUCTION = 3  # one of so many trials goes on from a rung of ASHA to the next
LOSSES = 10  # times that a trial is taken up after it has lost its worker
WORST = -1e9
SHOWN = ("train_loss", "top1", "val_loss", "sparsity")


@dataclass(frozen=True)
class Search:
    """A search below ``out``: ``trials`` trials of at most ``epochs`` epochs, with values from ``space``."""

    out: Path
    space: tuple[Axis, ...]
    record: SearchRecord
    trials: int
    epochs: int
    seed: int
    place: Place
    checkpoint_minutes: float


def search_on_ray(search: Search, share: Share, budget: Budget, console: Console) -> None:
    """Train the trials; the record of the search says how each of them ended."""
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ctrl-C ends the command, as everywhere
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    with witness(search.out) as file, Board(console, search.trials) as board:
        watcher = Watcher(search, board)
        # Tune's own state; all nodes must see it, and nothing of it is needed once the search has ended.
        scratch = Path(tempfile.mkdtemp(prefix=".ray-tune-", dir=search.out.absolute()))
        try:
            tuner(search, share, budget, watcher, text_of(search, file, share), scratch).fit()
        except KeyboardInterrupt:
            console.print("[bold]stopping[/]; to continue: the same command again")
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            tidy(search)
    if watcher.unfit:  # one trial after the other would fail there
        raise UserError(watcher.unfit)


def tidy(search: Search) -> None:
    """Remove what Tune left when it ended trials in the middle of a write."""
    for trial in search.record.trials:
        folder = RunFolder(search.out / trial.name)
        if folder.leftovers():
            with suppress(UserError), folder.locked():  # one that is still ending
                folder.tidy()


def tuner(search: Search, share: Share, budget: Budget, watcher: Watcher, text: str, scratch: Path) -> Any:
    """Return the Tuner: sampler, scheduler and where it runs."""

    def trainable(values: dict[str, Any]) -> None:
        train_trial(values, text)

    return tune.Tuner(
        tune.with_resources(trainable, {"CPU": share.cpus, "GPU": share.gpus}),
        param_space={axis.name: domain(axis) for axis in search.space},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            search_alg=sampler(search),
            scheduler=Asha(watcher, search.epochs, search.record.grace),
            num_samples=search.trials,
            max_concurrent_trials=share.at_most,
            time_budget_s=None if math.isinf(budget.left) else budget.left,
            trial_name_creator=lambda trial: trial_name(plain(trial.config)),
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(scratch),
            verbose=0,
            callbacks=[watcher],
            stop=UnfitStopper(watcher),
            failure_config=tune.FailureConfig(max_failures=LOSSES),
        ),
    )


def domain(axis: Axis) -> Any:
    """Return the axis as Tune has it; its upper ends of whole numbers are exclusive."""
    if axis.choices:
        return tune.choice(list(axis.choices))
    if axis.whole:
        return (tune.lograndint if axis.log else tune.randint)(int(axis.low), int(axis.high) + 1)
    return (tune.loguniform if axis.log else tune.uniform)(axis.low, axis.high)


def sampler(search: Search) -> Any:
    """Return what draws values: first those of earlier trials, then new ones; of lists, if all fit, each once."""
    known = [trial.values for trial in search.record.trials]
    seed = search.seed + len(known)  # else the first new trial would be the first old one
    if combinations(search.space) <= search.trials:
        known += not_tried(search.space, known)
    if importlib.util.find_spec("optuna"):
        from ray.tune.search.optuna import OptunaSearch

        logging.getLogger("optuna").setLevel(logging.WARNING)  # it announces every study

        return OptunaSearch(points_to_evaluate=known or None, seed=seed)
    from ray.tune.search.basic_variant import BasicVariantGenerator

    return BasicVariantGenerator(points_to_evaluate=known or None, random_state=seed)


class UnfitStopper(tune.Stopper):
    """Ends the search where a machine cannot train any trial."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return "unfit" in result

    def stop_all(self) -> bool:
        return bool(self.watcher.unfit)


def text_of(search: Search, witness: Path, share: Share) -> str:
    """Return what a worker must know of the search, as text."""
    return json.dumps(
        {
            "terms": terms_text(Terms(str(witness), share.cpus)),
            "out": str(search.out.absolute()),
            "base": search.record.base,
            "score": search.record.score,
            "epochs": search.epochs,
            "place": search.place.record(),
            "checkpoint_minutes": search.checkpoint_minutes,
        }
    )


def train_trial(values: dict[str, Any], text: str) -> None:
    """Train a trial on a worker and report its epochs, those of earlier sessions too."""
    given = json.loads(text)
    folder = RunFolder(Path(given["out"]) / trial_name(plain(values)))
    tell = partial(report_row, given["score"], given["epochs"])
    try:
        terms = Terms(**json.loads(given["terms"]))
        if unfit := why_unfit(terms):
            tune.report({"score": WORST, "epoch": 0, "unfit": unfit})
            return
        torch.set_num_threads(terms.threads)
        keep_freed_memory()
        options = typed_options(given["base"]["options"], option_types())
        config = config_with(plain(values), options, given["base"]["recipe"])
        done, place = folder.summary() is not None, Place.of(given["place"])
        if not done:
            train = partial(train_at, place, config, folder, tell, given["checkpoint_minutes"])
            try_to_lock(train, PATIENCE, Budget())
        rows = folder.metrics()
        for row in rows if done else []:
            tell(row["epoch"], 0.0, row)
        tune.report(result(given["score"], rows[-1]) | {"complete": True})
    except Exception as error:  # Tune would try it again and call it a lost worker
        tune.report({"score": WORST, "epoch": 0, "failure": reason(error)})


def report_row(score: str, epochs: int, epoch: int, part: float, row: dict[str, Any] | None) -> None:
    """Report an epoch, but not the last: after that the run has its summary to write, and ASHA would end it."""
    if row is not None and epoch < epochs:
        tune.report(result(score, row))


def result(score: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return what Tune gets to know of an epoch; a higher score is better."""
    value = row.get(score)
    found = WORST if value is None else float(value) if score == "top1" else -float(value)
    return {"score": found, "epoch": row["epoch"], **{name: row.get(name) for name in SHOWN}}


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them: samplers draw numbers of numpy's."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


class Asha(ASHAScheduler):
    """ASHA that tells which trials it stops; other trials end for other reasons."""

    def __init__(self, watcher: Watcher, epochs: int, grace: int) -> None:
        super().__init__(time_attr="epoch", max_t=epochs, grace_period=grace, reduction_factor=REDUCTION)
        self.watcher = watcher

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if decision == self.STOP and "complete" not in result and "failure" not in result:
            self.watcher.stopped(trial)
        return decision


class Watcher(tune.Callback):
    """Shows the trials and keeps the record of the search; ``unfit`` says why a machine cannot train any trial."""

    def __init__(self, search: Search, board: Board) -> None:
        self.search, self.board, self.unfit = search, board, ""
        self.shows: dict[str, Progress] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its state to resume from; ours is in the run folders and the record."""
        return {}

    def on_trial_start(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        values = plain(trial.config)
        name = trial_name(values)
        self.search.record.trial(name, values)
        self.write()
        if name not in self.shows:
            self.shows[name] = self.board.begin(name, self.search.epochs)

    def on_trial_result(
        self, iteration: int, trials: Sequence[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "unfit" in result:
            self.unfit = result["unfit"]
            return
        kept = self.kept(trial)
        kept.epochs = max(kept.epochs, result["epoch"])
        if "failure" in result:
            self.note(kept, FAILED, result["failure"])
            return
        if kept.name in self.shows:
            self.shows[kept.name](result["epoch"], 0.0, {name: result.get(name) for name in SHOWN})
        if "complete" in result:
            self.note(kept, COMPLETE)

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self.close(self.kept(trial))

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        kept = self.kept(trial)
        self.note(kept, FAILED, f"its worker was lost {LOSSES} times")
        self.close(kept)

    def stopped(self, trial: Any) -> None:
        """Note that ASHA stops a trial."""
        self.note(self.kept(trial), STOPPED)

    def note(self, kept: Trial, ended: str, reason: str = "") -> None:
        """Note how a trial ended. A complete one stays so: sampled again or replayed, ASHA may stop it all the same."""
        if kept.ended != COMPLETE:
            kept.ended, kept.reason = ended, reason

    def close(self, kept: Trial) -> None:
        """Remove a trial from the display, until its values are drawn again, and write the record."""
        self.shows.pop(kept.name, None)
        self.board.end(kept.name)
        self.write()

    def kept(self, trial: Any) -> Trial:
        values = plain(trial.config)
        return self.search.record.trial(trial_name(values), values)

    def write(self) -> None:
        self.search.record.write(self.search.out)
