"""A timm training script with dcil: a small ResNet, layer decay, mixup, a weight average; 90 % sparse.

    python examples/timm_script.py                           # under a minute on one CPU core, nothing is downloaded

Three lines differ from a script without pruning; they are marked.
"""

from __future__ import annotations

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

import dcil

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
x = torch.nn.functional.interpolate(x, 16)
y = torch.tensor(labels)
data = torch.utils.data.TensorDataset(x[:1500], y[:1500])
loader = torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)
EPOCHS = 10

model = timm.create_model("resnet10t", num_classes=10, in_chans=1, channels=(16, 32, 48, 64))
mixup = Mixup(mixup_alpha=0.1, num_classes=10)
criterion = SoftTargetCrossEntropy()

model = dcil.SparseNet(model, dcil.DCIL(sparsity=0.9, steps=EPOCHS * len(loader), distill="softmax"))  # dcil
optimizer = create_optimizer_v2(model, "adamw", lr=4e-3, weight_decay=0.05, layer_decay=0.9)
model.attach(optimizer)  # dcil
scheduler = CosineLRScheduler(optimizer, EPOCHS * len(loader), warmup_t=30, t_in_epochs=False)
ema = ModelEmaV3(model, decay=0.9)

step = 0
for _ in range(EPOCHS):
    model.train()
    for images, labels in loader:
        images, labels = mixup(images, labels)
        loss = model.loss(model(images), labels, task=criterion)  # dcil
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model)
        step += 1
        scheduler.step_update(step)

sparse = ema.module.finalize()  # a plain timm model with its own keys, zeros in place
with torch.no_grad():
    accuracy = (sparse(x[1500:]).argmax(1) == y[1500:]).float().mean()
zeros = sum(int((sparse.get_parameter(name) == 0).sum()) for name in model.masks)
total = sum(mask.numel() for mask in model.masks.values())
print(f"{model.steps_done} steps, sparsity {zeros / total:.3f}, accuracy {100 * accuracy:.1f} %")
