"""Damage the files of runs, exports, lists and records; what reads them gives the same result or one line."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from damage_files import BYTES, TEXT
from forks import isolated
from reading import CHECKED, READERS, tensors_of
from safetensors.torch import load_file
from samples import TRAIN, Samples, command, copied, scratch, without_pictures
from tally import FINE, LOST, REFUSED, WRONG, Case, Verdict, of_outcome

from dcil.cli import main
from dcil.errors import UserError

LIMIT, MEMORY = 20.0, 8 << 30
#: Files of a run and how often each is damaged. The weights of a checkpoint are most of its bytes: flips go there.
FILES = {
    "config.json": 60,
    "metrics.jsonl": 50,
    "checkpoint.safetensors": 80,
    "checkpoint.json": 20,
    "summary.json": 40,
}
FILES |= {"model.safetensors": 10}
#: Records of results that a page is made of.
RECORDS = ("cifar10/resnet20/dcil-0.9-seed0.json", "cifar10/resnet20/dpf-0.9-seed0.json")
RECORDS += ("cifar10/resnet20/dense-seed0.json",)
LIST = [{"name": "a", "method": "dense"}, {"method": "rigl", "sparsity": 0.5, "settings": {"every": 2}, "seed": 3}]
SHORT = [*TRAIN[1:], "--epochs", "1", "--batch", "1438"]


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    for run, commands in ((samples.finished, ("eval", "report", "export", "resume")), (samples.stopped, STOPPED)):
        wanted = {name: COMMANDS[name](samples, run) for name in commands}
        for file, count in FILES.items():
            if (run / file).exists():
                for index in range(round(count * factor)):
                    name = commands[index % len(commands)]
                    kind = chance.choice(BYTES if file == "model.safetensors" else TEXT)
                    seed = chance.randrange(2**32)
                    label = f"{name} of a {run.name} run after {kind.__name__}({seed}) of {file}"
                    yield label, partial(damaged_run, samples, run, file, kind, seed, name, wanted[name])
    yield from exports(samples, chance, factor)
    for index in range(round(60 * factor)):
        kind, seed = chance.choice(TEXT), chance.randrange(2**32)
        yield f"sweep --list after {kind.__name__}({seed}), {index}", partial(damaged_list, kind, seed)
    for _ in range(round(50 * factor)):
        kind, seed = chance.choice(TEXT), chance.randrange(2**32)
        yield f"reproduce --report after {kind.__name__}({seed})", partial(damaged_record, kind, seed)


# -- run folders -------------------------------------------------------------------------------------------------------


def evaluated(samples: Samples, run: Path) -> Any:
    outcome = command("eval", str(run), limit=LIMIT)
    return outcome, outcome.out.replace(str(run), "")


def reported(samples: Samples, run: Path) -> Any:
    """A report shows what the records say: that it is made, or refused, is all that can be asked."""
    return command("report", str(run), "--out", str(run.parent / "report.html"), limit=LIMIT), None


def exported(samples: Samples, run: Path) -> Any:
    file = run.parent / "fuzzed.sparse"
    outcome = command("export", str(run), "--to", "sparse", "--out", str(file), limit=LIMIT)
    return outcome, READERS["sparse"](file) if outcome.code == 0 else None


def resumed(samples: Samples, run: Path) -> Any:
    """The network at the end, and of a run that was stopped also masks and momentum.

    Metrics of earlier epochs are what their file says; a run that is complete does not look at its checkpoint.
    """
    with scratch() as folder:
        copy = copied(run, folder)
        outcome = isolated(lambda: without_pictures(["train", "--resume", "--out", str(copy)]), LIMIT, MEMORY)
        if outcome.code != 0:
            return outcome, None
        files = ("model",) if run.name == samples.finished.name else ("model", "checkpoint")
        return outcome, {name: tensors_of(load_file(copy / f"{name}.safetensors")) for name in files}


COMMANDS: dict[str, Callable[[Samples, Path], Any]] = {
    "eval": evaluated,
    "report": reported,
    "export": exported,
    "resume": resumed,
}
STOPPED = ("eval", "report", "resume", "resume")


def damaged_run(
    samples: Samples,
    run: Path,
    file: str,
    kind: Callable[[bytes, random.Random], bytes],
    seed: int,
    name: str,
    wanted: Any,
) -> Verdict:
    with scratch() as folder:
        copy = copied(run, folder)
        (copy / file).write_bytes(kind((copy / file).read_bytes(), random.Random(seed)))
        try:
            outcome, found = COMMANDS[name](samples, copy)
        except Exception as error:  # the result cannot be read, though the command said that all is well
            mine = file == "model.safetensors"  # which a complete run does not look at again
            return Verdict(FINE) if mine else Verdict(WRONG, f"{type(error).__name__}: {error}")
        verdict = of_outcome(outcome)
        if verdict.kind == FINE and file != "model.safetensors" and found != wanted[1]:
            return Verdict(WRONG, difference_of(found, wanted[1]))
        return verdict


def difference_of(found: Any, wanted: Any) -> str:
    if isinstance(found, dict):
        return next(key for key in {**found, **wanted} if found.get(key) != wanted.get(key))
    lines = zip(found.splitlines(), wanted.splitlines(), strict=False)
    return next((f"{new.strip()} for {old.strip()}" for new, old in lines if new != old), "more or fewer lines")


# -- exported files ----------------------------------------------------------------------------------------------------


def exports(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    for to in ("sparse", "semi-structured", "torch", "cpu"):
        for _ in range(round(50 * factor)):
            kind = chance.choice(TEXT if to in ("sparse", "semi-structured") else BYTES)
            seed = chance.randrange(2**32)
            label = f"reading {to} after {kind.__name__}({seed})"
            yield label, partial(damaged_export, samples.exports[to], to, kind, seed)


def damaged_export(source: Path, to: str, kind: Callable[[bytes, random.Random], bytes], seed: int) -> Verdict:
    reader = READERS[to]
    with scratch() as folder:
        file = copied(source, folder)
        file.write_bytes(kind(source.read_bytes(), random.Random(seed)))

        def read() -> int:
            try:
                found = reader(file)
            except ValueError as error:  # UserError and PlanError are ones
                if not isinstance(error, UserError) and type(error).__name__ != "PlanError":
                    raise
                sys.stderr.write(f"dcil: {error}\n")
                return 2
            return 3 if to in CHECKED and found != reader(source) else 0

        outcome = isolated(read, LIMIT, MEMORY)
        return Verdict(WRONG, "reads as something else") if outcome.code == 3 else of_outcome(outcome)


# -- lists and records -------------------------------------------------------------------------------------------------


def damaged_list(kind: Callable[[bytes, random.Random], bytes], seed: int) -> Verdict:
    """A list that was taken may train something else, but nowhere else; one that is refused writes nothing."""
    with scratch() as folder:
        file, out = folder / "list.json", folder / "below" / "out"
        file.write_bytes(kind(json.dumps(LIST).encode(), random.Random(seed)))
        words = ["sweep", "--list", str(file), "--out", str(out), *SHORT]
        verdict = of_outcome(isolated(lambda: without_pictures(words), LIMIT, MEMORY))
        outside = [
            str(path) for path in folder.rglob("*") if path.is_file() and path != file and out not in path.parents
        ]
        if outside:
            return Verdict(LOST, f"wrote {outside}")
        if verdict.kind == REFUSED and out.exists() and any(out.iterdir()):
            return Verdict(LOST, f"refused ({verdict.detail}), but wrote into {[p.name for p in out.iterdir()]}")
        return verdict


def damaged_record(kind: Callable[[bytes, random.Random], bytes], seed: int) -> Verdict:
    chance, root = random.Random(seed), Path(__file__).parents[2] / "results"
    with scratch() as folder:
        for name in RECORDS:
            (folder / "results" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / "results" / name)
        file = folder / "results" / chance.choice(RECORDS)
        file.write_bytes(kind(file.read_bytes(), chance))
        outcome = isolated(lambda: main(["reproduce", "--report"]), LIMIT, MEMORY)
        verdict = of_outcome(outcome)
        page = folder / "docs" / "results.md"
        if verdict.kind == FINE and "<b>x</b>" in page.read_text():
            return Verdict(WRONG, "raw markup of a record in results.md")
        return verdict
