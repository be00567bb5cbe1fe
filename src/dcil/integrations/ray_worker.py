"""What a Ray worker does for one run: train it until it ends, the budget does, or the command is stopped."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dcil
from dcil.runs.file_lock import LockHeld, is_held
from dcil.runs.progress import Progress
from dcil.train.budget import Budget, within_budget
from dcil.train.memory import keep_freed_memory
from dcil.train.parallel import Stopped, reason

#: Trains a run that is given as text.
Work = Callable[[str, Progress], None]
#: What a task returns: the run failed, or with it the accelerator of its process; or this machine cannot train any.
FAILED, BROKEN, UNFIT = "failed", "broken", "unfit"
POLL = 1.0  # seconds between two tries to lock a run folder


@dataclass(frozen=True)
class Terms:
    """What holds for every run of a command.

    witness    a file in the folder of the runs that the command has locked
    threads    of a run on a CPU
    deadline   the end of the budget by the clock of the wall, None without one
    version    of dcil
    """

    witness: str
    threads: int
    deadline: float | None = None
    version: str = dcil.__version__


def work(function: Work, text: str, terms: str, patience: float) -> tuple[str, str]:
    """Train one run; return FAILED, BROKEN or UNFIT and the reason, two empty texts if nothing was wrong.

    A run whose folder is locked is tried again for ``patience`` seconds: a file server takes a while to notice that the
    machine with the lock is gone. Only text crosses the wire, both ways.
    """
    if not accelerator_works():
        os._exit(1)  # Ray starts another process, which gets the run
    given = Terms(**json.loads(terms))
    budget = Budget(math.inf if given.deadline is None else given.deadline, time.time)
    if unfit := why_unfit(given):
        return UNFIT, unfit
    try:
        torch.set_num_threads(given.threads)
        keep_freed_memory()
        with stopped_by_interrupt(budget.over):
            progress = within_budget(lambda epoch, part, row: None, budget)
            if budget.allows(0):
                try_to_lock(lambda: function(text, progress), patience, budget)
    except Stopped:
        pass
    except Exception as error:  # its traceback could not be read without our classes
        return FAILED if accelerator_works() else BROKEN, reason(error)
    finally:
        free_memory()
    return "", ""


def accelerator_works() -> bool:
    """Return whether the GPU still computes for this process: after most errors of CUDA it never does again."""
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:  # torch.AcceleratorError is one
        return False
    return True


def free_memory() -> None:
    """Free the GPU memory that the next run, and those of others, need."""
    if torch.cuda.is_initialized() and accelerator_works():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


def terms_text(terms: Terms) -> str:
    return json.dumps(asdict(terms))


def why_unfit(terms: Terms) -> str:
    """Return why this machine cannot train any run, an empty text if it can.

    It does not see the runs, or not who writes to them, or has another version of dcil.
    """
    here = platform.node()
    if terms.version != dcil.__version__:
        return (
            f"{here} must have dcil {terms.version} as the command has, has {dcil.__version__}; install the same "
            "version on all nodes"
        )
    folder = Path(terms.witness).parent
    if not os.path.exists(terms.witness):
        return f"--out must be on storage that all nodes share, {here} does not see {folder} as it is"
    if not is_held(Path(terms.witness)):
        return (
            f"--out must be on a file system whose locks hold on all nodes, on {here} those of {folder} do not; mount "
            "it with locks (NFS: without nolock and local_lock; Lustre: flock), or choose another --out"
        )
    return ""


def try_to_lock(train: Callable[[], None], patience: float, budget: Budget) -> None:
    """Call ``train``, again while another process has the lock of its folder."""
    end = time.monotonic() + patience
    while True:
        try:
            return train()
        except LockHeld:
            if time.monotonic() >= end:
                raise
        if budget.over.wait(POLL) or not budget.allows(0):
            raise Stopped


@contextmanager
def stopped_by_interrupt(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` at an interrupt, which is how Ray cancels a task; the run then ends between two steps."""
    before = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
