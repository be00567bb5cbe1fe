"""timm: layers and weight decay are found on both paths, its losses, averages and checkpoints are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup, resolve_data_config
from timm.layers import set_reentrant_ckpt
from timm.loss import BinaryCrossEntropy, JsdCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV2, ModelEmaV3, NativeScaler
from torch import Tensor, nn
from two_networks import assert_gradients, gradients, kl

import dcil
from dcil.integrations.timm import SparseTask

STEPS = 12
METHOD = dcil.DCIL(sparsity=0.8, steps=STEPS, every=3, warmup=0.0, distill="softmax")
#: Matchers of every kind: expressions, lists of them, a function; names without decay.
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 3},
    "swin_tiny_patch4_window7_224": {"img_size": 56},
    "cait_xxs24_224": {"img_size": 32, "depth": 3},
    "convnext_atto": {},
    "efficientnet_b0": {},
    "mixer_s32_224": {"img_size": 64},
    "regnetx_002": {},
}


def vit(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **(small | settings))


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(5, (n,))


def settings_by_name(module: nn.Module, **settings: Any) -> dict[str, tuple[float, float]]:
    """(learning-rate scale, weight decay) of every parameter in timm's groups."""
    opt = create_optimizer_v2(module, "adamw", lr=1e-3, weight_decay=0.05, **settings)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: (group.get("lr_scale", 1.0), group["weight_decay"])
        for group in opt.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("name", MODELS)
def test_layer_decay_sees_the_layers_of_both_paths(name):
    model = timm.create_model(name, num_classes=5, **MODELS[name])
    alone = settings_by_name(model, layer_decay=0.75), settings_by_name(model)
    net = dcil.SparseNet(model, METHOD)
    wrapped = settings_by_name(net, layer_decay=0.75), settings_by_name(net)
    for want, got in zip(alone, wrapped, strict=True):
        assert {f"model.{key}": value for key, value in want.items()}.items() <= got.items()
        of_super = {key.removeprefix("super."): value for key, value in got.items() if key.startswith("super.")}
        assert len(of_super) == len(got) - len(want) > 2
        assert of_super.items() <= want.items()
    assert len({scale for scale, _ in wrapped[0].values()}) > 3


def test_a_model_that_answers_nothing_is_not_answered_for():
    net = dcil.SparseNet(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), METHOD)
    assert not hasattr(net, "group_matcher") and not hasattr(net, "no_weight_decay")
    assert not hasattr(net, "pretrained_cfg")


def test_the_data_configuration_is_the_models():
    model = timm.create_model("mixer_s32_224", num_classes=5)
    want = resolve_data_config({}, model=model)
    assert want["mean"] == (0.5, 0.5, 0.5)  # not timm's default
    assert resolve_data_config({}, model=dcil.SparseNet(model, METHOD)) == want


# -- losses -----------------------------------------------------------------------------------------------------------


def bernoulli_kl(student: Tensor, teacher: Tensor) -> Tensor:
    p, q = (logits.sigmoid() for logits in (teacher.detach() / 2, student / 2))
    return 4 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


LOSSES: dict[str, tuple[Callable[..., Tensor], str, Callable[[Tensor, Tensor], Tensor]]] = {
    "soft target": (SoftTargetCrossEntropy(), "softmax", kl),
    "smoothed": (LabelSmoothingCrossEntropy(0.1), "softmax", kl),
    "jsd": (JsdCrossEntropy(num_splits=3), "softmax", kl),
    "bce": (BinaryCrossEntropy(smoothing=0.1), "sigmoid", bernoulli_kl),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_two_plain_networks(name):
    task, distill, distance = LOSSES[name]
    net = dcil.SparseNet(vit().double(), dcil.DCIL(sparsity=0.8, steps=20, every=2, warmup=0.2, distill=distill))
    opt = create_optimizer_v2(net, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    net.attach(opt)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5)
    for step in range(8):
        x, y = batch()
        if name == "soft target":
            x, y = mixup(x, y)
        x = x.double()

        def loss(pruned: nn.Module, super_net: nn.Module, x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
            p, s = pruned(x), super_net(x)
            terms = distance(p, s) + distance(s, p) if step >= 4 else 0.0
            return task(p, y) + task(s, y) + terms

        expected = gradients(net, loss)
        opt.zero_grad()
        net.loss(net(x), y, task=task).backward()
        assert_gradients(net, expected, 1e-8)
        opt.step()
    assert net.steps_done == 8 and net.sparsity > 0.5


@pytest.mark.parametrize("name", LOSSES)
def test_losses_other_than_cross_entropy_must_say_what_the_kl_terms_compare(name):
    net = dcil.SparseNet(vit(), dcil.DCIL(sparsity=0.8, steps=20))
    x, y = batch()
    y = F.one_hot(y, 5) if name == "soft target" else y
    with pytest.raises(dcil.UserError, match=r"distill must say.*'softmax'.*'sigmoid'"):
        net.loss(net(x), y, task=LOSSES[name][0])


# -- optimizers, averages, checkpoints ---------------------------------------------------------------------------------


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int = STEPS, ema: ModelEmaV3 | None = None) -> None:
    torch.manual_seed(3)
    for step in range(steps):
        x, y = batch()
        opt.zero_grad()
        net.loss(net(x), y).backward()
        opt.step()
        if ema is not None:
            ema.update(net, step=step)


@pytest.mark.parametrize("name", ["lookahead_adamw", "lamb", "muon", "sgdp", "adafactor"])
def test_the_steps_of_timms_optimizers_are_counted(name):
    net = dcil.SparseNet(vit(), METHOD)
    opt = create_optimizer_v2(net, name, lr=1e-3, weight_decay=0.05)
    net.attach(opt)
    train(net, opt)
    assert net.steps_done == STEPS and net.sparsity == pytest.approx(0.8, abs=1e-3)


def test_timms_scaler_skips_are_not_counted():
    net = dcil.SparseNet(vit(), METHOD)
    opt = create_optimizer_v2(net, "sgd", lr=1e-3)
    net.attach(opt)
    scaler = NativeScaler(device="cpu")
    for step in range(9):
        x, y = batch()
        loss = net.loss(net(x), y) * (float("inf") if step % 3 == 0 else 1.0)
        opt.zero_grad()
        scaler(loss, opt, clip_grad=1.0, parameters=net.parameters())
    assert net.steps_done == 6


def test_an_average_has_the_masks_of_the_net():
    net = dcil.SparseNet(vit(), METHOD)
    opt = create_optimizer_v2(net, "adamw", lr=1e-2)
    net.attach(opt)
    ema = ModelEmaV3(net, decay=0.9)
    train(net, opt, ema=ema)
    assert net.sparsity == pytest.approx(0.8, abs=1e-3)
    assert all(torch.equal(mask, ema.module.masks[name]) for name, mask in net.masks.items())
    sparse = ema.module.finalize()
    x, _ = batch()
    assert torch.equal(sparse(x), ema(x)) and not torch.allclose(sparse(x), net.eval()(x))
    assert int((sparse.blocks[0].mlp.fc1.weight == 0).sum()) >= int((~net.masks["blocks.0.mlp.fc1.weight"]).sum()) > 0


def test_an_average_of_masks_is_refused():
    net = dcil.SparseNet(vit(), METHOD)
    opt = create_optimizer_v2(net, "adamw", lr=1e-2)
    net.attach(opt)
    ema = ModelEmaV2(net, decay=0.9)
    for _ in range(STEPS):
        train(net, opt, 1)
        ema.update(net)
    with pytest.raises(dcil.UserError, match=r"buffers were averaged; use dcil\.EMA"):
        ema.module.finalize()


def test_a_checkpoint_of_timm_resumes_exactly(tmp_path):
    net, other = (dcil.SparseNet(vit(), METHOD) for _ in range(2))
    opt, more = (create_optimizer_v2(n, "adamw", lr=1e-3, layer_decay=0.75) for n in (net, other))
    net.attach(opt)
    other.attach(more)
    train(net, opt, 6)
    CheckpointSaver(net, opt, checkpoint_dir=tmp_path).save_checkpoint(0, 1.0)
    resume_checkpoint(other, tmp_path / "last.pth.tar", more, log_info=False)
    for n, o in ((net, opt), (other, more)):
        train(n, o, 6)
    assert net.steps_done == other.steps_done == STEPS
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_what_is_finalized_is_a_timm_model_with_its_own_keys():
    net = dcil.SparseNet(vit(), METHOD)
    opt = create_optimizer_v2(net, "adamw", lr=1e-3)
    net.attach(opt)
    train(net, opt)
    fresh = vit()
    fresh.load_state_dict(net.finalize().state_dict())
    x, _ = batch()
    assert torch.equal(fresh.eval()(x), net.eval()(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_refused(reentrant):
    set_reentrant_ckpt(reentrant)
    model = vit()
    model.set_grad_checkpointing()
    with pytest.raises(dcil.UserError, match="checkpoints its activations"):
        dcil.SparseNet(model, METHOD)
    net = dcil.SparseNet(vit(), METHOD)
    net.model.set_grad_checkpointing()
    x, y = batch()
    with pytest.raises((dcil.UserError, RuntimeError), match="checkpoints its activations"):
        net.loss(net(x.requires_grad_()), y).backward()


# -- timm's training task ----------------------------------------------------------------------------------------------


def test_the_task_computes_what_a_plain_loop_does():
    net = dcil.SparseNet(vit(), METHOD)
    twin = copy.deepcopy(net)
    task = SparseTask(net, nn.CrossEntropyLoss(), verbose=False)
    task.setup_ema(decay=0.9)
    opt, other = (create_optimizer_v2(n, "adamw", lr=1e-3, layer_decay=0.75) for n in (net, twin))
    net.attach(opt)
    twin.attach(other)
    for _ in range(STEPS):
        x, y = batch()
        opt.zero_grad()
        result = task(x, y)
        result["loss"].backward()
        opt.step()
        task.update_ema()
        other.zero_grad()
        loss = twin.loss(twin(x), y)
        loss.backward()
        other.step()
        assert torch.equal(result["loss"], loss) and result["output"].shape == (6, 5)
    assert net.steps_done == twin.steps_done == STEPS
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in net.state_dict().items())
    assert torch.equal(task.get_eval_model(ema=True).module.masks["blocks.0.mlp.fc1.weight"],
                       net.masks["blocks.0.mlp.fc1.weight"])  # fmt: skip
    x, y = batch()
    result = task.eval()(x, y)
    assert torch.equal(result["loss"], F.cross_entropy(net(x), y))


def test_the_task_asks_for_a_sparse_net():
    with pytest.raises(dcil.UserError, match=r"must get a dcil.SparseNet, got VisionTransformer"):
        SparseTask(vit(), nn.CrossEntropyLoss())
