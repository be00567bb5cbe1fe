"""Run the checks in check/ under the sanitizers: python native/sanitize.py [address,undefined] [thread].

DCIL_FUZZ_SECONDS and DCIL_FUZZ_SEED choose how long plan files are changed at random, and how.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from build import HERE, build

#: FEW_TILES instantiates the same templates for few tile sizes, in a tenth of the compile time.
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-DFEW_TILES"]
CHECKS = sorted((HERE / "check").glob("*.cpp"))
STORED = sorted((HERE.parent / "tests" / "files").glob("v*/*.dcil"))


def commands() -> list[list[str | Path]]:
    """Return the arguments of each run of the program."""
    seconds, seed = (os.environ.get(f"DCIL_FUZZ_{name}", usual) for name, usual in (("SECONDS", "20"), ("SEED", "1")))
    return [["networks"], ["stored", *STORED], ["mutants", seconds, seed, *STORED]]


def main() -> int:
    """Build and run the checks once for each sanitizer named on the command line."""
    for kind in sys.argv[1:] or ["address,undefined", "thread"]:
        with tempfile.TemporaryDirectory() as folder:
            program = build(Path(folder) / "check", [*FLAGS, f"-fsanitize={kind}"], CHECKS)
            for words in commands():
                sys.stdout.write(f"{kind}: ")
                sys.stdout.flush()
                subprocess.run([program, *words], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
