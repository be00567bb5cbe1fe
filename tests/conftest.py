from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers, whichever others run."""
    torch.manual_seed(0)
