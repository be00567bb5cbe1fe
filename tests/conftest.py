from __future__ import annotations

import signal

import pytest
import torch

# A shell ignores Ctrl-C in what it runs in the background, and processes inherit that; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers, whichever others run."""
    torch.manual_seed(0)
