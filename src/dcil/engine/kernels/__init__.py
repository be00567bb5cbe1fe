"""Triton kernels, one file for each operation of the recorded step. Private to ``dcil.engine``.

Only this file asks whether Triton is installed: where ``AVAILABLE`` is False, and on the CPU, the callers compute the
same with plain torch. Each kernel has pseudo-code above it; the functions that launch the kernels choose block sizes.
"""

from __future__ import annotations

import importlib.util

AVAILABLE = importlib.util.find_spec("triton") is not None

if AVAILABLE:
    from dcil.engine.kernels import conv, crop, division, loss, norm, pool, select, sgd, views, window

__all__ = ["AVAILABLE", "conv", "crop", "division", "loss", "norm", "pool", "select", "sgd", "views", "window"]
