"""
A layer that dies, and what to do
=================================

By default all weights of a network are ranked together, and the smallest go. A layer whose weights happen to be small
can lose all of them. Nothing passes it any more, and the network can only guess. This example makes it happen, and
shows the ways out.
"""

import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dcil

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
y = torch.tensor(digits.target)
test = torch.arange(len(x)) % 5 == 0
x_train, y_train, x_test, y_test = x[~test], y[~test], x[test], y[test]

# %%
# Four hidden layers, each followed by a batch norm. The third is initialised with smaller weights than the others. That
# does not change what the network computes, since the batch norm divides by the scale. It does change the ranking.


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((64, 128), (128, 128), (128, 128), (128, 128)):
        layers += [nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.ReLU()]
    nn.init.normal_(layers[6].weight, std=0.01)
    return nn.Sequential(*layers, nn.Linear(128, 10))


EPOCHS, BATCH = 12, 64
STEPS = EPOCHS * (len(x_train) // BATCH)


def train(method: dcil.Method) -> tuple[dcil.SparseNet, float]:
    """Return the pruned network and its test accuracy in percent."""
    net = dcil.SparseNet(network(), method)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
    net.attach(opt)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x_train)).split(BATCH)[: STEPS // EPOCHS]:
            loss = net.loss(net(x_train[batch]), y_train[batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
    net.eval()
    with torch.no_grad():
        return net, 100 * (net(x_test).argmax(1) == y_test).float().mean().item()


# %%
# Train, prune to 98.5 % in one shot, fine-tune. The layer dies, and a warning says so when it happens.
# Initial weights, learning rate and sparsity were searched for until that happened; with many others no layer died.

settings = {"sparsity": 0.985, "steps": STEPS}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dead = train(dcil.OneShot(ramp=0.5, **settings))
print("\n".join(str(warning.message) for warning in caught))
print(f"test accuracy: {dead[1]:.1f} %")

# %%
# The ways out. ``min_kept`` keeps that many weights in every layer, whatever their rank. ``scope=dcil.ERK()`` gives
# each layer a share of the kept weights by its shape. And where pruned weights keep learning and may come back, as in
# DCIL, one ranking is often enough.

runs = {
    "one ranking": dead,
    "min_kept=100": train(dcil.OneShot(ramp=0.5, min_kept=100, **settings)),
    "ERK": train(dcil.OneShot(ramp=0.5, scope=dcil.ERK(), **settings)),
    "DCIL, one ranking": train(dcil.DCIL(**settings)),
}
for name, (net, accuracy) in runs.items():
    print(f"{name:18} sparsity {100 * net.sparsity:.2f} %   test accuracy {accuracy:5.1f} %")

# %%
# All four networks keep the same number of weights in all. The figure shows where.

names = list(dead[0].masks)
figure, axes = plt.subplots(figsize=(8, 4.6))
for i, (name, (net, accuracy)) in enumerate(runs.items()):
    kept = [int(mask.sum()) for mask in net.masks.values()]
    places = [row + 0.2 * (i - 1.5) for row in range(len(names))]
    colour = ("#D55E00", "#E69F00", "#009E73", "#0072B2")[i]
    bars = axes.barh(places, kept, 0.17, color=colour, label=f"{name}: {accuracy:.1f} %")
    axes.bar_label(bars, padding=3, fontsize=8)
axes.set_yticks(range(len(names)), [f"{name}\n{mask.numel():,} weights" for name, mask in net.masks.items()])
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
axes.set_xlabel("weights kept")
axes.legend(frameon=False, loc="lower right", title="test accuracy", alignment="left")
plt.show()

# %%
# On the command line these are ``--set min_kept=100`` and ``--set scope=erk``. The report of a run marks a layer that
# lost every weight with a ring.
