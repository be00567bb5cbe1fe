"""Put every mutant into a copy of the source and run its tests: one of them must fail. Prints the score.

    python tests/mutation/check.py [PART OF A FILE'S NAME]

The exit code is 1 if a mutant was not noticed, or if its text is no longer in the source.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "torture"))

from forks import Outcome, isolated, spread  # noqa: E402
from mutants import MUTANTS, Mutant  # noqa: E402

LIMIT = 120.0
#: Imported before the forks: they take most of the time of a test that fails at once. Not dcil itself, of course.
HEAVY = ("torch", "torch.func", "numpy", "pytest", "hypothesis", "_hypothesis_pytestplugin", "safetensors.torch")
HEAVY += ("rich.console", "sklearn.datasets", "torch.distributed.tensor", "torch._dynamo")


def main(part: str = "") -> int:
    chosen = [mutant for mutant in MUTANTS if part in mutant.file]
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for mutant in chosen:  # all texts are looked for first
            mutant_of(mutant, Path(folder) / "src")
        start = time.monotonic()
        unchanged = sorted({mutant.tests for mutant in chosen})
        clean = spread([partial(run_tests, tests, None) for tests in unchanged])
        if failing := [outcome.out for outcome in clean if outcome.code != 0]:
            sys.stdout.write(f"the tests must pass on the source as it is:\n{failing[0][-3000:]}\n")
            return 1
        outcomes = spread([partial(run_tests, mutant.tests, mutant) for mutant in chosen])
    return report(chosen, outcomes, time.monotonic() - start, write=not part)


def mutant_of(mutant: Mutant, src: Path) -> None:
    """Copy the source to ``src`` with the mistake in it."""
    shutil.rmtree(src, ignore_errors=True)
    shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
    mutant.apply(src / "dcil")


def run_tests(tests: str, mutant: Mutant | None) -> Outcome:
    """Run pytest in a tree of its own, with the mistake in it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        if mutant is None:
            shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
        else:
            mutant_of(mutant, tree / "src")
        for name in ("tests", "packages", "examples", "pyproject.toml"):
            (tree / name).symlink_to(ROOT / name)
        outcome = isolated(partial(pytest_in, tree, tests.split()), LIMIT)
    if mutant is not None and outcome.code == 0 and not mutant.survives:
        sys.stdout.write(f"not noticed: {mutant}\n")
        sys.stdout.flush()
    return outcome


def pytest_in(tree: Path, files: list[str]) -> int:
    import pytest

    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.path[:0] = [str(tree / "src"), str(ROOT / "tests" / "support")]
    sys.dont_write_bytecode = True
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-cov", "--rootdir=."]
    code = int(pytest.main([*options, "-o", "addopts=", *files]))
    source = sys.modules["dcil"].__file__ or ""
    return code if source.startswith(str(tree)) else 70  # the mutant was not what ran


def report(mutants: list[Mutant], outcomes: list[Outcome], seconds: float, write: bool) -> int:
    noticed, lost = 0, []
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome.code == 1 or outcome.hung:
            noticed += 1
        elif outcome.code != 0:
            raise RuntimeError(f"{mutant}: the tests did not run: {outcome.out[-2000:]}{outcome.err[-2000:]}")
        elif not mutant.survives:
            lost.append(str(mutant))
        if mutant.survives and outcome.code == 1:
            sys.stdout.write(f"noticed after all, so drop its excuse: {mutant}\n")
    excused = [
        str(mutant) for mutant, outcome in zip(mutants, outcomes, strict=True) if mutant.survives and not outcome.code
    ]
    sys.stdout.write(
        f"mutants: {noticed} of {len(mutants)} noticed, {len(excused)} that no test can notice, {seconds:.0f} s\n"
    )
    if write:
        (ROOT / "build").mkdir(exist_ok=True)
        record = {"mutants": len(mutants), "noticed": noticed, "excused": excused, "not noticed": lost}
        (ROOT / "build" / "mutants.json").write_text(json.dumps(record, indent=1))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
