"""Attack the library with kills, faults, damaged files and wrong input, and print what became of it.

    python tests/torture [ATTACK…]         all, or those named; "mutants" is the check that the tests notice mistakes
    DCIL_TORTURE_SEED     seed of every random choice (15)
    DCIL_TORTURE_FACTOR   so many times as many cases (1)

The exit code is 1 if anything was lost, silently wrong, hanging or a traceback. The figures are also written to
build/torture.json, from which tests/torture/figures.py renews those of docs/reliability.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.access("/dev/shm", os.W_OK):  # thousands of synchronised files: a disk would take most of the time
    os.environ.setdefault("TMPDIR", "/dev/shm")

import faults

if __name__ == "__main__":
    faults.preload()

import random
import subprocess
import tempfile
import time
from importlib import import_module

import figures
from samples import Samples
from tally import Tally, judge

SEED = int(os.environ.get("DCIL_TORTURE_SEED", "15"))
FACTOR = float(os.environ.get("DCIL_TORTURE_FACTOR", "1"))
#: Attack -> what it does; each is a module of this folder with ``cases``.
ATTACKS = {
    "kills": "kills and failing file operations",
    "fuzz": "damaged files",
    "invocations": "wrong command lines",
    "api": "wrong uses of the API",
    "locks": "processes that want the same run folder",
    "poison": "NaN and Inf in a user's loop",
    "hostile": "hostile plans and images",
}
#: Besides the attacks: tests that must fail when the source is changed.
MUTANTS = "mutants"


def main(names: list[str]) -> int:
    wanted = names or [*ATTACKS, MUTANTS]
    if unknown := set(wanted) - {*ATTACKS, MUTANTS}:
        raise SystemExit(f"attacks must be among {', '.join([*ATTACKS, MUTANTS])}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        samples = Samples.build(Path(folder)) if set(wanted) & set(ATTACKS) else None
        tallies = [attack(name, samples) for name in ATTACKS if name in wanted and samples]
    figures.write(tallies, SEED, FACTOR)
    survivors = MUTANTS in wanted and check_mutants()
    sys.stdout.write(f"\n{figures.text()}\n")
    return 1 if survivors or any(tally.faults for tally in tallies) else 0


def check_mutants() -> int:
    """Run the mutation check, in a process that has not imported the library."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    check = Path(__file__).parents[1] / "mutation" / "check.py"
    return subprocess.run([sys.executable, check], env=environment, check=False).returncode


def attack(name: str, samples: Samples) -> Tally:
    if name == "kills" and not faults.available():
        sys.stdout.write("kills: skipped, it needs Linux and a C compiler\n")
        return Tally(ATTACKS[name])
    start = time.monotonic()
    cases = [*import_module(name).cases(samples, random.Random(f"{SEED} {name}"), FACTOR)]
    tally = judge(ATTACKS[name], cases)
    tally.seconds = time.monotonic() - start
    for fault in tally.faults[:8]:
        sys.stdout.write(f"{fault['kind']}: {fault['case']}: {fault['detail']}\n")
    sys.stdout.write(f"{name}: {sum(tally.counts.values())} cases, {dict(tally.counts)}, {tally.seconds:.0f} s\n")
    sys.stdout.flush()
    return tally


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
