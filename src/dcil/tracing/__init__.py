"""Capture a network as a graph: the one way, for the engine's rewriter, the compact export and the CPU plan."""

from dcil.tracing.batch import BATCH_SIZES, trace
from dcil.tracing.tracer import TracingError, is_torch_module, place_of

__all__ = ["BATCH_SIZES", "TracingError", "is_torch_module", "place_of", "trace"]
