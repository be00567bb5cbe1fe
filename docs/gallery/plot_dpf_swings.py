"""
DPF swings, DCIL does not
=========================

Both methods prune the weights of small magnitude and may bring them back at the next mask update. They differ in what
a pruned weight learns while it is away: in DPF from the gradient of the pruned network, which never used it; in DCIL
from a second network, which does. Here both train the same small network on handwritten digits, and its accuracy is
measured after every single step.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import dcil

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}

# %%
# The data is inside scikit-learn: 1797 images of 8x8 pixels. Every fifth one is for testing.

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
y = torch.tensor(digits.target)
test = torch.arange(len(x)) % 5 == 0


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, 10))


# %%
# A plain training loop, with a measurement after every step and every mask update. Masks are updated every 16 steps,
# and 97 % of the weights are pruned from three quarters of the training on.

EVERY, EPOCHS, BATCH = 16, 16, 64
STEPS = EPOCHS * (int((~test).sum()) // BATCH)


def accuracy(net: nn.Module) -> float:
    net.eval()
    with torch.no_grad():
        right = net(x[test]).argmax(1) == y[test]
    net.train()
    return 100 * right.float().mean().item()


def train(method: dcil.Method) -> list[float]:
    """Return the test accuracy of the pruned network after every step."""
    net = dcil.SparseNet(network(), method)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    curve = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(int((~test).sum())).split(BATCH)[: STEPS // EPOCHS]:
            loss = net.loss(net(x[~test][batch]), y[~test][batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
            net.step(opt)
            schedule.step()
            curve.append(accuracy(net))
    return curve


settings = {"sparsity": 0.97, "steps": STEPS, "every": EVERY}
curves = {"DPF": train(dcil.DPF(**settings)), "DCIL": train(dcil.DCIL(**settings))}

# %%
# The whole training. While the sparsity grows, DPF falls at every mask update and recovers until the next one. Toward
# the end the learning rate is small, so weights and masks hardly move, and the swings fade.

COLOURS = {"DPF": "#D55E00", "DCIL": "#0072B2"}
figure, axes = plt.subplots(figsize=(8, 3.6))
for name, curve in curves.items():
    axes.plot(range(1, STEPS + 1), curve, color=COLOURS[name], linewidth=1.2, label=name)
axes.set(xlabel="training step", ylabel="test accuracy, %", xlim=(0, STEPS), ylim=(0, 101))
axes.legend(frameon=False, loc="lower left")
plt.show()

# %%
# The same between half and three quarters of the training, step by step; grey lines are mask updates.

start, stop = int(0.5 * STEPS), int(0.75 * STEPS)
figure, axes = plt.subplots(figsize=(8, 3.6))
for step in range(start - start % EVERY, stop, EVERY):
    axes.axvline(step, color="#bbbbbb", linewidth=0.8, zorder=0)
for name, curve in curves.items():
    axes.plot(range(start, stop), curve[start - 1 : stop - 1], ".-", color=COLOURS[name], linewidth=1.2, label=name)
axes.set(xlabel="training step", ylabel="test accuracy, %", xlim=(start, stop - 1))
axes.legend(frameon=False, loc="lower right")
plt.show()

# %%
# What one update in that part costs, on average: the accuracy right after it less the accuracy one step before.

updates = [step for step in range(EVERY, STEPS, EVERY) if start <= step < stop]
for name, curve in curves.items():
    change = sum(curve[step - 1] - curve[step - 2] for step in updates) / len(updates)
    worst = min(curve[start - 1 : stop - 1])
    print(f"{name:4}  per update {change:+5.1f} points   lowest {worst:4.1f} %   at the end {curve[-1]:4.1f} %")

# %%
# So the accuracy of a DPF run depends on the step at which it is measured: give it time after the last mask update,
# for example with ``dcil.DPF(freeze=True)``, which stops moving the masks when the target sparsity is reached.
