"""Compile the native module as a step of building the wheel.

An editable install goes on without a compiler, because everything in a checkout but running a plan works without the
native module. A wheel needs it: there it is all that counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from build import OUT, PLATFORM_SETS, build, compiler, machine, up_to_date


def platform() -> str:
    """Return the platform that the native module is for: this one, or a cross compiler's."""
    here = sysconfig.get_platform()
    if here.startswith("linux") and "CXX" in os.environ:
        target = machine(compiler())
        here = f"linux-{target}" if target in PLATFORM_SETS else here
    return here


class NativeHook(BuildHookInterface):
    PLUGIN_NAME = "native"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            if platform() != sysconfig.get_platform():  # the module of this checkout stays this machine's
                self.folder = tempfile.TemporaryDirectory()
                module = build(Path(self.folder.name) / OUT.name)
                build_data["force_include"][str(module)] = f"dcil_runtime/{OUT.name}"
            else:
                if not up_to_date(OUT):
                    build(OUT)
                # Ignored by git, needed in the wheel.
                build_data["artifacts"].append("src/dcil_runtime/libdcil_runtime.so")
        except (OSError, subprocess.CalledProcessError) as error:
            if version != "editable":
                raise
            self.app.display_warning(f"dcil-runtime is installed without its native module: {error}")
            return
        tag = platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"  # loaded with ctypes: one file for every Python
        build_data["pure_python"] = False
