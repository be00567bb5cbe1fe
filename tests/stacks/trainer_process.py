"""One of several processes of a SparseTrainer; started by torchrun, see test_transformers.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_models import CASES, Watch, arguments, assert_gradients, batch_of, dataset_of, disturb, gradients, model_of

import dcil
from dcil.integrations.transformers import SparseTrainer


def trainer_of(folder: Path, watch: Watch) -> SparseTrainer:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 4, "train_sampling_strategy": "sequential"}
    trainer = SparseTrainer(
        model=model_of("llama"), method=dcil.DCIL(sparsity=0.5, steps=4, every=1, warmup=0.0),
        args=arguments(folder, ddp_backend="gloo", save_strategy="steps", save_steps=2, **settings),
        train_dataset=dataset_of("llama", 16), callbacks=[watch],
    )  # fmt: skip
    watch.net = trainer.net
    return trainer


def main(folder: Path) -> None:
    watch, data = Watch(), dataset_of("llama", 16)
    trainer = trainer_of(folder, watch)
    disturb(trainer.net)
    expected = gradients(trainer.net, CASES["llama"].rows, [batch_of(data[2 * i : 2 * i + 2]) for i in range(4)])
    trainer.train()
    assert trainer.net.steps_done == 4
    assert_gradients(watch.gradients[0], expected)
    trainer.evaluate(data[:6])
    trainer.save_model(str(folder / "saved"))
    state = trainer.net.state_dict()
    torch.save(state, folder / f"{trainer.args.process_index}.pt")
    resumed = trainer_of(folder, Watch())
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    for key, value in resumed.net.state_dict().items():
        assert torch.equal(value, state[key]), key


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.barrier()  # one that leaves while another still communicates can abort it
    os._exit(0)  # the work is done and checked; gloo's threads abort now and then while the interpreter is torn down
