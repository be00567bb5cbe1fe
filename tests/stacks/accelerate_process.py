"""One of several processes of an accelerate loop; started by torchrun, see test_accelerate.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from hf_models import CASES, assert_gradients, batch_of, dataset_of, disturb, gradients, grads_of, model_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcil
from dcil.integrations.accelerate import SparseModel


def main(folder: Path) -> None:
    name, data = "bert-classification", dataset_of("bert-classification", 16)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    net = SparseModel(model_of(name), dcil.DCIL(sparsity=0.5, steps=2, every=1, warmup=0.0))
    disturb(net)
    expected = gradients(net, CASES[name].rows, [batch_of(data[2 * i : 2 * i + 2]) for i in range(4)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.unwrap_model(model).attach(optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients and net.steps_done == 0:
                assert_gradients(grads_of(net), expected)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.num_processes == 2 and net.steps_done == 2 and net.sparsity == 0.5
    torch.save(net.state_dict(), folder / f"{accelerator.process_index}.pt")
    sharded(accelerator.process_index)


def sharded(rank: int) -> None:
    """The same with fully_shard on the blocks and the net."""
    name, data = "bert-classification", dataset_of("bert-classification", 4)
    net = SparseModel(model_of(name), dcil.DCIL(sparsity=0.5, steps=4, every=1, warmup=0.0))
    disturb(net)
    expected = gradients(net, CASES[name].rows, [batch_of(data[:2]), batch_of(data[2:])])
    for layer in net.model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net.attach(optimizer)
    net(**batch_of(data[2 * rank : 2 * rank + 2])).loss.backward()
    found = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in net.named_parameters()}
    assert_gradients(found, expected)
    optimizer.step()
    assert net.steps_done == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.barrier()  # one that leaves while another still communicates can abort it
    os._exit(0)  # the work is done and checked; gloo's threads abort now and then while the interpreter is torn down
