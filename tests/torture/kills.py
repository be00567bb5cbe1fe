"""Kill commands at their n-th file operation, or let that operation fail; then carry on and compare bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from faults import KILLS, STRIKES, operations, struck
from forks import isolated
from reading import READERS
from samples import (
    DOCUMENTED,
    TRAIN,
    Samples,
    command,
    copied,
    difference,
    leftovers,
    result,
    scratch,
    without_pictures,
)
from tally import FINE, LEFTOVER, LOST, REFUSED, UNCLEAR, WRONG, Case, Verdict, of_outcome

from dcil.cli import main

#: Files that `dcil report` and the comparison leave beside runs.
BESIDE = {"report.html"}


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    """A training is killed at every operation; everything else is sampled."""
    train = [*TRAIN, "--method", "dcil", "--out", "run"]
    yield from trainings("train", train, ["run"], chance, kills=10_000, faults=round(20 * factor))
    compare = [*TRAIN, "--epochs", "2", "--method", "dense,rigl", "--out", "."]
    yield from trainings("comparison", compare, ["dense", "rigl"], chance, round(24 * factor), round(6 * factor))
    for to, file in samples.exports.items():
        words = ["export", str(samples.finished), "--to", to, "--out", f"exported.{to}"]
        yield from writers(f"export {to}", words, file, chance, round(10 * factor))
    yield from writers("report", ["report", str(samples.finished)], None, chance, round(10 * factor))
    for name in ("eval", "report"):
        yield from readers(name, samples.finished, chance, round(12 * factor))


def sample(total: int, count: int, chance: random.Random) -> list[int]:
    """Return ``count`` of the operations 1 to ``total``, spread over all of them."""
    if count >= total:
        return list(range(1, total + 1))
    return [int(chance.uniform(i, i + 1) * total / count) + 1 for i in range(count)]


def struck_at(
    trace: Sequence[str], kinds: Sequence[str], count: int, chance: random.Random
) -> Iterator[tuple[str, str, int]]:
    """Yield label, strike and operation of ``count`` cases of each kind; half a write is there only where one is."""
    for kind in kinds:
        places = range(1, len(trace) + 1)
        if kind in ("kill-halfway", "short"):
            places = [at for at in places if trace[at - 1].startswith("write ")]
        for index in sample(len(places), count, chance):
            at = places[index - 1]
            yield f"{kind} at operation {at} of {len(trace)} ({trace[at - 1]})", kind, at


# -- commands that train: resumed, they end as if nothing had happened ------------------------------------------------


def trainings(
    name: str, words: list[str], runs: list[str], chance: random.Random, kills: int, faults: int
) -> Iterator[Case]:
    with scratch() as folder:
        trace = [line.replace(str(folder), "") for line in operations(partial(without_pictures, words), folder)]
        wanted = {run: result(folder / run) for run in runs}
    plan = [*struck_at(trace, ["kill"], kills, chance)]
    plan += struck_at(trace, [kind for kind in STRIKES if kind != "kill"], faults, chance)
    for label, kind, at in plan:
        yield f"{name}: {label}", partial(interrupted, words, runs, wanted, kind, at)


def interrupted(words: list[str], runs: list[str], wanted: dict[str, object], kind: str, at: int) -> Verdict:
    """Strike the command, resume it until it is done, and compare."""
    with scratch() as folder:
        mode, error = STRIKES[kind]
        first = struck(partial(without_pictures, words), folder, mode, at, error)
        verdict = of_outcome(first)
        if kind in KILLS:
            if first.code is not None:
                return Verdict(UNCLEAR, "was not reached")
        elif verdict.kind not in (FINE, REFUSED):
            return verdict
        again = of_outcome(isolated(lambda: without_pictures([*words, "--resume"])))
        if again.kind == REFUSED:
            return Verdict(LOST, f"cannot be resumed: {again.detail}")
        if again.kind != FINE:
            return again
        for run in runs:
            if wrong := difference(folder / run, wanted[run]):  # type: ignore[arg-type]
                return Verdict(WRONG, f"{run}: {wrong} differs")
            if left := leftovers(folder / run):
                return Verdict(LEFTOVER, f"{run}: {', '.join(left)}")
        if left := sorted(path.name for path in folder.iterdir() if path.name not in {*runs, *BESIDE, *DOCUMENTED}):
            return Verdict(LEFTOVER, ", ".join(left))
        return verdict if kind not in KILLS else Verdict(FINE)


# -- commands that write one file: it is the old one, or the new one, whole -------------------------------------------


def writers(name: str, words: list[str], want: Path | None, chance: random.Random, count: int) -> Iterator[Case]:
    with scratch() as folder:
        trace = [line.replace(str(folder), "") for line in operations(partial(main, words), folder)]
        file = next(path.name for path in folder.iterdir())
    for label, kind, at in struck_at(trace, list(STRIKES), count, chance):
        clears_up = kind not in KILLS and not trace[at - 1].startswith("unlink")
        yield f"{name}: {label}", partial(written, words, file, want, kind, at, clears_up)


def written(words: list[str], file: str, want: Path | None, kind: str, at: int, clears_up: bool) -> Verdict:
    """Strike the command and look at the file; then repeat it, which must work and leave nothing else behind."""
    old = b"what was there before"
    with scratch() as folder:
        (folder / file).write_bytes(old)
        mode, error = STRIKES[kind]
        verdict = of_outcome(struck(partial(main, words), folder, mode, at, error))
        if kind in KILLS:
            verdict = Verdict(REFUSED)
        if verdict.kind not in (FINE, REFUSED):
            return verdict
        if left := [path.name for path in folder.iterdir() if path.name != file and clears_up]:
            return Verdict(LEFTOVER, ", ".join(left))
        if not (folder / file).exists():
            return Verdict(LOST, f"{file} is gone")
        replaced = (folder / file).read_bytes() != old
        if verdict.kind == REFUSED and replaced and not is_whole(folder / file, want):
            return Verdict(LOST, f"{file} is cut short")
        if verdict.kind == FINE and not (replaced and is_whole(folder / file, want)):
            return Verdict(WRONG, f"{file} differs, and the command says that all is well")
        again = of_outcome(command(*words))
        if again.kind != FINE or not is_whole(folder / file, want):
            return Verdict(LOST, f"cannot be repeated: {again.detail}")
        left = [path.name for path in folder.iterdir() if path.name != file]
        return Verdict(LEFTOVER, ", ".join(left)) if left else verdict


def is_whole(file: Path, want: Path | None) -> bool:
    """Whether a file holds the wanted tensors; of a report, which holds times, the end must do."""
    if want is None:
        return file.read_bytes().rstrip().endswith(b"</html>")
    read = READERS[want.suffix[1:]]
    try:
        return bool(read(file) == read(want))
    except Exception:
        return False


# -- commands that read a run: a read that fails is said ---------------------------------------------------------------


def readers(name: str, run: Path, chance: random.Random, count: int) -> Iterator[Case]:
    def words(folder: Path) -> list[str]:
        return [name, str(folder), *(["--out", str(folder.parent.parent / "r.html")] if name == "report" else [])]

    with scratch() as folder:
        (folder / "watched").mkdir()
        copy = copied(run, folder / "watched")
        trace = [line.replace(str(folder), "") for line in operations(partial(main, words(copy)), folder / "watched")]
        wanted = command(*words(copy)).out.replace(str(folder), "")
    for label, kind, at in struck_at(trace, ["EIO", "EACCES"], count, chance):
        yield f"{name}: {label}", partial(read, words, run, wanted, kind, at)


def read(words: Callable[[Path], list[str]], run: Path, wanted: str, kind: str, at: int) -> Verdict:
    with scratch() as folder:
        (folder / "watched").mkdir()
        copy = copied(run, folder / "watched")
        mode, error = STRIKES[kind]
        outcome = struck(partial(main, words(copy)), folder / "watched", mode, at, error)
        verdict = of_outcome(outcome)
        if verdict.kind == FINE and outcome.out.replace(str(folder), "") != wanted:
            return Verdict(WRONG, "prints something else")
        return verdict
