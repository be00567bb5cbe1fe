"""Mask updates recorded like the steps: hundreds of small kernels that the host need not launch one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from dcil import SparseNet
from dcil.engine.cuda.capture import PROCESS_LOCK, GraphRecorder
from dcil.engine.cuda.flat import Flat
from dcil.engine.cuda.ranking import Ranking, fits
from dcil.method import StepContext


class RecordedMaskUpdates:
    """The first update of a form is made operation by operation, the second recorded, the others replayed.

    The sparsity, which grows once per epoch, is part of the form: an epoch has some 24 updates and one recording.
    Where every update has a form of its own (``smooth``), nothing is recorded, since nothing would be replayed.
    """

    changes: Tensor

    def __init__(self, net: SparseNet, flat: Flat, recorder: GraphRecorder) -> None:
        self.method, self.recorder = net.method, recorder
        self.move: Callable[[StepContext], Tensor] = Ranking(net, flat) if fits(net) else net.method.move_masks
        self.form: Hashable = None
        self.replay: Callable[[], None] | None = None

    @torch.no_grad()
    def __call__(self, now: StepContext) -> Tensor:
        form = self.method.update_form(now.step)
        if form is None or form != self.form:
            self.form, self.replay = form, None
            return self.move(now)
        if self.replay is None and not self.record(now):
            return self.move(now)
        assert self.replay is not None
        self.replay()
        return self.changes.clone()  # the next replay, of whatever recording, writes there again

    def record(self, now: StepContext) -> bool:
        """Unless another run of this process is recording, which may take half a minute: then at the next update."""

        def move() -> None:
            self.changes = self.move(now)

        if not PROCESS_LOCK.acquire(blocking=False):
            return False
        try:
            self.replay = self.recorder.capture(move)
        finally:
            PROCESS_LOCK.release()
        return True
