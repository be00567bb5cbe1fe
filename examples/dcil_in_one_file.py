"""DCIL on one page: Dynamic Collective Intelligence Learning (Kim et al. 2022) on the digits that scikit-learn ships.

    python examples/dcil_in_one_file.py

Nothing of the library is used here, so that the method can be read from top to bottom. A test trains this file and
the library side by side and holds them equal, step by step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

SPARSITY, STEPS, F_STEPS, RAMP, WARMUP, T = 0.95, 600, 16, 450, 140, 2.0


def network() -> nn.Module:
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()],
        *[nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU()],
        *[nn.Conv2d(64, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU()],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)],
    )


def masks_at(step: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep the largest weights of all layers together; sparsity grows along a cubic curve (Eq. 1)."""
    sparsity = SPARSITY * (1 - max(0.0, 1 - step / RAMP) ** 3)
    flat = torch.cat([w.detach().abs().flatten() for w in weights.values()])
    kept = torch.ones_like(flat, dtype=torch.bool)
    kept[flat.argsort()[: int(sparsity * len(flat))]] = False
    parts = kept.split([w.numel() for w in weights.values()])
    return {name: part.view_as(weights[name]) for name, part in zip(weights, parts, strict=True)}


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """T^2 * KL(teacher || student; T); the teacher is a constant (Eq. 4)."""
    p, q = F.log_softmax(teacher.detach() / T, 1), F.log_softmax(student / T, 1)
    return T**2 * F.kl_div(q, p, reduction="batchmean", log_target=True)


def train(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Train ``model`` as DCIL's pruned net; yields (loss, masks) after every step."""
    weights = {n: p for n, p in model.named_parameters() if p.dim() == 4}  # every convolution
    own = {n: m for n, m in model.named_children() if isinstance(m, (nn.BatchNorm2d, nn.Linear))}
    supers = copy.deepcopy(own)  # the super net's own norm layers and classifier
    private = {f"{n}.{k}": v for n, m in supers.items() for k, v in [*m.named_parameters(), *m.named_buffers()]}
    parameters = [*model.parameters(), *(p for m in supers.values() for p in m.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    masks = masks_at(0, weights)
    for step in range(STEPS):
        x, y = next(batches)
        # The pruned net sees M * W: its gradient reaches the kept weights only.
        pruned = functional_call(model, {n: w * masks[n] for n, w in weights.items()}, x)
        # The super net sees all of W, but with the kept weights as constants: its gradient reaches the pruned ones.
        whole = {n: torch.where(masks[n], w.detach(), w) for n, w in weights.items()}
        super_ = functional_call(model, whole | private, x)
        loss = F.cross_entropy(pruned, y) + F.cross_entropy(super_, y)
        if step >= WARMUP:
            loss = loss + (kl(pruned, super_) + kl(super_, pruned))
        # One backward: W.grad = M * grad L(pruned net) + (1 - M) * grad L(super net) (Eq. 3).
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % F_STEPS == 0 and done < STEPS:
            masks = masks_at(done, weights)
        yield loss.detach(), masks


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float)[:, None] / 8 - 1, torch.tensor(data.target)
    test = torch.arange(len(x)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def shuffled(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for rows in torch.randperm(len(x))[: len(x) // 64 * 64].view(-1, 64):
            yield x[rows], y[rows]


def main() -> None:
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = network()
    for step, (loss, masks) in enumerate(train(model, shuffled(x, y)), 1):
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}, kept {sum(int(m.sum()) for m in masks.values()):,} weights")
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)  # the pruned net is the product
        accuracy = (model.eval()(test_x).argmax(1) == test_y).float().mean()
    print(f"test accuracy of the pruned net: {100 * accuracy:.2f} %")


if __name__ == "__main__":
    main()
