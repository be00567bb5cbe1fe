"""Accuracy of the paths of a network on the test images."""

from __future__ import annotations

import torch
from torch import Tensor

from dcil import SparseNet
from dcil.data import Batches


@torch.no_grad()
def evaluate(net: SparseNet, batches: Batches) -> dict[str, tuple[float, float]]:
    """Path -> (top-1, top-5) in percent, in one pass over the images; waits for the device once, at the end."""
    training = net.training
    net.eval()
    hits = {path: torch.zeros(2, dtype=torch.long, device=batches.device) for path in net.method.paths}
    images = 0
    for x, y in batches.test():
        for path, total in hits.items():
            total += correct(net.path(path, x), y)
        images += len(y)
    net.train(training)
    counts = torch.stack(list(hits.values())).tolist()
    return {path: (100 * top1 / images, 100 * top5 / images) for path, (top1, top5) in zip(hits, counts, strict=True)}


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """How many targets are the first, and among the first five, of the logits."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == target[:, None]
    return torch.stack([ranked[:, 0].sum(), ranked.sum()])
