"""Hugging Face's Trainer with dcil: fine-tune a tiny BERT to 90 % sparsity, save it, load it again.

    python examples/huggingface_trainer.py [folder]          # a few seconds on a CPU, nothing is downloaded

One line differs from a Trainer without pruning; it is marked.
"""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import dcil
from dcil.integrations.transformers import SparseTrainer

folder = sys.argv[1] if len(sys.argv) > 1 else "huggingface-demo"


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random tokens; the class of a sentence is that of its first token."""
    ids = torch.randint(60, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row[0] // 20} for row in ids]


size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(**size, vocab_size=60, num_labels=3))
args = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=16, gradient_accumulation_steps=2, num_train_epochs=8,
    learning_rate=3e-3, logging_steps=32, report_to="none", use_cpu=True,
)  # fmt: skip
method = dcil.DCIL(sparsity=0.9, steps=256)
trainer = SparseTrainer(model=model, method=method, args=args, train_dataset=sentences(1024, seed=0))  # dcil
trainer.train()
print("test loss of the pruned network:", trainer.evaluate(sentences(256, seed=1))["eval_loss"])

trainer.save_model(f"{folder}/sparse")
sparse = BertForSequenceClassification.from_pretrained(f"{folder}/sparse")
zeros = sum(int((sparse.get_parameter(name) == 0).sum()) for name in trainer.net.masks)
total = sum(mask.numel() for mask in trainer.net.masks.values())
print(f"{100 * zeros / total:.1f} % of the prunable weights are 0")
