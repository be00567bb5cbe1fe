"""
Export it and time it
=====================

A pruned network is smaller and faster only in a form that leaves its zeros out. This example prunes a small
convolutional network to 95 %, writes it in five formats, and measures the size of each file and the time of a call.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import dcil
import dcil.export
import dcil_runtime

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}

# %%
# Prune while training, as in the other examples.

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
y = torch.tensor(digits.target)
test = torch.arange(len(x)) % 5 == 0
x_train, y_train, x_test, y_test = x[~test], y[~test], x[test], y[test]
EPOCHS, BATCH = 6, 64
STEPS = EPOCHS * (len(x_train) // BATCH)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


net = dcil.SparseNet(network(), dcil.DCIL(sparsity=0.95, steps=STEPS))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
net.attach(opt)
for _ in range(EPOCHS):
    for batch in torch.randperm(len(x_train)).split(BATCH)[: STEPS // EPOCHS]:
        loss = net.loss(net(x_train[batch]), y_train[batch])
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
sparse = net.finalize()
with torch.no_grad():
    accuracy = 100 * (sparse(x_test).argmax(1) == y_test).float().mean().item()
print(f"sparsity {100 * net.sparsity:.1f} %, test accuracy {accuracy:.1f} %")

# %%
# ``finalize`` returned the network itself, zeros in place. A plain state dict (``safetensors``) stores every zero;
# ``sparse`` stores the kept values and where they are, in 32 or 16 bits; ``cpu`` is a program for the native runtime,
# which needs neither torch nor dcil, and ``onnx`` one for ONNX Runtime. Each file is read back or run, and compared
# with the network, before it gets its name.

folder = Path(tempfile.mkdtemp())
written = {
    "safetensors": dcil.export.export(sparse, "safetensors", folder / "net.safetensors"),
    "onnx": dcil.export.export(sparse, "onnx", folder / "net.onnx", example=x_test[:1]),
    "cpu": dcil.export.export(sparse, "cpu", folder / "net.dcil", example=x_test[:1]),
    "sparse": dcil.export.export(sparse, "sparse", folder / "net.sparse"),
    "sparse, fp16": dcil.export.export(sparse, "sparse", folder / "net16.sparse", dtype="fp16"),
}

figure, axes = plt.subplots(figsize=(8, 2.8))
sizes = [file.size / 1024 for file in written.values()]
colours = ["#0072B2" if size < sizes[0] / 2 else "#999999" for size in sizes]
bars = axes.barh(list(written), sizes, 0.62, color=colours)
axes.bar_label(bars, [f"{size:.0f} KiB, {size / sizes[0]:.2f} x" for size in sizes], padding=4)
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
axes.set(xlabel="size of the file, KiB", xlim=(0, 1.25 * sizes[0]))
plt.show()

# %%
# The time of a call, on one CPU thread. PyTorch and ONNX Runtime multiply by the zeros, so their times are those of a
# dense network; the native runtime skips them. Measured in turns, so that a busy moment of the machine meets all; the
# least of fifteen rounds counts.

torch.set_num_threads(1)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(folder / "net.onnx", options, providers=["CPUExecutionProvider"])
plan = dcil_runtime.load(folder / "net.dcil")
name = session.get_inputs()[0].name


@torch.inference_mode()
def with_torch(images: np.ndarray) -> np.ndarray:
    return sparse(torch.from_numpy(images)).numpy()


engines = {
    "PyTorch": with_torch,
    "ONNX Runtime": lambda images: session.run(None, {name: images})[0],
    "dcil runtime": plan,
}


def milliseconds(call: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> float:
    """Return the mean time of a call in a round of about ten milliseconds."""
    calls = max(1, 320 // len(images))
    start = time.perf_counter()
    for _ in range(calls):
        call(images)
    return 1000 * (time.perf_counter() - start) / calls


timed = {}
for size in (1, 64):
    images = x_test[:size].numpy()
    for call in engines.values():
        np.testing.assert_allclose(call(images), with_torch(images), atol=1e-3)
    rounds = [[milliseconds(call, images) for call in engines.values()] for _ in range(15)]
    timed[size] = [min(times) for times in zip(*rounds, strict=True)]

# %%
# All three computed the same. Time per call:

figure, panels = plt.subplots(1, 2, figsize=(8, 2.5))
for axes, (size, times) in zip(panels, timed.items(), strict=True):
    bars = axes.barh(list(engines), times, 0.6, color=["#999999", "#999999", "#0072B2"])
    axes.bar_label(bars, [f"{value:.2f} ms" for value in times], padding=4)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title("one image" if size == 1 else f"{size} images", loc="left", fontsize=10)
    axes.set(xlabel="ms per call", xlim=(0, 1.3 * max(times)))
panels[1].set_yticklabels([])
plt.show()

for size, times in timed.items():
    ratio = min(times[:-1]) / times[-1]
    print(f"batch {size:2}: {ratio:.1f} times as fast as the faster dense engine")
