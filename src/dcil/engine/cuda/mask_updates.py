"""Record and replay mask updates, which consist of hundreds of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from dcil import SparseNet, StepContext
from dcil.engine.cuda.capture import GraphRecorder, Recording
from dcil.engine.cuda.flat import FlatParameters
from dcil.engine.cuda.ranking import Ranking, is_global_magnitude
from dcil.engine.lock import PROCESS_LOCK


class RecordedHooks:
    """Replaces the method's hooks that ``SparseNet.step`` calls, since the step itself is recorded.

    ``after_step`` is part of the recorded step. The first mask update with a key runs operation by operation, the
    second is recorded, the others are replayed. A ranking by magnitude takes the number of pruned weights from the
    device, so that one recording serves for all; of other updates the sparsity is part of the key.

    The recorder is not that of the steps: recordings of one reuse memory, and an update must overwrite neither the
    gradients that it reads nor what the step has left for the user.
    """

    def __init__(self, net: SparseNet, flat: FlatParameters | None) -> None:
        self.net, self.recorder = net, GraphRecorder(net.first_mask.device)
        ranked = is_global_magnitude(net, net.method.update_key(net.steps_done))
        self.ranking = Ranking(net, flat) if ranked else None
        self.records_after_step = True
        self.key: Hashable = None
        self.recording: Recording | None = None

    def after_step(self, context: StepContext) -> None:
        """Do nothing: the recorded step has called it, unless the optimizer steps outside of the recording."""
        if not self.records_after_step:
            self.net.method.after_step(context)

    @torch.no_grad()
    def update_masks(self, context: StepContext) -> Tensor:
        if self.ranking is None:
            work: Callable[[], Tensor] = lambda: self.net.method.update_masks(context)  # noqa: E731
            return self.run(self.net.method.update_key(context.step), work)
        if not self.ranking.prepare(context):
            return self.ranking(context)
        return self.run("ranking", self.ranking.select)

    def run(self, key: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """Do the work, or what was recorded for its key; None is never recorded."""
        if key is None or key != self.key:
            self.key, self.recording = key, None
            return work()
        if self.recording is None and not self.record(work):
            return work()
        assert self.recording is not None
        changes: Tensor = self.recording()
        return changes.clone()  # the next replay of any recording overwrites it

    def record(self, work: Callable[[], Tensor]) -> bool:
        """Record the update; return False if another run of this process is recording, which may take half a minute."""
        if not PROCESS_LOCK.acquire(blocking=False):
            return False
        try:
            self.recording = self.recorder.capture(work)
        finally:
            PROCESS_LOCK.release()
        return True
