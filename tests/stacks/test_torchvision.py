"""torchvision: every family of classifiers, segmentation with several heads and ignored pixels, detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn, retinanet_resnet50_fpn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large, lraspp_mobilenet_v3_large
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)
from two_networks import assert_gradients, gradients

import dcil

Build = Callable[[], nn.Module]


def small(name: str, **settings: Any) -> Build:
    return lambda: models.get_model(name, weights=None, num_classes=4, **settings)


def swin(block: Any, down: Any) -> nn.Module:
    shape = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    return models.SwinTransformer(**shape, num_classes=4, block=block, downsample_layer=down)


CONVNEXT = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
#: Every family of classifiers, its smallest network or a smaller one -> (network, size of the images, classifiers)
FAMILIES: dict[str, tuple[Build, int, str | list[str] | None]] = {
    "alexnet": (small("alexnet"), 64, None),
    "convnext": (
        lambda: models.ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=4),
        32,
        None,
    ),
    "densenet": (lambda: models.DenseNet(8, (2, 2), 16, num_classes=4), 32, None),
    "efficientnet": (small("efficientnet_b0"), 32, None),
    "googlenet": (small("googlenet", init_weights=False), 64, ["fc", "aux1.fc2", "aux2.fc2"]),
    "inception": (small("inception_v3", init_weights=False, aux_logits=False), 80, None),
    "maxvit": (lambda: maxvit(), 32, None),
    "mnasnet": (small("mnasnet0_5"), 32, None),
    "mobilenet v2": (small("mobilenet_v2"), 32, None),
    "mobilenet v3": (small("mobilenet_v3_small"), 32, None),
    "regnet": (small("regnet_y_400mf"), 32, None),
    "resnet": (small("resnet18"), 32, None),
    "shufflenet": (small("shufflenet_v2_x0_5"), 32, None),
    "squeezenet": (small("squeezenet1_1"), 32, "classifier.1"),
    "swin": (lambda: swin(SwinTransformerBlock, PatchMerging), 32, None),
    "swin v2": (lambda: swin(SwinTransformerBlockV2, PatchMergingV2), 32, None),
    "vision transformer": (lambda: models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=4), 32, None),
}


def maxvit() -> nn.Module:
    shape = {"stem_channels": 16, "partition_size": 4, "block_channels": [16, 32], "block_layers": [1, 1]}
    return models.MaxVit((32, 32), **shape, head_dim=8, stochastic_depth_prob=0.0, num_classes=4)


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """A tiny step: on two small images, batch norms of untrained networks have gradients beyond any sense."""
    return torch.optim.SGD(net.parameters(), lr=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_wraps_steps_and_finalizes(name):
    build, size, classifier = FAMILIES[name]
    model = build()
    method = dcil.DCIL(sparsity=0.5, steps=2, every=1, ramp=0.5, warmup=0.0)
    net = dcil.SparseNet(model, method, classifier=classifier)
    opt = optimizer(net)
    net.attach(opt)
    x, y = torch.randn(2, 3, size, size), torch.randint(4, (2,))
    net.loss(net(x), y).backward()
    opt.step()
    assert net.steps_done == 1 and net.sparsity == pytest.approx(0.5, abs=1e-6)
    unreached = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not [key for key in unreached if "aux" not in key]  # the loss takes the main head alone
    sparse = net.finalize()
    assert type(sparse) is type(model) and sparse.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(sparse(x), net.eval()(x))
    zeros = sum(int((sparse.get_parameter(key) == 0).sum()) for key in net.masks)
    assert zeros >= int(0.5 * sum(mask.numel() for mask in net.masks.values()))


def test_a_classifier_that_is_a_convolution_is_asked_for():
    with pytest.raises(dcil.UserError, match=r"no classifier found.*classifier='…'"):
        dcil.SparseNet(models.squeezenet1_1(), dcil.DCIL(sparsity=0.5, steps=2))


# -- segmentation ------------------------------------------------------------------------------------------------------

IGNORED = 255
HEADS = ["classifier.4", "aux_classifier.4"]


def deeplab() -> nn.Module:
    torch.manual_seed(1)
    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5, aux_loss=True)
    return without_dropout(model).double()


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout draws other numbers in two networks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def scene() -> tuple[Tensor, Tensor]:
    target = torch.randint(5, (2, 17, 17))
    target[torch.rand(target.shape) < 0.3] = IGNORED
    return torch.randn(2, 3, 17, 17, dtype=torch.double), target


def with_auxiliary(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """torchvision's reference loss for segmentation."""
    losses = {name: F.cross_entropy(logits, target, ignore_index=IGNORED) for name, logits in output.items()}
    return losses["out"] + 0.5 * losses["aux"]


def pixel_kl(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """T^2 * KL over the classes, the mean of the pixels that count."""
    p, q = (F.softmax(logits / 2, dim=1) for logits in (teacher.detach(), student))
    return 4 * (p * (p / q).log()).sum(1)[target != IGNORED].mean()


@pytest.mark.parametrize(
    ("task", "distill", "give_valid"),
    [
        (partial(F.cross_entropy, ignore_index=IGNORED), None, False),
        (nn.CrossEntropyLoss(ignore_index=IGNORED), None, False),
        (with_auxiliary, "softmax", True),
    ],
    ids=["function", "module", "with an auxiliary head"],
)
def test_segmentation_with_two_heads_and_ignored_pixels(task, distill, give_valid):
    method = dcil.DCIL(sparsity=0.7, steps=6, every=1, warmup=0.0, distill=distill)
    net = dcil.SparseNet(deeplab(), method, classifier=HEADS)
    opt = optimizer(net)
    net.attach(opt)
    for _ in range(2):
        x, y = scene()
        alone = task if task is with_auxiliary else lambda output, y: task(output["out"], y)

        def loss(pruned: nn.Module, super_net: nn.Module, x: Tensor = x, y: Tensor = y, alone: Any = alone) -> Tensor:
            p, s = pruned(x), super_net(x)
            return alone(p, y) + alone(s, y) + pixel_kl(p["out"], s["out"], y) + pixel_kl(s["out"], p["out"], y)

        expected = gradients(net, loss)
        opt.zero_grad()
        valid = y != IGNORED if give_valid else None
        net.loss(net(x), y, task=task, logits=lambda output: output["out"], valid=valid).backward()
        assert_gradients(net, expected, 1e-7)
        opt.step()
    assert net.steps_done == 2
    x, _ = scene()
    sparse = net.finalize()
    with torch.no_grad():
        assert torch.equal(sparse(x)["out"], net.eval()(x)["out"])


def test_both_heads_are_private_to_each_path():
    net = dcil.SparseNet(deeplab(), dcil.DCIL(sparsity=0.7, steps=6), classifier=HEADS)
    assert not {f"{head}.weight" for head in HEADS} & net.masks.keys()
    names = {name for name, _ in net.super.named_parameters()}
    assert {f"{head}.weight" for head in HEADS} <= names


def test_segmentation_outputs_without_logits_are_refused_with_the_way_out():
    net = dcil.SparseNet(deeplab(), dcil.DCIL(sparsity=0.7, steps=6), classifier=HEADS)
    x, y = scene()
    with pytest.raises(dcil.UserError, match=r"keys out, aux.*logits=lambda"):
        net.loss(net(x), y, task=partial(F.cross_entropy, ignore_index=IGNORED))


def test_a_small_segmentation_network_with_one_head_named_twice():
    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)
    heads = ["classifier.low_classifier", "classifier.high_classifier"]
    net = dcil.SparseNet(model, dcil.DCIL(sparsity=0.7, steps=2, every=1, ramp=0.5, warmup=0.0), classifier=heads)
    opt = optimizer(net)
    net.attach(opt)
    x, y = scene()
    task = partial(F.cross_entropy, ignore_index=IGNORED)
    net.loss(net(x.float()), y, task=task, logits=lambda output: output["out"]).backward()
    opt.step()
    assert net.steps_done == 1 and net.sparsity == pytest.approx(0.7, abs=1e-5)


# -- detection ---------------------------------------------------------------------------------------------------------


def suppress(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression in plain torch, for builds whose compiled operator does not load."""
    kept: list[int] = []
    for number in scores.argsort(descending=True, stable=True).tolist():
        others = boxes[kept] if kept else boxes[:0]
        if not (torchvision.ops.box_iou(boxes[number : number + 1], others) > threshold).any():
            kept.append(number)
    return torch.tensor(kept, dtype=torch.long)


@pytest.fixture
def _plain_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchvision's operators in plain torch, where the compiled ones do not load."""
    if not torchvision.extension._has_ops():
        monkeypatch.setattr(torchvision.ops.boxes, "nms", suppress)
        torch.compiler.set_stance("force_eager")  # torchvision's plain roi_align compiles itself, for half a minute
    yield
    torch.compiler.set_stance("default")


def retinanet() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"min_size": 64, "max_size": 64, "detections_per_img": 5, "topk_candidates": 20}
    return retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, **sizes)


def fasterrcnn() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"min_size": 64, "max_size": 64, "rpn_pre_nms_top_n_train": 8, "rpn_pre_nms_top_n_test": 8}
    sizes |= {"rpn_post_nms_top_n_train": 8, "rpn_post_nms_top_n_test": 8, "box_batch_size_per_image": 8}
    return fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3, **sizes)


def street() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    boxes = torch.tensor([[4.0, 6.0, 40.0, 50.0], [10.0, 10.0, 60.0, 30.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    return [torch.rand(3, 64, 64) for _ in range(2)], [target, target]


def total(losses: dict[str, Tensor], target: Any) -> Tensor:
    """In training a detector returns its losses."""
    return torch.stack(list(losses.values())).sum()


DETECTORS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "retinanet": (retinanet, ["head.classification_head.cls_logits", "head.regression_head.bbox_reg"]),
    "fasterrcnn": (fasterrcnn, ["roi_heads.box_predictor"]),
}


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.usefixtures("_plain_operators")
def test_detectors_train_on_their_losses_without_kl_terms(name):
    build, heads = DETECTORS[name]
    method = dcil.DCIL(sparsity=0.6, steps=4, every=1, kl=0, ramp=0.5)
    net = dcil.SparseNet(build(), method, classifier=heads)
    opt = optimizer(net)
    net.attach(opt)
    for step in range(2):
        images, targets = street()

        def loss(pruned: nn.Module, super_net: nn.Module, images: Any = images, targets: Any = targets) -> Tensor:
            torch.manual_seed(7)  # a detector samples the boxes that it learns from
            return total(pruned(images, targets), None) + total(super_net(images, targets), None)

        expected = gradients(net, loss)
        opt.zero_grad()
        torch.manual_seed(7)
        net.loss(net(images, targets), None, task=total).backward()
        assert_gradients(net, expected, 2e-3)  # single precision: boxes cannot be double everywhere
        opt.step()
        assert net.steps_done == step + 1
    assert net.sparsity == pytest.approx(0.6, abs=1e-5)
    images, _ = street()
    with torch.no_grad():
        (want, *_), (got, *_) = net.finalize()(images), net.eval()(images)
    assert want.keys() == got.keys() == {"boxes", "labels", "scores"}
    assert all(torch.equal(want[key], got[key]) for key in want)


MORE_DETECTORS = ("ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn", "maskrcnn_resnet50_fpn")


def detector(name: str) -> Build:
    return lambda: models.get_model(name, weights=None, weights_backbone=None, num_classes=3)


@pytest.mark.parametrize(
    "build",
    [retinanet, fasterrcnn, *map(detector, MORE_DETECTORS)],
    ids=["retinanet", "fasterrcnn", "ssdlite", "fcos", "maskrcnn"],
)
def test_a_detectors_box_head_is_not_taken_for_the_classifier(build):
    with pytest.raises(dcil.UserError, match="classifier"):
        dcil.SparseNet(build(), dcil.DCIL(sparsity=0.6, steps=4, kl=0))


@pytest.mark.usefixtures("_plain_operators")
def test_losses_in_place_of_logits_are_refused_with_kl_terms():
    net = dcil.SparseNet(retinanet(), dcil.DCIL(sparsity=0.6, steps=4), classifier=DETECTORS["retinanet"][1])
    images, targets = street()
    with pytest.raises(dcil.UserError, match="kl=0"):
        net.loss(net(images, targets), None, task=total)
