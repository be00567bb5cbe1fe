"""Settings that decide how fast and how exactly a network is trained, not what is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dcil.errors import unknown

ENGINES = ("auto", "eager", "graph")
PRECISIONS = ("auto", "fp32", "tf32", "bf16")
EXECUTORS = ("auto", "plain", "compiled", "streams", "stacked")


@dataclass(frozen=True)
class EngineSettings:
    """
    engine       graph: the whole step recorded once as a CUDA graph and replayed; eager: operation by operation
    precision    of convolutions and matrix products; weights, gradients and statistics are always float32
    low_memory   hold the activations of one path at a time, for one more forward pass per step
    shared_gpu   other runs train on the same GPU: minimise the total work, not the time of one step
    executor     of the graph engine: the network as it is (plain), compiled, fused with paths on streams, or fused and
                 stacked; auto: fused where the network can be rewritten, else compiled
    compiler     the backend of torch.compile
    """

    engine: str = "auto"
    precision: str = "auto"
    low_memory: bool = False
    shared_gpu: bool = False
    executor: str = "auto"
    compiler: str = "inductor"

    def __post_init__(self) -> None:
        for kind, allowed in (("engine", ENGINES), ("precision", PRECISIONS), ("executor", EXECUTORS)):
            if getattr(self, kind) not in allowed:
                raise unknown(kind, getattr(self, kind), allowed)

    def on(self, device: torch.device) -> EngineSettings:
        """Return the settings with "auto" decided: graph and bf16 (if supported) on CUDA, eager and fp32 elsewhere."""
        fast = device.type == "cuda"
        old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        return replace(
            self,
            engine=("graph" if fast else "eager") if self.engine == "auto" else self.engine,
            precision=("bf16" if fast and not old else "fp32") if self.precision == "auto" else self.precision,
        )

    def apply(self) -> None:
        """Set torch's flags, which hold for the whole process."""
        loose = self.precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = loose
        torch.backends.cudnn.allow_tf32 = loose
        torch.backends.cudnn.benchmark = loose  # the fastest algorithm, which need not be the same every time

    def record(self, engine: str) -> dict[str, str]:
        """Return what the summary of a run says about them."""
        found = {"engine": engine, "precision": self.precision}
        return found | {"low_memory": "true"} if self.low_memory else found
