"""The Triton kernels compute what plain torch does: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).parents[1] / "support" / "kernel_checks.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["conv", "norm", "pool", "weight_views", "selection", "loss", "batch", "update"])
def test_kernels_agree_with_torch(name, device):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", str(CHECKS), name, device]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
