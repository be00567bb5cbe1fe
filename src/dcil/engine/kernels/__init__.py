"""Triton kernels, one file for each operation of the recorded step. Private to ``dcil.engine``.

This is the only place that asks whether Triton is there: where ``AVAILABLE`` is False, and on the CPU, the callers
compute the same with plain torch.
"""

from __future__ import annotations

import importlib.util

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE:
    from dcil.engine.kernels import conv, crop, loss, norm, pool, select, sgd, views

__all__ = ["AVAILABLE", "conv", "crop", "loss", "norm", "pool", "select", "sgd", "views"]
