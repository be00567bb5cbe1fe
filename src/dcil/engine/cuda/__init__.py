"""The recorded engine on CUDA: the whole training step as one graph. Private to ``dcil.engine``."""
