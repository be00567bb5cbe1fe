"""Hugging Face's Trainer: the gradients of two plain networks, exact counts, files that from_pretrained loads."""

from __future__ import annotations

import pytest
import torch
from hf_models import CASES, Watch, arguments, assert_gradients, batch_of, dataset_of, disturb, gradients, model_of

import dcil
from dcil.integrations.transformers import SparseTrainer


def method(**settings):
    return dcil.DCIL(**{"sparsity": 0.5, "steps": 6, "every": 1, "warmup": 0.0, **settings})


def trainer_of(name, folder, data=None, watch=None, method_=None, options=None, **settings):
    data = dataset_of(name) if data is None else data
    callbacks = [] if watch is None else [watch]
    return SparseTrainer(
        model=model_of(name), method=method_ or method(), args=arguments(folder, **settings), train_dataset=data,
        callbacks=callbacks, **(options or {}),
    )  # fmt: skip


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_those_of_two_plain_networks(name, accumulate, tmp_path):
    watch, data = Watch(), dataset_of(name)
    settings = {"gradient_accumulation_steps": accumulate, "max_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = trainer_of(name, tmp_path, data, watch, method(steps=1), **settings)
    watch.net = trainer.net
    disturb(trainer.net)
    batches = [batch_of(data[2 * i : 2 * i + 2]) for i in range(accumulate)]
    expected = gradients(trainer.net, CASES[name].rows, batches)
    trainer.train()
    (got,) = watch.gradients
    assert_gradients(got, expected)
