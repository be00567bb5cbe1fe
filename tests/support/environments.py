"""Virtual environments that hold chosen packages and nothing else, and commands run in them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

TREE = Path(__file__).parents[2]


class Environment:
    """A virtual environment without pip; packages come in through the pip of the interpreter that runs the tests."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.bin = folder / "bin"
        self.packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def borrow(self, *names: str) -> None:
        """Link installed distributions and all that they depend on: as good as installed, without the time it takes."""
        for name in closure(names):
            dist = metadata.distribution(name)
            tops = {file.parts[0] for file in dist.files or [] if file.suffix != ".pth"} - {"..", "__pycache__"}
            for top in tops:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(dist.locate_file(top))))

    def install(self, *what: str | Path) -> None:
        """Install with pip; ``--no-index`` among ``what`` makes it fail where a dependency is not yet there."""
        command = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet", *what]
        subprocess.run(command, check=True, cwd=TREE)

    def run(self, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; nothing of the caller's Python path reaches it."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_", "COVERAGE_"))}
        clean["OMP_NUM_THREADS"] = "1"
        command = [self.bin / words[0], *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=clean, timeout=300)


def closure(names: tuple[str, ...]) -> set[str]:
    """Return the installed distributions ``names`` with all their dependencies here, extras left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(need.name)
    return found


def build(project: Path, out: Path, *options: str) -> list[Path]:
    """Build the distributions of a project with the installed hatchling."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, project]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted(out.iterdir())
