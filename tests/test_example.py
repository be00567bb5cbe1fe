"""The method on one page and the library are the same method: equal after every step."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import torch

from dcil import DCIL, SparseNet


def load_example():
    path = Path(__file__).parents[1] / "examples" / "dcil_in_one_file.py"
    spec = importlib.util.spec_from_file_location("dcil_in_one_file", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_equals_the_library_step_by_step(monkeypatch):
    page = load_example()
    for name, value in {"STEPS": 80, "RAMP": 60, "WARMUP": 20}.items():  # every stage, in fewer steps
        monkeypatch.setattr(page, name, value)
    x, y, _, _ = page.digits()
    x, model = x.double(), page.network().double()  # in float32 roundings grow from step to step
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    batches = page.shuffled(x, y)
    drawn = [next(batches) for _ in range(page.STEPS)]

    method = DCIL(sparsity=page.SPARSITY, steps=80, ramp=60 / 80, every=page.F_STEPS, warmup=20 / 80)
    net = SparseNet(twin, method).train()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    moved = 0
    for (x, y), (loss, masks) in zip(drawn, page.train(model, iter(drawn)), strict=True):
        ours = net.loss(net(x), y)
        opt.zero_grad()
        ours.backward()
        opt.step()
        moved += net.step(opt) is not None
        torch.testing.assert_close(ours.detach(), loss)
        for name, mask in masks.items():
            assert torch.equal(mask, net.masks[name])
        for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")
    assert moved == 4
    assert net.sparsity > 0.949
