"""Record and replay mask updates, which consist of hundreds of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from dcil import SparseNet, StepContext
from dcil.engine.cuda.capture import GraphRecorder
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.ranking import Ranking, is_global_magnitude
from dcil.engine.lock import PROCESS_LOCK


class RecordedHooks:
    """Replaces the method's hooks that ``SparseNet.step`` calls, since the step itself is recorded.

    ``after_step`` is part of the recorded step. The first mask update with a key runs operation by operation, the
    second is recorded, the others are replayed. The sparsity, which grows once per epoch, is part of the key: an epoch
    has about 24 updates and one recording. If every update has a different key (``smooth``), nothing is recorded.
    """

    changes: Tensor

    def __init__(self, net: SparseNet, flat: FlatParameters, recorder: GraphRecorder) -> None:
        self.net, self.recorder = net, recorder
        ranked = is_global_magnitude(net, net.method.update_key(net.steps_done))
        self.update: Callable[[StepContext], Tensor] = Ranking(net, flat) if ranked else net.method.update_masks
        self.key: Hashable = None
        self.replay: Callable[[], None] | None = None

    def after_step(self, context: StepContext) -> None:
        """Do nothing: the recorded step has called it."""

    @torch.no_grad()
    def update_masks(self, context: StepContext) -> Tensor:
        key = self.net.method.update_key(context.step)
        if key is None or key != self.key:
            self.key, self.replay = key, None
            return self.update(context)
        if self.replay is None and not self.record(context):
            return self.update(context)
        assert self.replay is not None
        self.replay()
        return self.changes.clone()  # the next replay of any recording overwrites it

    def record(self, context: StepContext) -> bool:
        """Record the update; return False if another run of this process is recording, which may take half a minute."""

        def work() -> None:
            self.changes = self.update(context)

        if not PROCESS_LOCK.acquire(blocking=False):
            return False
        try:
            self.replay = self.recorder.capture(work)
        finally:
            PROCESS_LOCK.release()
        return True
