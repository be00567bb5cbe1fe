"""The plain torch loops that the engine is compared with."""

from __future__ import annotations

import pytest
import torch

from dcil import models
from dcil.bench import baselines


@pytest.mark.parametrize("make", [baselines.dense_step, baselines.dcil_step])
def test_a_plain_loop_trains(make):
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    model = models.build("resnet8-digits", 10, 3)
    before = model.conv1.weight.detach().clone()
    step = make(model, None, x, y)
    step(), step()
    assert not torch.equal(model.conv1.weight, before)


def test_a_loop_that_torch_cannot_run_is_left_out(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: 1 / 0)
    found = baselines.own_loop_ms("resnet8-digits", 10, 2, 8, torch.device("cpu"), calls=1)
    for method in ("dense", "dcil"):
        assert found[method]["eager"] > 0
        assert found[method]["compile"] is None and found[method]["compile + CUDA graphs"] is None
