"""The Triton kernels compute what plain torch does, as far as that can be told without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["conv", "norm", "pool", "seen", "selection", "loss", "batch", "update"])
def test_kernels_agree_with_torch(name):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", str(HERE / "kernels.py"), name]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
