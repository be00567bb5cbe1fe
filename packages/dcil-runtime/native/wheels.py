"""Build the distributions of dcil-runtime: python native/wheels.py OUT.

A source distribution, and from it a wheel for the platform that the C++ compiler writes code for; CXX may name a cross
compiler, as in CXX=aarch64-linux-gnu-g++. The wheel's tag is the oldest manylinux whose symbols suffice, as auditwheel
finds them: it follows from the libraries that the compiler links with. Needs build, hatchling and auditwheel from PyPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from build import compiler

PROJECT = Path(__file__).parents[1]
NEEDED = ("build", "hatchling", "auditwheel")


def run(module: str, *words: str | Path) -> None:
    """Run a module of this environment, which also finds the programs of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    subprocess.run([sys.executable, "-m", module, *words], check=True, cwd=PROJECT, env=environment)


def missing() -> list[str]:
    """Return what of NEEDED is not installed."""
    installed = {dist.name for dist in metadata.distributions()}
    return [name for name in NEEDED if name not in installed]


def complain(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 2


def main() -> int:
    """Build, then let auditwheel name the platform; it fails where a library is missing that it would have to add."""
    if len(sys.argv) != 2:
        return complain("a folder must be given: python native/wheels.py OUT")
    if missing():
        return complain(f"{', '.join(missing())} must be installed: pip install {' '.join(NEEDED)}")
    if not shutil.which(compiler()):
        return complain(f"the C++ compiler {compiler()} is not there")
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run("build", "--no-isolation", "--outdir", folder, PROJECT)
        (source,) = Path(folder).glob("*.tar.gz")
        (wheel,) = Path(folder).glob("*.whl")
        run("auditwheel", "repair", "--only-plat", "--patcher", "none", "--wheel-dir", out, wheel)
        (out / source.name).write_bytes(source.read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
