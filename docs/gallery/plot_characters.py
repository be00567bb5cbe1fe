"""
A small transformer on characters
=================================

Pruning is not only for images. Here a transformer of two blocks learns to predict the next character of Python
source code, dense and with nine tenths of its weights pruned. The text is a module of the standard library.
"""

import argparse
import inspect

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcil

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}

text = inspect.getsource(argparse)
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(character) for character in text])
train_codes, test_codes = codes[: -len(codes) // 10], codes[-len(codes) // 10 :]
print(f"{len(codes):,} characters, {len(alphabet)} different ones")

# %%
# An ordinary network, with nothing about pruning in it.

WIDTH, LENGTH = 64, 32


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(alphabet), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(alphabet))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.characters(x) + self.positions(torch.arange(length))
        return self.head(self.norm(self.blocks(hidden, mask, is_causal=True)))


# %%
# The training loop is the usual one. ``net.loss`` takes logits of shape (batch, position, character) with the task
# written out; the KL terms of DCIL run over the characters.

STEPS, BATCH = 600, 24


def batch_of(source: Tensor) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(source) - LENGTH, (BATCH,))
    windows = torch.stack([source[start : start + LENGTH + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def next_character(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def test_loss(net: nn.Module) -> float:
    net.eval()
    windows = test_codes[: len(test_codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    loss = next_character(net(windows[:, :-1]), windows[:, 1:]).item()
    net.train()
    return loss


def train(method: dcil.Method) -> tuple[dcil.SparseNet, list[tuple[int, float]]]:
    """Return the network, and (step, test loss) along the way."""
    torch.manual_seed(0)
    net = dcil.SparseNet(Transformer(), method)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-3, STEPS)
    net.attach(opt)
    curve = []
    for step in range(1, STEPS + 1):
        x, y = batch_of(train_codes)
        loss = net.loss(net(x), y, task=next_character)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        if step % 30 == 0:
            curve.append((step, test_loss(net)))
    return net, curve


dense = train(dcil.Dense(sparsity=0, steps=STEPS))
pruned = train(dcil.DCIL(sparsity=0.9, steps=STEPS, distill="softmax"))
print(pruned[0].summary())

# %%
# The loss on the last tenth of the text, which neither network was trained on.

figure, axes = plt.subplots(figsize=(8, 3.8))
for (_, curve), name, colour in ((dense, "dense", "#888888"), (pruned, "DCIL, 90 %", "#0072B2")):
    axes.plot(*zip(*curve, strict=True), color=colour, label=f"{name}: {curve[-1][1]:.2f} at the end")
axes.set(xlabel="training step", ylabel="test loss, nats per character", xlim=(0, STEPS))
axes.legend(frameon=False)
plt.show()

# %%
# What the pruned network writes when it goes on from a line of code.


@torch.no_grad()
def write(model: nn.Module, start: str, length: int) -> str:
    torch.manual_seed(3)
    model.eval()
    line = [alphabet.index(character) for character in start]
    for _ in range(length):
        chances = model(torch.tensor([line[-LENGTH:]]))[0, -1].div(0.7).softmax(0)
        line.append(int(chances.multinomial(1)))
    return "".join(alphabet[code] for code in line)


print(write(pruned[0].finalize(), "    def add_argument(self", 400))
