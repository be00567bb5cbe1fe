"""Hugging Face's Trainer: the gradients of two plain networks, exact counts, files that from_pretrained loads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from hf_models import (
    BERT,
    CASES,
    Watch,
    arguments,
    assert_gradients,
    batch_of,
    dataset_of,
    disturb,
    gradients,
    model_of,
)
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

import dcil
from dcil.integrations.accelerate import SparseModel
from dcil.integrations.transformers import STATE_FILE, SparseTrainer, SparsityCallback


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


@pytest.mark.parametrize("name", ["llama", "bert-classification"])
def test_label_smoothing_and_a_loss_of_your_own_count_on_both_paths(name, tmp_path):
    data, grads = dataset_of(name), []
    shared = {"gradient_accumulation_steps": 3, "max_steps": 1, "train_sampling_strategy": "sequential"}

    def loss_of_one(output, labels, num_items_in_batch=None):
        rows, target = CASES[name].rows(output, {"labels": labels})
        each = torch.nn.functional.cross_entropy(rows, target, label_smoothing=0.2, reduction="sum")
        return each / num_items_in_batch

    own = {"compute_loss_func": loss_of_one}
    for options, extra in (({}, {"label_smoothing_factor": 0.2}), (own, {})):
        watch = Watch()
        settings = method(steps=1, distill="softmax", class_dim=-1)
        trainer = trainer_of(name, tmp_path, data, watch, settings, options, **shared, **extra)
        watch.net = trainer.net
        disturb(trainer.net)
        trainer.train()
        grads += watch.gradients
    assert_gradients(*grads)


def test_a_batch_without_labels_that_count_adds_nothing(tmp_path):
    data, watch = dataset_of("llama"), Watch()
    empty = [{**item, "labels": torch.full_like(item["labels"], -100)} for item in data[:2]]
    settings = {"gradient_accumulation_steps": 2, "max_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = trainer_of("llama", tmp_path, empty + data, watch, method(steps=1), **settings)
    watch.net = trainer.net
    disturb(trainer.net)
    expected = gradients(trainer.net, CASES["llama"].rows, [batch_of(data[:2])])
    trainer.train()
    assert_gradients(watch.gradients[0], expected)


@pytest.mark.parametrize(("labels", "settings"), [("float", {}), ("one", {"num_labels": 1})])
def test_a_loss_that_is_no_cross_entropy_needs_its_distillation_named(labels, settings, tmp_path):
    data = [{**item, "labels": torch.rand(3) if labels == "float" else torch.rand(())} for item in dataset_of("vit")]
    config = hf.BertConfig(**BERT, num_labels=3) if labels == "float" else hf.BertConfig(**BERT, **settings)
    data = [{"input_ids": torch.randint(40, (8,)), "labels": item["labels"]} for item in data]

    def trainer(chosen):
        model = hf.BertForSequenceClassification(config)
        return SparseTrainer(model=model, method=chosen, args=arguments(tmp_path, max_steps=1), train_dataset=data)

    with pytest.raises(dcil.UserError, match="distill must be named"):
        trainer(method(steps=1)).train()
    trainer(method(steps=1, kl=0.0)).train()
    named = trainer(method(steps=1, distill="sigmoid" if labels == "float" else "mse"))
    disturb(named.net)
    named.train()
    assert named.net.metrics()["loss/kl"] > 0


def test_regression_is_divided_by_the_accumulated_batches_too(tmp_path):
    """Floating labels are counted by Trainer as others are, while the model ignores the count."""
    data = [{"input_ids": torch.randint(40, (8,)), "labels": torch.rand(())} for _ in range(8)]
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=1))
    plain, grads = copy.deepcopy(model).train(), Watch()
    settings = {"gradient_accumulation_steps": 4, "max_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = SparseTrainer(
        model=model, method=dcil.DPF(sparsity=0.5, steps=1), args=arguments(tmp_path, **settings), train_dataset=data,
        callbacks=[grads],
    )  # fmt: skip
    grads.net = trainer.net
    trainer.train()
    plain(**batch_of(data)).loss.backward()
    got = {name.removeprefix("model."): grad for name, grad in grads.gradients[0].items()}
    assert_gradients(got, {name: p.grad for name, p in plain.named_parameters()})


def test_the_callback_in_a_trainer_of_your_own(tmp_path):
    """Which gets a SparseModel as its model: the loss is right, the steps are counted, the zeros are written."""
    data, watch, net = dataset_of("llama"), Watch(), SparseModel(model_of("llama"), method(steps=2))
    watch.net = net
    disturb(net)
    settings = {"gradient_accumulation_steps": 3, "max_steps": 2, "train_sampling_strategy": "sequential"}
    args = arguments(tmp_path, remove_unused_columns=False, logging_steps=1, **settings)
    trainer = hf.Trainer(model=net, args=args, train_dataset=data, callbacks=[watch])
    SparsityCallback(net).add_to(trainer)
    expected = gradients(net, CASES["llama"].rows, [batch_of(data[2 * i : 2 * i + 2]) for i in range(3)])
    trainer.train()
    assert net.steps_done == 2 and "losses/kl" in trainer.state.log_history[0]
    assert all((layer.weight[~layer.mask] == 0).all() for layer in net.layers)
    assert_gradients(watch.gradients[0], expected)


# -- counts and masks --------------------------------------------------------------------------------------------------


def test_steps_are_counted_once_per_optimizer_step(tmp_path):
    watch, chosen = Watch(), method(steps=6, sparsity=0.8)
    trainer = trainer_of(
        "bert-classification", tmp_path, None, watch, chosen, gradient_accumulation_steps=3, max_steps=6
    )
    watch.net = trainer.net
    trainer.train()
    total = sum(mask.numel() for mask in trainer.net.masks.values())
    pruned = [round(total * sparsity) for sparsity in watch.sparsity]
    reached = [int(chosen.sparsity_at(min(step, 5)) * total) for step in range(1, 7)]
    assert trainer.net.steps_done == 6 and pruned == reached


def test_the_steps_can_be_left_to_the_trainer(tmp_path):
    chosen = functools.partial(dcil.DCIL, sparsity=0.5, kl=0.0)
    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 3}
    trainer = trainer_of("vit", tmp_path, dataset_of("vit", 14), None, chosen, **settings)
    assert trainer.net.method == dcil.DCIL(sparsity=0.5, kl=0.0, steps=12, distill="softmax", class_dim=-1)
    trainer.train()
    assert trainer.net.steps_done == trainer.state.global_step == 12


def test_the_optimizer_has_every_path_and_no_decay_on_norms_and_biases(tmp_path):
    trainer = trainer_of("llama", tmp_path, weight_decay=0.1)
    names = {id(p): name for name, p in trainer.net.named_parameters()}
    decayed, rest = ({names[id(p)] for p in g["params"]} for g in trainer.create_optimizer().param_groups)
    assert decayed | rest == set(names.values())
    assert rest == {name for name in names.values() if "norm" in name}
    assert any(name.startswith("super.") for name in rest) and "super.lm_head.weight" in decayed


def test_an_optimizer_of_the_models_parameters_is_refused(tmp_path):
    model = model_of("llama")
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    data, args = dataset_of("llama"), arguments(tmp_path, max_steps=1)
    trainer = SparseTrainer(model=model, method=method(steps=1), args=args, train_dataset=data, optimizers=optimizers)
    with pytest.raises(dcil.UserError, match="lacks"):
        trainer.train()
    net = SparseModel(model_of("llama"), method(steps=1))
    optimizers = (torch.optim.SGD(net.parameters(), lr=0.1), None)
    trainer = SparseTrainer(net, args, train_dataset=data, optimizers=optimizers)
    trainer.train()
    assert net.steps_done == 1 and trainer.net is net
    with pytest.raises(dcil.UserError, match="SparseModel"):
        SparseTrainer(dcil.SparseNet(model_of("llama"), method()), args)


def test_frozen_filters_of_gpt2_are_columns_and_experts_are_pruned(tmp_path):
    net = dcil.SparseNet(model_of("gpt2"), dcil.SFP(sparsity=0.5, steps=1, ramp=1.0))
    net.step()
    for name, mask in net.masks.items():
        if "c_" in name:
            assert mask.dim() == 2 and (mask.all(0) | ~mask.any(0)).all(), name  # whole columns
            assert 0 < int((~mask.any(0)).sum()) < mask.shape[1]
    experts = dcil.SparseNet(model_of("mixtral"), method())
    stacked = {name for name, mask in experts.masks.items() if mask.dim() == 3}
    assert {name.rsplit(".", 1)[1] for name in stacked} == {"gate_up_proj", "down_proj"} and len(stacked) == 4


# -- evaluation and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-masked-lm", "gpt2", "t5", "mixtral", "vit"])
def test_what_is_saved_is_the_pruned_network(name, tmp_path):
    data = dataset_of(name)
    options = {"eval_dataset": data}
    trainer = trainer_of(name, tmp_path / "run", data, None, method(steps=4), options, max_steps=4)
    before = trainer.predict(data).metrics["test_loss"]
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved").eval()
    batch = batch_of(data)
    with torch.no_grad():
        wanted = trainer.net.eval().path("pruned", **batch)
        found = loaded(**batch)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=0)
    for key, value in trainer.net.finalize().state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    assert sum(int((loaded.get_parameter(n) == 0).sum()) for n in trainer.net.masks) == pruned_weights(trainer.net)
    logits = trainer.predict(data).predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    torch.testing.assert_close(torch.tensor(logits), wanted.logits, rtol=1e-5, atol=1e-5)
    assert trainer.evaluate()["eval_loss"] != before
    assert not (tmp_path / "saved" / STATE_FILE).exists()


def pruned_weights(net):
    return sum(int((~mask).sum()) for mask in net.masks.values())


def test_evaluation_in_the_midst_of_training_sees_the_pruned_path_and_changes_nothing(tmp_path):
    class Inside(TrainerCallback):
        trainer, seen, wrong = None, 0, 0

        def on_step_end(self, args, state, control, **objects):
            net = self.trainer.net
            before = {k: v.clone() for k, v in net.state_dict().items()}
            got = self.trainer.predict(data).predictions
            with torch.no_grad():
                wanted = net.finalize()(**batch_of(data)).logits
            self.seen += 1
            self.wrong += not torch.allclose(torch.tensor(got), wanted, atol=1e-6)
            self.wrong += any(not torch.equal(v, before[k]) for k, v in net.state_dict().items())

    data, inside = dataset_of("bert-classification"), Inside()
    trainer = trainer_of("bert-classification", tmp_path, data, inside, method(steps=4), max_steps=4)
    inside.trainer = trainer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # finalize() says that the final sparsity is not reached
        trainer.train()
    assert (inside.seen, inside.wrong) == (4, 0)


def test_generation_in_evaluation_is_the_pruned_networks(tmp_path):
    class Generating(SparseTrainer, Seq2SeqTrainer):
        pass

    data = dataset_of("t5")
    settings = {**vars_of(arguments(tmp_path, max_steps=3)), "predict_with_generate": True, "generation_max_length": 6}
    args = Seq2SeqTrainingArguments(**settings)
    trainer = Generating(model=model_of("t5"), method=method(steps=3, sparsity=0.9), args=args, train_dataset=data)
    disturb(trainer.net)
    got = torch.tensor(trainer.predict(data).predictions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = trainer.net.finalize()
    wanted = sparse.generate(batch_of(data)["input_ids"], max_length=6)
    dense = trainer.model.generate(batch_of(data)["input_ids"], max_length=6)
    assert torch.equal(got[:, : wanted.shape[1]], wanted) and not torch.equal(wanted, dense)


def vars_of(args):
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and not f.name.startswith("_")}


def test_the_model_holds_the_zeros_after_training(tmp_path):
    model = model_of("bert-classification")
    data, args = dataset_of("bert-classification"), arguments(tmp_path, max_steps=4)
    trainer = SparseTrainer(model=model, method=method(steps=4), args=args, train_dataset=data)
    trainer.train()
    model.save_pretrained(tmp_path / "direct")
    loaded = type(model).from_pretrained(tmp_path / "direct")
    zeros = sum(int((loaded.get_parameter(name) == 0).sum()) for name in trainer.net.masks)
    assert zeros == pruned_weights(trainer.net) == int(0.5 * sum(m.numel() for m in trainer.net.masks.values()))


def test_a_training_that_ends_too_early_says_so(tmp_path):
    trainer = trainer_of("vit", tmp_path, None, None, method(steps=100), max_steps=2)
    with pytest.warns(UserWarning) as caught:
        trainer.train()
    texts = [str(w.message) for w in caught]
    assert any("takes 2 of the method's 100 steps" in t for t in texts)
    assert any("ended at a sparsity of" in t for t in texts)
    assert all(layer.weight.ne(0).all() for layer in trainer.net.layers)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_is_exact(accumulate, tmp_path):
    data = dataset_of("bert-classification", 14)

    def trainer(folder, **settings):
        torch.manual_seed(0)
        config = hf.BertConfig(**{**BERT, "hidden_dropout_prob": 0.1}, num_labels=3)  # so that the random state counts
        return SparseTrainer(
            model=hf.BertForSequenceClassification(config), method=method(steps=8, every=2, warmup=0.5),
            args=arguments(folder, max_steps=8, gradient_accumulation_steps=accumulate, **settings), train_dataset=data,
        )  # fmt: skip

    whole = trainer(tmp_path, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.net.steps_done == whole.net.steps_done == 8
    for key, value in whole.net.state_dict().items():
        assert torch.equal(value, resumed.net.state_dict()[key]), key
    saved = hf.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6")
    state = torch.load(tmp_path / "checkpoint-6" / STATE_FILE, weights_only=True)
    for name in whole.net.masks:
        assert torch.equal(saved.get_parameter(name) == 0, ~state[f"_masks.{name}"])
    with pytest.raises(dcil.UserError, match=STATE_FILE):
        whole.save_model(str(tmp_path / "plain"))
        trainer(tmp_path / "third").train(resume_from_checkpoint=str(tmp_path / "plain"))


def test_the_best_model_is_one_of_those_as_sparse_as_asked_for(tmp_path):
    data = dataset_of("bert-classification")
    saving = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "late", "greater_is_better": False}
    marks = iter(range(100))  # the first is the best
    options = {"eval_dataset": data, "compute_metrics": lambda _: {"late": next(marks)}}
    settings = {**saving, **best, "max_steps": 8}
    trainer = trainer_of("bert-classification", tmp_path, data, None, method(steps=8), options, **settings)
    trainer.train()
    assert trainer.state.best_global_step == 6 == trainer.net.method.target_step
    assert trainer.net.steps_done == 6 and abs(trainer.net.sparsity - 0.5) < 1e-3
    state = torch.load(tmp_path / "checkpoint-6" / STATE_FILE, weights_only=True)
    assert all(torch.equal(mask, state[f"_masks.{name}"]) for name, mask in trainer.net.masks.items())


def test_a_model_made_anew_is_wrapped_anew(tmp_path):
    data, args = dataset_of("vit"), arguments(tmp_path, max_steps=2)
    trainer = SparseTrainer(model_init=lambda: model_of("vit"), method=method(steps=2), args=args, train_dataset=data)
    first = trainer.net
    trainer.train()
    assert trainer.net is not first and trainer.net.model is trainer.model
    assert trainer.net.steps_done == 2 and first.steps_done == 0


# -- the rest of the Trainer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{"gradient_checkpointing": True}, {"use_liger_kernel": True}])
def test_what_cannot_be_right_is_refused_in_one_line(setting, tmp_path):
    with pytest.raises(dcil.UserError, match=f"{next(iter(setting))} must not be set") as error:
        trainer_of("llama", tmp_path, **setting)
    assert "\n" not in str(error.value)


def test_columns_that_the_model_does_not_take_are_removed_and_no_others(tmp_path):
    data = [{**item, "text": "words"} for item in dataset_of("bert-tokens")]
    trainer = trainer_of("bert-tokens", tmp_path, data, None, method(steps=2), max_steps=2)
    assert trainer.args.remove_unused_columns
    assert next(iter(trainer.get_train_dataloader())).keys() == {"input_ids", "attention_mask", "labels"}
    trainer.train()


def test_clipping_takes_the_gradients_of_all_paths(tmp_path):
    watch = Watch()
    trainer = trainer_of("llama", tmp_path, None, watch, method(steps=2), max_steps=2, max_grad_norm=0.01)
    watch.net = trainer.net
    trainer.train()
    norm = torch.stack([g.norm() for g in watch.gradients[0].values() if g is not None]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("setting", [{"bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"}])
def test_gradients_in_bf16_and_compiled(setting, tmp_path):
    watch, data = Watch(), dataset_of("llama")
    settings = {"max_steps": 1, "train_sampling_strategy": "sequential", **setting}
    trainer = trainer_of("llama", tmp_path, data, watch, method(steps=1), **settings)
    watch.net = trainer.net
    disturb(trainer.net)
    expected = gradients(trainer.net, CASES["llama"].rows, [batch_of(data[:2])])
    trainer.train()
    (got,) = watch.gradients
    if "bf16" not in setting:
        return assert_gradients(got, expected)
    one, other = (torch.cat([g.flatten() for g in grads.values() if g is not None]) for grads in (got, expected))
    assert torch.nn.functional.cosine_similarity(one, other, 0) > 0.99


def logged_by_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


def logged_by_mlflow(folder):
    """From the store that makes files and folders of the names."""
    import mlflow

    mlflow.flush_async_logging()
    mlflow.end_run()
    client = mlflow.tracking.MlflowClient(str(folder / "mlflow"))
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {f"train/{name}": value for name, value in run.data.metrics.items()}


def logged_by_wandb(folder):
    import wandb

    found = dict(wandb.run.summary)
    wandb.finish()
    return found


@pytest.mark.parametrize(
    ("logger", "read"),
    [("tensorboard", logged_by_tensorboard), ("mlflow", logged_by_mlflow), ("wandb", logged_by_wandb)],
)
def test_loggers_get_the_metrics(logger, read, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlflow"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    settings = {"report_to": [logger], "logging_steps": 1, "max_steps": 3}
    trainer = trainer_of("llama", tmp_path, None, None, method(steps=3), **settings)
    trainer.train()
    found = read(tmp_path)
    names = {"losses/pruned", "losses/super", "losses/kl", "kl_weight", "sparsity", "flips/revived", "flips/dropped"}
    names |= {f"layer_sparsity/{name}" for name in trainer.net.masks}
    assert {f"train/{name}" for name in names} <= found.keys()
    assert abs(found["train/sparsity"] - trainer.net.sparsity) < 1e-6
    assert trainer.state.log_history[1]["losses/kl"] > 0


def test_two_processes_are_one_larger_batch(tmp_path):
    """Two gloo processes with ragged batches: the gradients are those of all batches together, the masks are equal."""
    script = Path(__file__).with_name("trainer_process.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script, tmp_path], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for key, mask in states[0].items():
        if key.startswith("_masks."):
            assert torch.equal(loaded.get_parameter(key.removeprefix("_masks.")) != 0, mask)


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")
    assert "90.0 % of the prunable weights are 0" in capsys.readouterr().out
    assert len(re.findall("# dcil$", example.read_text(), re.M)) == 1
