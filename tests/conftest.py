from __future__ import annotations

import signal

import pytest
import torch

# A shell starts what it runs in the background with Ctrl-C ignored, and processes inherit that: tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers, whichever others run."""
    torch.manual_seed(0)
