"""Lightning with dcil: a LightningModule on scikit-learn's digits that ends 90 % sparse.

    python examples/lightning_module.py                      # under a minute on one CPU core, nothing is downloaded

Two lines differ from a module without pruning; they are marked. The callback wraps ``self.net`` before the optimizers
are configured, counts their steps and logs sparsity, flips and loss parts to whatever logger the Trainer has.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import dcil
from dcil import models
from dcil.integrations.lightning import SparsityCallback

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
train = torch.utils.data.TensorDataset(x[:1500], y[:1500])
test = torch.utils.data.TensorDataset(x[1500:], y[1500:])
EPOCHS, BATCH = 10, 50


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = models.build("resnet8-digits", classes=10, channels=1)

    def training_step(self, batch, index):
        images, labels = batch
        return self.net.loss(self.net(images), labels)  # dcil

    def validation_step(self, batch, index):
        images, labels = batch
        logits = self.net(images)  # the pruned network's plain output
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0, verbose=False)
module = Digits()
method = dcil.DCIL(sparsity=0.9, steps=EPOCHS * len(train) // BATCH)
trainer = L.Trainer(
    max_epochs=EPOCHS,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[SparsityCallback(method)],  # dcil
)
trainer.fit(module, torch.utils.data.DataLoader(train, batch_size=BATCH, shuffle=True))
(result,) = trainer.validate(module, torch.utils.data.DataLoader(test, batch_size=297), verbose=False)

sparse = module.net.finalize()  # a plain ResNet with its own keys, zeros in place
zeros = sum(int((sparse.get_parameter(name) == 0).sum()) for name in module.net.masks)
total = sum(mask.numel() for mask in module.net.masks.values())
print(f"{module.net.steps_done} steps, sparsity {zeros / total:.3f}, accuracy {100 * result['val_accuracy']:.1f} %")
