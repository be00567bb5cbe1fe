"""Counted: the steps done, and one step that stands for all those with the same loss."""

from __future__ import annotations

from collections.abc import Hashable

from dcil.method import Method


class Counted:
    """What counts steps. A compiler that sees ``_loss_step`` has another number only when the loss is another one."""

    method: Method
    _loss_step: int
    _loss_key: Hashable = None
    _count = 0

    @property
    def _steps_done(self) -> int:
        return self._count

    @_steps_done.setter
    def _steps_done(self, steps: int) -> None:
        self._count = steps
        if (key := self.method.loss_key(steps)) is None or key != self._loss_key:
            self._loss_key, self._loss_step = key, steps
