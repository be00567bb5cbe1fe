"""Builds the native module with the package; without a compiler everything but dcil_runtime still works."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from build import OUT, build


class NativeHook(BuildHookInterface):
    PLUGIN_NAME = "native"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            build(OUT)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"dcil without its CPU runtime: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # loaded with ctypes: one file for every Python
        build_data["pure_python"] = False
        build_data["artifacts"].append("src/dcil_runtime/_native.so")  # ignored by git, wanted in the wheel
