"""
Watch masks move
================

A small network learns to read digits while 90 % of its weights are pruned. An observer looks at every mask update.
"""

# %%
# The data come with scikit-learn, the network is three convolutions and a classifier.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dcil

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Flatten(), nn.Linear(256, 10),
)  # fmt: skip

# %%
# An observer is called before and after every mask update. This one notes how many weights came back and how many were
# dropped, and keeps a copy of one mask.


class Watch:
    def __init__(self, net):
        self.net, self.steps, self.changes, self.masks = net, [], [], []

    def before_update(self, step):
        pass

    def after_update(self, update):
        self.steps.append(update.step)
        self.changes.append(update.changes.tolist())
        self.masks.append(self.net.masks["3.weight"].clone())


net = dcil.SparseNet(model, dcil.DCIL(sparsity=0.9, steps=300))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
net.attach(optimizer)
watch = Watch(net)
net.add_observer(watch)

for _ in range(300):
    batch = torch.randint(1500, (50,))
    loss = net.loss(net(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

sparse = net.finalize()
accuracy = (sparse(x[1500:]).argmax(1) == y[1500:]).float().mean()
print(f"accuracy {100 * accuracy:.1f} %, sparsity {net.sparsity:.3f}")

# %%
# The mask of the second convolution, its first 32 filters and the first 64 weights of each, after the first, a middle
# and the last update. Dark is kept. Most weights go early.

figure, axes = plt.subplots(1, 3, figsize=(9, 4.6), layout="constrained")
for axis, index in zip(axes, (0, 4, -1), strict=True):
    mask = watch.masks[index].flatten(1)[:32, :64]
    axis.imshow(~mask, cmap="gray", interpolation="nearest", aspect="auto")
    axis.set(title=f"after step {watch.steps[index]}", xticks=[], yticks=[])

# %%
# Weights are not only dropped: at every update some come back, because the super path has trained them while they were
# pruned. With the sparsity at its target, as many come back as are dropped.

figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
revived, dropped = zip(*watch.changes, strict=True)
axis.plot(watch.steps, dropped, marker="o", label="dropped")
axis.plot(watch.steps, revived, marker="o", label="came back")
axis.set(xlabel="step", ylabel="weights per update", yscale="symlog")
_ = axis.legend()

# %%
# :doc:`/how` explains the schedule and the selection behind these curves.
