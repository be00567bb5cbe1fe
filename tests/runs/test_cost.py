from __future__ import annotations

import torch
from torch import nn

from dcil import models
from dcil.runs.cost import measure_cost, summarise_cost


def test_multiply_adds_by_hand():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    with torch.no_grad():
        net[0].weight[0] = 0
    cost = measure_cost(net, torch.zeros(1, 3, 6, 6))
    conv, linear = cost.layers
    assert (conv.macs, conv.macs_kept) == (108 * 36, 81 * 36)
    assert (linear.macs, linear.macs_kept) == (720, 720)
    assert cost.parameters == 108 + 720 + 5
    assert cost.parameters_kept == cost.parameters - 27
    assert conv.sparsity == 0.25


def test_transposed_groups_and_a_layer_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False)
            self.mix = nn.Conv2d(6, 6, 1, groups=3, bias=False)

        def forward(self, x):
            return self.mix(self.mix(self.up(x)))

    cost = measure_cost(Twice(), torch.zeros(1, 4, 5, 5))
    up, mix = cost.layers
    assert up.macs == 4 * 3 * 4 * 25  # every weight meets every input position
    assert mix.macs == 2 * 12 * 100


def test_known_networks():
    """ResNet-20 on 32x32: 41 million multiply-adds with projection shortcuts; ResNet-50 at 224: 4.1 billion."""
    assert round(measure_cost(models.build("resnet20"), torch.zeros(1, 3, 32, 32)).macs / 1e6) == 41
    assert round(measure_cost(models.build("resnet50", 1000), torch.zeros(1, 3, 224, 224)).macs / 1e8) == 41


def test_the_summary_of_a_cost_counts_what_is_kept():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        model[0].weight[:4] = 0  # 16 of 32
    cost = summarise_cost(model, torch.zeros(1, 4))
    # Half of a mask of 32 has an entropy of 32 bits.
    wanted = {"parameters": 48, "parameters_kept": 32, "macs": 48, "macs_kept": 32, "bytes": 192}
    assert cost == wanted | {"bytes_kept": 4 * 32 + 4}
