"""
Write your own method in fifteen lines
======================================

A method is a frozen dataclass that overrides one or two hooks. This example takes an idea from start to figure. DPF
ranks all weights by magnitude at every mask update, so those near the threshold come and go. Would it be steadier if a
weight had to be clearly larger than a kept one to take its place?
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dcil

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}

# %%
# The whole method: ``group_scores`` says what a weight is worth, and kept weights get a bonus. When masks are updated,
# how many weights stay and what the layers compute with is inherited from DPF. New settings are fields; ``require``
# refuses wrong values in one line.


@dataclass(frozen=True, kw_only=True)
class Sticky(dcil.DPF):
    """DPF in which a pruned weight returns only if it is ``bonus`` times as large as a kept one."""

    bonus: float = 1.5

    def __post_init__(self):
        super().__post_init__()
        self.require("bonus", self.bonus >= 1, ">= 1", "1 is DPF")

    def group_scores(self, layer, state):
        scores = layer.magnitude * torch.where(layer.mask, self.bonus, 1.0)
        return self.granularity.groups(layer, scores)


# %%
# The same network, data and training loop for both. ``net.step`` returns what a mask update changed.

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
y = torch.tensor(digits.target)
test = torch.arange(len(x)) % 5 == 0
x_train, y_train, x_test, y_test = x[~test], y[~test], x[test], y[test]
EVERY, EPOCHS, BATCH = 16, 16, 64
STEPS = EPOCHS * (len(x_train) // BATCH)


def train(method: dcil.Method) -> tuple[list[float], list[tuple[int, float]]]:
    """Return the test accuracy after every step, and (step, share of weights revived) of every mask update."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    net = dcil.SparseNet(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, 10)), method)
    weights = sum(mask.numel() for mask in net.masks.values())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    curve, revived = [], []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x_train)).split(BATCH)[: STEPS // EPOCHS]:
            net.train()
            loss = net.loss(net(x_train[batch]), y_train[batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
            schedule.step()
            if update := net.step(opt):
                revived.append((update.step, 100 * int(update.changes[0]) / weights))
            net.eval()
            with torch.no_grad():
                curve.append(100 * (net(x_test).argmax(1) == y_test).float().mean().item())
    return curve, revived


settings = {"sparsity": 0.97, "steps": STEPS, "every": EVERY}
results = {"DPF": train(dcil.DPF(**settings)), "Sticky": train(Sticky(bonus=2.0, **settings))}

# %%
# Accuracy after every step, and below it the share of the weights that each mask update brings back.

figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 2))
for (name, (curve, revived)), colour in zip(results.items(), ("#D55E00", "#0072B2"), strict=True):
    above.plot(range(1, STEPS + 1), curve, color=colour, linewidth=1.2, label=name)
    below.plot(*zip(*revived, strict=True), "o-", color=colour, markersize=3.5, linewidth=1.2)
above.set(ylabel="test accuracy, %", ylim=(0, 101))
below.set(xlabel="training step", ylabel="revived per update, %", xlim=(0, STEPS), ylim=(0, None))
above.legend(frameon=False, loc="lower left")
plt.show()

# %%
# Answers in numbers, over the updates of the second half of the training.

for name, (curve, revived) in results.items():
    late = [(step, share) for step, share in revived if step > STEPS // 2]
    change = sum(curve[step - 1] - curve[step - 2] for step, _ in late) / len(late)
    share = sum(share for _, share in late) / len(late)
    print(f"{name:6}  revived per update {share:.2f} %   an update costs {-change:.1f} points   end {curve[-1]:.1f} %")

# %%
# This was the second idea: ranking by magnitudes averaged over the last steps, tried before, made the swings larger.
# One seed and a small network decide nothing, but each experiment took one class. To use the method on the command
# line, in sweeps and in reports, put it into a file of ``dcil/methods`` and add a line to ``METHODS``: the contract
# tests cover it from then on.
