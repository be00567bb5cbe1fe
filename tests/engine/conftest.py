from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """cuDNN computes in tf32 unless it is told not to, and chooses among algorithms that round differently."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
