"""How fast and how exactly: choices that change when a run ends and its last digits, not what is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dcil.errors import unknown

ENGINES = ("auto", "eager", "graph")
PRECISIONS = ("auto", "fp32", "tf32", "bf16")
ROUTES = ("auto", "plain", "streams", "stacked")


@dataclass(frozen=True)
class EngineSettings:
    """
    engine       graph: the whole step recorded once and replayed (CUDA); eager: operation by operation
    precision    of convolutions and matrix products; weights, gradients and statistics are float32 anyway
    low_memory   hold the activations of one path at a time, for one more forward pass per step
    shared_gpu      other runs share the GPU: what matters is the work, not how long one step takes
    route        inside graph: the network as it is, fused with the paths on streams, or fused and stacked
    """

    engine: str = "auto"
    precision: str = "auto"
    low_memory: bool = False
    shared_gpu: bool = False
    route: str = "auto"

    def __post_init__(self) -> None:
        for kind, allowed in (("engine", ENGINES), ("precision", PRECISIONS), ("route", ROUTES)):
            if getattr(self, kind) not in allowed:
                raise unknown(kind, getattr(self, kind), allowed)

    def on(self, device: torch.device) -> EngineSettings:
        """With "auto" decided: graph and bf16 (where the GPU has it) on CUDA, eager and fp32 anywhere else."""
        fast = device.type == "cuda"
        old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        return replace(
            self,
            engine=("graph" if fast else "eager") if self.engine == "auto" else self.engine,
            precision=("bf16" if fast and not old else "fp32") if self.precision == "auto" else self.precision,
        )

    def apply(self) -> None:
        """Tell torch, for the whole process."""
        loose = self.precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = loose
        torch.backends.cudnn.allow_tf32 = loose
        torch.backends.cudnn.benchmark = loose  # the fastest algorithm, not the same one every time

    def record(self, engine: str) -> dict[str, str]:
        """For the summary of a run."""
        found = {"engine": engine, "precision": self.precision}
        return found | {"low_memory": "true"} if self.low_memory else found
