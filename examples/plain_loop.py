"""A plain PyTorch loop with dcil: a small ResNet on scikit-learn's digits, 90 % sparse.

    python examples/plain_loop.py                            # under a minute on one CPU core, nothing is downloaded

Three lines differ from a loop without pruning; they are marked.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

import dcil
from dcil import models

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
data = torch.utils.data.TensorDataset(x[:1500], y[:1500])
loader = torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)
EPOCHS = 10

model = models.build("resnet8-digits", classes=10, channels=1)
model = dcil.SparseNet(model, dcil.DCIL(sparsity=0.9, steps=EPOCHS * len(loader)))  # dcil
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * len(loader))
model.attach(optimizer)  # dcil

for epoch in range(EPOCHS):
    model.train()
    for images, labels in loader:
        loss = model.loss(model(images), labels)  # dcil
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()  # from here on model(x) is the pruned network's plain output
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"epoch {epoch + 1}: accuracy {100 * accuracy:.1f} %, sparsity {model.sparsity:.3f}")

sparse = model.finalize()  # a plain ResNet with its own keys, zeros in place
with torch.no_grad():
    accuracy = (sparse(x[1500:]).argmax(1) == y[1500:]).float().mean()
print(f"{model.steps_done} steps, sparsity {model.sparsity:.3f}, accuracy {100 * accuracy:.1f} %")
