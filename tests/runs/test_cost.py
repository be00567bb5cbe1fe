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


def test_a_transformer_by_hand():
    """Two blocks of width 32 and 8 tokens: matrices and the tied head for each token, and attention for each pair."""
    width, tokens, vocabulary = 32, 8, 11
    model = models.build("gpt-2-32", vocabulary, size=tokens)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.fc1.weight")[: 2 * width] = 0  # half of it
    cost = measure_cost(model, models.example((tokens,), vocabulary))
    matrices = 2 * 12 * width**2
    assert cost.attention == 2 * 2 * tokens**2 * width  # whatever the number of heads
    assert cost.macs == tokens * (matrices + vocabulary * width) + cost.attention
    assert cost.macs - cost.macs_kept == tokens * 2 * width**2
    vectors = 2 * (3 + 1 + 4 + 1 + 4) * width + 2 * width  # biases and norms of blocks, last norm
    assert cost.parameters == matrices + vectors + (vocabulary + tokens) * width  # the head is the embedding's weight
    assert cost.parameters - cost.parameters_kept == 2 * width**2
    assert [layer.name for layer in cost.layers][-1] == "head" and not any("wte" in layer.name for layer in cost.layers)


def test_known_transformers():
    """DeiT's 1.3 and 4.6 billion multiply-adds at 224 x 224 pixels, attention included."""
    for name, millions in (("vit-ti-16", 1254), ("vit-s-16", 4599)):
        assert round(measure_cost(models.build(name, 1000), torch.zeros(1, 3, 224, 224)).macs / 1e6) == millions


def test_the_summary_of_a_cost_counts_what_is_kept():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        model[0].weight[:4] = 0  # 16 of 32
    cost = summarise_cost(model, torch.zeros(1, 4))
    # Half of a mask of 32 has an entropy of 32 bits.
    wanted = {"parameters": 48, "parameters_kept": 32, "macs": 48, "macs_kept": 32, "bytes": 192}
    assert cost == wanted | {"bytes_kept": 4 * 32 + 4}
