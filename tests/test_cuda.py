"""What only a GPU shows of a training of one's own: fused optimizers, scalers, warnings that do not wait."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcil import DCIL, DPF, EMA, SparseNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).cuda()  # fmt: skip


def batch():
    return torch.randn(16, 2, 8, 8, device="cuda"), torch.randint(4, (16,), device="cuda")


@pytest.mark.parametrize("fused", [False, True])
def test_cuda_skipped_steps_of_a_scaler_do_not_count(fused):
    net = SparseNet(model(), DCIL(sparsity=0.5, steps=6, every=1, warmup=0.0))
    opt = torch.optim.AdamW(net.parameters(), fused=fused)
    net.attach(opt)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for step in range(6):
        opt.zero_grad()
        x, y = batch()
        with torch.autocast("cuda", torch.float16):
            loss = net.loss(net(x), y)
        scaler.scale(loss).backward()
        if step % 3 == 0:
            net.model[0].weight.grad[0] = torch.inf
        scaler.step(opt)
        scaler.update()
    assert net.steps_done == 4
    assert net.metrics()["sparsity"] == net.sparsity


def test_cuda_masks_and_weights_are_those_of_the_cpu():
    method = DCIL(sparsity=0.8, steps=12, every=3, warmup=0.0, min_kept=2)
    here = SparseNet(model().double(), method)
    there = SparseNet(copy.deepcopy(here.model).cpu(), method)
    for net in (here, there):
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.attach(opt)
        torch.manual_seed(0)
        for _ in range(12):
            x, y = torch.randn(16, 2, 8, 8, dtype=torch.double), torch.randint(4, (16,))
            device = next(net.parameters()).device
            opt.zero_grad()
            net.loss(net(x.to(device)), y.to(device)).backward()
            opt.step()
    for name, mask in there.masks.items():
        assert torch.equal(here.masks[name].cpu(), mask)
        torch.testing.assert_close(here.model.get_parameter(name).cpu(), there.model.get_parameter(name))


def test_cuda_a_layer_that_loses_its_last_weight_is_announced_by_a_later_update():
    net = SparseNet(model(), DPF(sparsity=0.9, steps=20, every=1, ramp=0.2))
    with torch.no_grad():
        net.model[0].weight.mul_(1e-3)
    with pytest.warns(UserWarning, match="lost every weight") as caught:
        for _ in range(20):
            net.step()
            torch.cuda.synchronize()
    assert len(caught) == 1
    again = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.finalize()


def test_cuda_ema_and_token_logits_under_autocast():
    net = SparseNet(
        nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 7)).cuda(),
        DCIL(sparsity=0.5, steps=4, every=1, warmup=0.0),
    )
    opt = torch.optim.AdamW(net.parameters(), fused=True)
    net.attach(opt)
    ema = EMA(net, decay=0.5)
    ids, labels = torch.randint(11, (3, 5), device="cuda"), torch.randint(7, (3, 5), device="cuda")
    labels[:, -1] = -100
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = net(ids)
            loss = net.loss(outputs, labels)
        loss.backward()
        opt.step()
        ema.update()
    p, s = outputs["pruned"].float(), outputs["super"].float()
    counted = labels != -100

    def kl(student, teacher):
        log_p, log_q = (teacher / 2).log_softmax(-1), (student / 2).log_softmax(-1)
        terms = F.kl_div(log_q, log_p, log_target=True, reduction="none")
        return 4 * terms.sum(-1)[counted].mean()

    # Torch rounds log-probabilities of bf16 logits to bf16 here, as in a loop without dcil.
    with torch.autocast("cuda", torch.bfloat16):
        tasks = sum(F.cross_entropy(out.transpose(1, 2), labels) for out in outputs.values())
    torch.testing.assert_close(loss, tasks + kl(p, s) + kl(s, p), rtol=1e-4, atol=1e-4)
    assert torch.equal(ema.net.masks["1.weight"], net.masks["1.weight"])
    torch.testing.assert_close(ema.finalize()(ids), ema(ids))
