"""Random streams: every epoch has one of its own, which depends on the seed and the epoch alone."""

from __future__ import annotations

import torch

from dcil import data
from dcil.train import Config
from dcil.train.trainer import Trainer, reseed


def drawn(seed: int, stream: int) -> list[float]:
    reseed(seed, stream)
    return torch.rand(4).tolist()


def test_streams_differ_and_repeat():
    streams = [drawn(seed, stream) for seed in (0, 1) for stream in (0, 1, 2)]
    assert len({tuple(stream) for stream in streams}) == 6
    assert drawn(1, 2) == streams[-1]


def test_each_epoch_draws_from_its_own_stream(tmp_path, monkeypatch):
    """A layer with dropout drops other units in every epoch, and the same after resuming."""
    used: list[tuple[int, int]] = []
    monkeypatch.setattr("dcil.train.trainer.reseed", lambda seed, stream, step=0: used.append((seed, stream)))
    config = Config(epochs=3, target_epoch=2, batch=1438, milestones=(), seed=7)
    trainer = Trainer.build(config, data.load("digits", tmp_path), torch.device("cpu"))
    for epoch in range(3):
        trainer.epoch(epoch, lambda epoch, part, row: None)
    assert {seed for seed, _ in used} == {7} and len(set(used)) == len(used) == 4
