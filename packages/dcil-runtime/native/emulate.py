"""Run the checks in check/ for another processor, under qemu: CXX=aarch64-linux-gnu-g++ python native/emulate.py.

Once for a processor that has all that qemu knows, and once for an old one, without dot products of bytes. Needs the
cross compiler and qemu-user (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build import ask, build, compiler, machine
from sanitize import CHECKS, commands

#: As qemu names them.
PROCESSORS = {"aarch64": ["max", "cortex-a53"]}


def complain(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 2


def main() -> int:
    """Build the checks with the cross compiler and run them, but for forks, which qemu cannot do with threads."""
    if not shutil.which(compiler()):
        return complain(f"the C++ compiler {compiler()} is not there")
    target = machine(compiler())
    emulator, libraries = f"qemu-{target}", Path("/usr") / ask(compiler(), "-dumpmachine")
    if not shutil.which(emulator):
        return complain(f"{emulator} must be installed to run programs for {target}; on Debian: apt install qemu-user")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder) / "check", ["-O2", "-DFEW_TILES", "-DEMULATED"], CHECKS)
        for processor in PROCESSORS.get(target, ["max"]):
            for words in commands():
                sys.stdout.write(f"{target} {processor}: ")
                sys.stdout.flush()
                subprocess.run([emulator, "-cpu", processor, "-L", libraries, program, *words], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
