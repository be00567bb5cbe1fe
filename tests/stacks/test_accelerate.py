"""accelerate: the gradients of two plain networks, steps counted through its optimizer, exact resuming."""

from __future__ import annotations

import copy
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from hf_models import (
    BERT,
    CASES,
    assert_gradients,
    batch_of,
    dataset_of,
    disturb,
    divergence,
    gradients,
    grads_of,
    model_of,
)

import dcil
from dcil.integrations.accelerate import SparseModel


@pytest.fixture(autouse=True)
def _fresh_state():
    """Accelerate keeps its state in classes."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def method(**settings):
    return dcil.DCIL(**{"sparsity": 0.5, "steps": 6, "every": 1, "warmup": 0.0, **settings})


def loader_of(name, size=12):
    return torch.utils.data.DataLoader(dataset_of(name, size), batch_size=2)


@pytest.mark.parametrize("name", ["bert-classification", "vit", "bert-questions"])
def test_gradients_are_those_of_two_plain_networks(name):
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    net = SparseModel(model_of(name), method())
    disturb(net)
    data = dataset_of(name)
    expected = gradients(net, CASES[name].rows, [batch_of(data[2 * i : 2 * i + 2]) for i in range(3)])
    prepared, loader = accelerator.prepare(net, loader_of(name))
    for _, batch in zip(range(3), loader, strict=False):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
    assert_gradients(grads_of(net), expected)


def test_tokens_of_all_batches_count_alike():
    """Ragged batches with the number of all labels, as accelerate's guide to accumulation has it."""
    net, data = SparseModel(model_of("gpt2"), method()), dataset_of("gpt2")
    disturb(net)
    batches = [batch_of(data[2 * i : 2 * i + 2]) for i in range(3)]
    expected = gradients(net, CASES["gpt2"].rows, batches)
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        net(**batch, num_items_in_batch=items).loss.backward()
    assert_gradients(grads_of(net), expected)


def test_the_output_is_the_models_own():
    net, batch = SparseModel(model_of("llama"), method()), batch_of(dataset_of("llama"))
    disturb(net)
    output, paths = net(**batch), {name: net.path(name, **batch) for name in net.method.paths}
    assert type(output) is type(paths["pruned"]) and torch.equal(output.logits, paths["pruned"].logits)
    assert output.loss > paths["pruned"].loss + paths["super"].loss
    assert torch.equal(net(**batch, return_dict=False)[0], output.loss)
    ids, mask, labels = (batch[key] for key in ("input_ids", "attention_mask", "labels"))
    assert torch.equal(net(ids, mask, None, None, None, labels).loss, output.loss)
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    assert net(**unlabelled).keys() == {"pruned", "super"}
    with torch.no_grad():
        plain = net.eval()(**batch)
        assert torch.equal(plain.loss, net.path("pruned", **batch).loss)


def test_a_loss_that_forgets_a_path_is_refused():
    net, batch = SparseModel(model_of("bert-classification"), method()), batch_of(dataset_of("bert-classification"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.attach(optimizer)
    torch.nn.functional.cross_entropy(net(**batch).logits, batch["labels"]).backward()
    with pytest.raises(dcil.UserError, match="path has no part in"):
        optimizer.step()


def test_segmentation_counts_the_pixels_that_have_a_label():
    size = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2]}
    quiet = {"hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    heads = {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 4}
    config = hf.SegformerConfig(num_encoder_blocks=2, **size, **quiet, **heads)
    model = hf.SegformerForSemanticSegmentation(config)
    net = SparseModel(model, method(), classifier="decode_head.classifier")
    disturb(net)
    images, labels = torch.randn(2, 3, 16, 16), torch.randint(4, (2, 16, 16))
    labels[0, :8] = 255
    loss = net(pixel_values=images, labels=labels).loss
    paths = [net.path(name, pixel_values=images, labels=labels) for name in net.method.paths]
    (p, s), kept = (path.logits.movedim(1, -1) for path in paths), (labels != 255)[:, ::2, ::2]
    kl = divergence(p[kept], s[kept], 2.0) + divergence(s[kept], p[kept], 2.0)
    torch.testing.assert_close(loss, paths[0].loss + paths[1].loss + kl / kept.sum())
    assert p.shape[1:3] == kept.shape[1:] and net.recognised


def test_logits_are_asked_for_only_where_there_are_kl_terms():
    batch = {"input_ids": torch.randint(40, (2, 8)), "labels": torch.randint(40, (2, 8))}
    batch["next_sentence_label"] = torch.randint(2, (2,))

    def loss(chosen, **options):
        net = SparseModel(hf.BertForPreTraining(hf.BertConfig(**BERT)), chosen, classifier="cls", **options)
        return net(**batch).loss

    for chosen in (method(kl=0.0), dcil.DPF(sparsity=0.5, steps=6)):
        assert loss(chosen).isfinite()
    with pytest.raises(dcil.UserError, match="prediction_logits"):
        loss(method())
    with pytest.raises(dcil.UserError, match="distill must be named"):  # the loss has a second part
        loss(method(), logits=lambda output: output["prediction_logits"])
    assert loss(method(distill="softmax"), logits=lambda output: output["prediction_logits"]).isfinite()


@pytest.mark.parametrize("batches", [12, 11])
def test_steps_are_counted_through_the_accelerated_optimizer(batches):
    """Eleven batches in threes: accelerate takes a step with the last two as well."""
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    net = dcil.SparseNet(
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)), method(steps=4)
    )
    data = [(torch.randn(6), torch.tensor(i % 3)) for i in range(2 * batches)]
    optimizer = torch.optim.AdamW(net.parameters())
    model, accelerated, loader = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    net.attach(accelerated)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(net.loss(model(x), y))
            accelerated.step()
            accelerated.zero_grad()
    assert net.steps_done == 4 and net.sparsity == 0.5


def test_steps_that_the_scaler_skips_do_not_count():
    Accelerator(cpu=True)
    net = dcil.SparseNet(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)), method(steps=9))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), scaler=scaler)
    net.attach(optimizer)
    counted = []
    for overflow in (False, True, False, True, True, False):
        loss = net.loss(net(torch.randn(4, 6)), torch.randint(3, (4,)))
        scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == overflow
        counted.append(net.steps_done)
    assert counted == [1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("name", ["llama", "bert-masked-lm"])
def test_resuming_from_a_saved_state_is_exact(name, tmp_path):
    def run(steps, load=None, save=None):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = Accelerator(cpu=True)
        net = SparseModel(model_of(name), method())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(net, optimizer, loader_of(name))
        net.attach(optimizer)
        if load is not None:
            accelerator.load_state(load)
        for number, batch in enumerate(loader):
            if number < net.steps_done or number >= steps:
                continue
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            accelerator.save_state(save)
        return net

    whole = run(6)
    run(3, save=tmp_path)
    resumed = run(6, load=tmp_path)
    assert resumed.steps_done == 6
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_mixed_precision():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net = SparseModel(model_of("llama"), method())
    disturb(net)
    batch = batch_of(dataset_of("llama"))
    exact = copy.deepcopy(net)(**batch).loss.item()
    model = accelerator.prepare(net)
    loss = model(**batch).loss
    accelerator.backward(loss)
    assert loss.dtype == torch.float and abs(loss.item() - exact) < 0.05 * exact
    assert net.shifted and net.recognised


def test_two_processes_are_one_larger_batch(tmp_path):
    script = Path(__file__).with_name("accelerate_process.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script, tmp_path], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_the_example_runs(capsys):
    example = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
    runpy.run_path(str(example), run_name="__main__")
    steps, sparsity, loss = re.findall(r"(\d+) steps, sparsity ([\d.]+), loss ([\d.]+)", capsys.readouterr().out)[0]
    assert int(steps) == 120 and float(sparsity) == 0.9 and float(loss) < 2
    assert len(re.findall("# dcil$", example.read_text(), re.M)) == 2
