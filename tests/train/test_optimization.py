"""What a config builds: optimizers, their groups, learning rates, the loss of a step, and what is private."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dcil import SparseNet, data, models
from dcil.engine import EagerEngine, EngineSettings, StepSettings
from dcil.errors import UserError
from dcil.train import RECIPES, Config, RunFolder, Trainer, train
from dcil.train.building import build_model, build_net, build_optimizer, parameter_groups
from dcil.train.config import EARLIER, from_record, to_json
from dcil.train.restore import load_net

CPU = torch.device("cpu")
GPT = Config(
    dataset="pydoc", model="gpt-2-32", epochs=2, target_epoch=1, milestones=(), optimizer="adamw", decay_on="matrices"
)
#: Without the downloads that name data sets need.
TEXT = "".join(f"line {i} of {i * i}\n" for i in range(120))
SMALL = replace(GPT, dataset="text", length=16, batch=8, lr=1e-2, weight_decay=0.1, clip_norm=1.0, sparsity=0.8)


def write_text(folder: Path) -> Path:
    file = folder / "numbers.txt"
    file.write_text(TEXT)
    return file


def net_of(config: Config) -> SparseNet:
    torch.manual_seed(0)
    shape = (16,) if models.reads_tokens(config.model) else (3, 8, 8)
    return build_net(config, build_model(config, 12, shape), 10)


# -- optimizers -----------------------------------------------------------------------------------------------------


def test_sgd_is_as_before() -> None:
    net = net_of(Config())
    found = build_optimizer(Config(), net)
    assert isinstance(found, torch.optim.SGD) and len(found.param_groups) == 1
    [group] = found.param_groups
    assert {k: group[k] for k in ("lr", "momentum", "nesterov", "weight_decay")} == {
        "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4,
    }  # fmt: skip
    assert all(a is b for a, b in zip(group["params"], net.parameters(), strict=True))


def test_adamw_has_its_settings() -> None:
    config = replace(GPT, lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    found = build_optimizer(config, net_of(config))
    assert isinstance(found, torch.optim.AdamW) and found.defaults["fused"]
    for group in found.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.95), 1e-6)
    assert [group["weight_decay"] for group in found.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("model", ["gpt-2-32", "gpt-2-32-untied", "vit-2-32-4", "resnet8-digits"])
def test_the_super_nets_layers_are_grouped_as_the_pruned_nets(model: str) -> None:
    config = replace(GPT, model=model, dataset="pydoc" if model.startswith("gpt") else "cifar10")
    net = net_of(config)
    names = {id(p): name for name, p in net.named_parameters()}
    decayed, rest = ([names[id(p)] for p in group["params"]] for group in parameter_groups(config, net))
    assert sorted(decayed + rest) == sorted(names.values())
    for name, parameter in net.named_parameters():
        path, _, plain = name.partition(".")
        embedding = plain in ("wte.weight", "wpe.weight", "cls_token", "pos_embed")
        tied_head = plain == "head.weight" and model == "gpt-2-32"
        assert (name in rest) == (parameter.dim() < 2 or embedding or tied_head), name
        if path == "super" and plain != "head.weight":
            assert (name in rest) == (f"model.{plain}" in rest)
    assert any(name.startswith("super.") for name in rest)


def test_one_group_where_everything_is_decayed() -> None:
    net = net_of(replace(GPT, decay_on="all"))
    assert len(build_optimizer(replace(GPT, decay_on="all"), net).param_groups) == 1


# -- learning rates -------------------------------------------------------------------------------------------------


def test_the_cosine_by_hand() -> None:
    config = Config(
        epochs=10, target_epoch=5, lr=1.0, lr_floor=0.1, lr_schedule="cosine", milestones=(), lr_warmup_epochs=2,
        lr_warmup_from=0.2, finetune_epochs=1,
    )  # fmt: skip
    for epoch, rate in ((0, 0.2), (1, 0.6), (1.5, 0.8), (2, 1.0), (4, 0.1 + 0.45 * (1 + math.sqrt(0.5))), (6, 0.55)):
        assert config.lr_at(epoch) == pytest.approx(rate)
    assert config.lr_at(9.999) == pytest.approx(0.1, abs=1e-6)
    assert config.lr_at(10) == config.finetune_lr
    every = [config.lr_at(2 + i / 50) for i in range(400)]
    assert every == sorted(every, reverse=True)


def test_a_cosine_that_is_all_warm_up() -> None:
    config = Config(epochs=2, target_epoch=1, lr_schedule="cosine", milestones=(), lr_warmup_epochs=5)
    assert config.lr_at(1.9) == pytest.approx(0.1)


# -- the loss and the gradient of a step ------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_tokens_is_the_mean_over_tokens(smoothing: float) -> None:
    """Also where a sequence is as long as the vocabulary is large: no dimension can be mistaken."""
    net = build_net(replace(GPT, method="dense", sparsity=0.0), models.build("gpt-2-32", 16, size=16), 10)
    x = models.example((16,), 16, 3)
    y = x.roll(1, 0)
    outputs = net(x)
    want = torch.stack(
        [
            F.cross_entropy(outputs["pruned"][i, t], y[i, t], label_smoothing=smoothing)
            for i in range(3)
            for t in range(16)
        ]
    ).mean()
    torch.testing.assert_close(StepSettings(smoothing).loss(net, outputs, y), want)
    dcil = build_net(replace(GPT, settings={"warmup": 0.0}), models.build("gpt-2-32", 16, size=16), 10)
    assert StepSettings(smoothing).loss(dcil, dcil(x), y).isfinite()


@pytest.mark.parametrize("low_memory", [False, True])
def test_gradients_are_clipped_before_the_step(low_memory: bool) -> None:
    config = replace(SMALL, optimizer="sgd", momentum=0.0, weight_decay=0.0, decay_on="all", clip_norm=0.01)
    trainer = build(config, EngineSettings(low_memory=low_memory))
    assert isinstance(trainer.engine, EagerEngine)
    before = [p.detach().clone() for p in trainer.net.parameters()]
    trainer.net.train()
    next(trainer.engine.epoch(0, lambda i: 1.0))
    moved = torch.stack([(p.detach() - q).norm() for p, q in zip(trainer.net.parameters(), before, strict=True)]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-4)


def build(config: Config, settings: EngineSettings | None = None) -> Trainer:
    loaded = data.Text("text", "numbers.txt", TEXT.encode())
    return Trainer.build(config, data.prepare(loaded, config.tokens, config.length), CPU, settings)


def test_an_epoch_counts_tokens() -> None:
    trainer = build(replace(SMALL, label_smoothing=0.1, schedule="step", settings={"every": 4}))
    row = trainer.epoch(0, lambda *_: None)
    _, _, targets = trainer.engine.totals()
    assert targets == trainer.loader.steps * 8 * 16 - (-trainer.loader.count % 8) * 16  # type: ignore[attr-defined]
    assert 0 <= row["top1_train"] <= 100 and 0 <= row["top1"] <= row["top5"] <= 100
    net = trainer.net.eval()
    losses, hits = [], 0
    for x, y in trainer.loader.test():
        logits = net(x)
        losses += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").tolist()
        hits += int((logits.argmax(-1) == y).sum())
    assert row["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)  # without smoothing
    assert row["top1"] == pytest.approx(100 * hits / len(losses))
    assert row["val_loss_super"] is not None and row["val_loss_super"] != row["val_loss"]


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, optimizer="sgd"),
        replace(SMALL, optimizer="sgd", decay_on="all", label_smoothing=0.1, clip_norm=0.0),
        replace(SMALL, method="dpf", clip_norm=0.0),
    ],
    ids=["adamw", "sgd in groups", "smoothing", "dpf"],
)
def test_the_graph_engine_trains_them_as_the_eager_one_does(config: Config) -> None:
    """Without CUDA all of it but the recording runs: slots, paths as functions, groups, smoothing, clipping."""
    trainers = [build(config, EngineSettings(engine=engine)) for engine in ("eager", "graph")]  # type: ignore[arg-type]
    rows = [trainer.epoch(0, lambda *said: None) for trainer in trainers]
    assert [trainer.engine.name for trainer in trainers] == ["eager", "graph"]
    for name in ("train_loss", "val_loss", "sparsity"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-4)
    for name, mask in trainers[0].net.masks.items():
        assert torch.equal(mask, trainers[1].net.masks[name])


def test_one_path_at_a_time_needs_no_dropout() -> None:
    with pytest.raises(UserError, match="dropout would differ"):
        build(replace(SMALL, dropout=0.1), EngineSettings(low_memory=True))


# -- what is private --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt-2-32", "gpt-2-32-untied", "vit-2-32-4", "resnet8-digits"])
@pytest.mark.parametrize("private", ["norms,head", "norms", "head", "none"])
def test_what_each_path_has_for_itself(model: str, private: str) -> None:
    config = replace(GPT, model=model, dataset="pydoc" if model.startswith("gpt") else "cifar10", private=private)
    net, usual = net_of(config), net_of(replace(config, private="norms,head"))
    assert list(net.masks) == list(usual.masks)  # the same weights are pruned, whatever is private
    own, all_of_them = (
        {name.removeprefix("super.") for name, _ in each.named_parameters() if name.startswith("super.")}
        for each in (net, usual)
    )
    assert own == {
        name for name in all_of_them if ("head" if name.startswith(("head.", "fc.")) else "norms") in private
    }
    assert bool(own) == (private != "none")
    x = models.example((16,) if model.startswith("gpt") else (3, 8, 8), 12, 4)
    outputs = net.train()(x)
    assert torch.equal(outputs["pruned"], outputs["super"])  # nothing is pruned yet, private layers are copies
    StepSettings().loss(net, outputs, x if model.startswith("gpt") else torch.arange(4)).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_shared_tied_head_is_the_pruned_paths() -> None:
    """The super path reads it and does not train it; it is dense."""
    net = net_of(replace(GPT, private="norms", settings={"kl": 0.0}))
    x = models.example((16,), 12, 4)
    outputs = net(x)
    head = net.model.get_parameter("wte.weight")
    F.cross_entropy(outputs["super"].flatten(0, 1), x.flatten()).backward(retain_graph=True)
    assert head.grad is None
    F.cross_entropy(outputs["pruned"].flatten(0, 1), x.flatten()).backward()
    assert head.grad is not None and head.grad.abs().sum() > 0
    assert "wte.weight" not in net.masks and "head.weight" not in net.masks


@pytest.mark.parametrize("private", ["norms", "head", "none"])
def test_a_run_is_restored_with_what_is_private(private: str, tmp_path: Path) -> None:
    config = replace(SMALL, private=private, epochs=1, target_epoch=1)
    folder = RunFolder(tmp_path / "run")
    train(config, folder, write_text(tmp_path), CPU)
    net = load_net(folder)
    assert any(name.startswith("super.") for name, _ in net.named_parameters()) == (private != "none")


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "adam"}, "unknown --optimizer 'adam': did you mean 'adamw'?"),
        ({"betas": (0.9,)}, "--betas must be two numbers >= 0 and < 1"),
        ({"betas": (0.9, 1.0)}, "--betas must be two numbers"),
        ({"eps": 0.0}, "--eps must be > 0"),
        ({"decay_on": "weights"}, "unknown --decay-on"),
        ({"lr_schedule": "linear"}, "unknown --lr-schedule 'linear'"),
        ({"lr_floor": 0.2}, "--lr-floor must be >= 0 and <= --lr (0.1), got 0.2"),
        ({"label_smoothing": 1.0}, "--label-smoothing must be >= 0 and < 1"),
        ({"clip_norm": -1.0}, "--clip-norm must be >= 0"),
        ({"dropout": 0.5}, "resnet8-digits has no dropout: dropout must be 0, got 0.5"),
        ({"tokens": "words"}, "unknown --tokens 'words'"),
        ({"length": 0}, "--length must be from 1 to 1000000"),
        ({"private": "norm"}, "unknown --private 'norm'"),
        ({"model": "gpt-2-32"}, "gpt-2-32 must be trained on tokens, got images: choose another --model or --dataset"),
        ({"dataset": "shakespeare"}, "resnet8-digits must be trained on images, got tokens"),
    ],
)
def test_what_cannot_be(change: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as error:
        replace(Config(), **change)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_configs_of_earlier_runs_mean_what_they_meant() -> None:
    record = json.loads(to_json(Config(), Config().build_method(8), {"classes": 10, "shape": [1, 8, 8]}))
    old = {name: value for name, value in record.items() if name not in EARLIER}
    assert len(old) == len(record) - len(EARLIER) and from_record(old) == from_record(record) == Config()
    with pytest.raises(KeyError):  # what every version wrote is not made up
        from_record({name: value for name, value in old.items() if name != "lr"})


@pytest.mark.parametrize("name", ["gpt-text", "gpt-pydoc", "vit-cifar10", "vit-cifar100"])
def test_recipes_of_transformers(name: str) -> None:
    config = RECIPES[name]()
    assert (config.optimizer, config.lr_schedule, config.decay_on) == ("adamw", "cosine", "matrices")
    assert config.lr_at(config.epochs - 1e-9) == pytest.approx(config.lr_floor, rel=1e-3)
    assert config.lr_at(config.lr_warmup_epochs) == config.lr == 1e-3
    assert config.target_epoch / config.epochs == pytest.approx(0.75, abs=0.09)
    record = json.loads(to_json(config, config.build_method(10), {"classes": 10, "shape": [64]}))
    assert from_record(record) == config
    assert {field.name for field in fields(Config)} <= set(record)


def test_the_gpt_recipe_is_nano_gpts() -> None:
    """config/train_shakespeare_char.py and the defaults of train.py."""
    c = RECIPES["gpt-text"]()
    assert (c.model, c.batch, c.length, c.dropout, c.lr, c.lr_floor) == ("gpt-6-384", 64, 256, 0.2, 1e-3, 1e-4)
    assert (c.betas, c.weight_decay, c.clip_norm) == ((0.9, 0.99), 0.1, 1.0)
    steps = c.epochs * -(-(1_003_854 // 256 - 1) // 64)  # of tiny Shakespeare
    assert steps == pytest.approx(5000, rel=0.02)
