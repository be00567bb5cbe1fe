"""Accuracy of the paths of a network on the test images; it lives beside the engines, which do it too."""

from __future__ import annotations

from dcil.engine.evaluate import correct, evaluate

__all__ = ["correct", "evaluate"]
