"""Run check/check.cpp under the sanitizers: python native/sanitize.py [address,undefined] [thread]."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from build import HERE, build

#: FEW_TILES instantiates the same templates for few tile sizes, in a tenth of the compile time.
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-DFEW_TILES"]


def main() -> int:
    """Build and run the check once for each sanitizer named on the command line."""
    for kind in sys.argv[1:] or ["address,undefined", "thread"]:
        with tempfile.TemporaryDirectory() as folder:
            program = build(Path(folder) / "check", [*FLAGS, f"-fsanitize={kind}"], HERE / "check" / "check.cpp")
            sys.stdout.write(f"{kind}: ")
            sys.stdout.flush()
            subprocess.run([program], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
