"""Record the versions and the hardware that a number was measured with."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

import dcil


def cpu_name() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, str]:
    """Return versions and hardware, as strings."""
    found = {
        "dcil": dcil.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
    return found


def hardware(found: Mapping[str, str]) -> str:
    """Return the part of an environment that times depend on: the GPU, or else the CPU."""
    return found.get("gpu") or found["cpu"]
