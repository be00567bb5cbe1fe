"""accelerate with dcil: a training loop over a Hugging Face model that ends 90 % sparse.

    python examples/accelerate_loop.py                       # a few seconds on a CPU, nothing is downloaded
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Two lines are added to a loop without pruning; they are marked.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import dcil
from dcil.integrations.accelerate import SparseModel

STEPS = 120
torch.manual_seed(0)
starts = torch.randint(24, (STEPS * 2 * 16, 1))
ids = (starts + torch.arange(10)) % 24  # sequences that count
batches = torch.utils.data.DataLoader(ids, batch_size=16)

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=24, max_position_embeddings=16))
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = SparseModel(model, dcil.DCIL(sparsity=0.9, steps=STEPS, min_kept=32))  # dcil
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
accelerator.unwrap_model(model).attach(optimizer)  # dcil

for batch in batches:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

net = accelerator.unwrap_model(model)
sparse = net.finalize()
with torch.no_grad():
    print(
        f"{net.steps_done} steps, sparsity {net.sparsity:.3f}, loss {float(sparse(ids[:64], labels=ids[:64]).loss):.3f}"
    )
