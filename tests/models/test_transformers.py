"""The transformers are the published ones: parameter counts, initialisation, causality; and every export takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dcil
from dcil import models
from dcil.errors import UserError
from dcil.export import export
from dcil.tracing import trace

SMALL = {"gpt-2-32": (12,), "gpt-2-32-untied": (12,), "vit-2-32-4": (3, 16, 16), "vit-1-64-2": (1, 8, 8)}
CLASSES = 11
EVERY = pytest.mark.parametrize(("name", "shape"), SMALL.items(), ids=list(SMALL))


def small(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return models.build_for(name, CLASSES, SMALL[name], dropout)


# timm's vit_*_patch16_224 (B and L also torchvision's), and OpenAI's four GPT-2: 50,257 tokens, 1024 positions.
@pytest.mark.parametrize(
    ("name", "classes", "size", "parameters"),
    [
        ("vit-ti-16", 1000, None, 5_717_416),
        ("vit-s-16", 1000, None, 22_050_664),
        ("vit-b-16", 1000, 224, 86_567_656),
        ("vit-l-16", 1000, 224, 304_326_632),
        ("gpt-12-768", 50257, 1024, 124_439_808),
        ("gpt-24-1024", 50257, 1024, 354_823_168),
        ("gpt-36-1280", 50257, 1024, 774_030_080),
        ("gpt-48-1600", 50257, 1024, 1_557_611_200),
    ],
)
def test_published_parameter_counts(name, classes, size, parameters):
    with torch.device("meta"):
        model = models.build(name, classes, size=size)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_counts_by_formula():
    """12 L W^2 + 13 L W in the blocks, whatever the family; then embeddings, the last norm and the head."""
    with torch.device("meta"):
        found = {name: models.build(name, 65, size=size) for name, size in (("gpt-6-384", 256), ("vit-6-128-4", 32))}
    blocks = {name: sum(p.numel() for p in model.blocks.parameters()) for name, model in found.items()}
    assert blocks == {f"{k}": 12 * 6 * w**2 + 13 * 6 * w for k, w in (("gpt-6-384", 384), ("vit-6-128-4", 128))}
    rest = {name: sum(p.numel() for p in model.parameters()) - blocks[name] for name, model in found.items()}
    assert rest["gpt-6-384"] == (65 + 256) * 384 + 2 * 384
    assert rest["vit-6-128-4"] == 128 * (3 * 16 + 1) + 128 + 65 * 128 + 2 * 128 + 65 * 128 + 65


@EVERY
def test_shapes_gradients_and_the_order_of_modules(name, shape):
    model = small(name)
    leaves = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.LayerNorm, nn.Linear))]
    ran: list[nn.Module] = []
    for leaf in leaves:
        leaf.register_forward_hook(lambda module, *_: ran.append(module))
    out = model(models.example(shape, CLASSES, 3))
    assert out.shape == (3, *(shape if len(shape) == 1 else ()), CLASSES)
    assert ran == leaves and leaves[-1] is model.head
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt-2-32", "gpt-2-32-untied"])
def test_no_position_sees_what_follows_it(name):
    model, tokens = small(name).eval(), models.example((12,), CLASSES, 2)
    before = model(tokens)
    tokens[:, 8:] = (tokens[:, 8:] + 1) % CLASSES
    after = model(tokens)
    torch.testing.assert_close(after[:, :8], before[:, :8])
    assert not torch.allclose(after[:, 8:], before[:, 8:])
    torch.testing.assert_close(model(tokens[:, :5]), after[:, :5])  # shorter sequences take the first positions


def test_a_vision_transformer_sees_every_patch_and_where_it_is():
    model, images = small("vit-2-32-4").eval(), torch.randn(2, 3, 16, 16)
    plain = model(images)
    for shift in ((4, 0), (0, 4)):  # whole patches, exchanged
        assert not torch.allclose(model(images.roll(shift, (2, 3))), plain)
    with torch.no_grad():
        model.pos_embed.zero_()
    torch.testing.assert_close(model(images.roll((4, 8), (2, 3))), model(images))


def test_a_tied_head_is_the_embedding():
    tied, own = small("gpt-2-32"), small("gpt-2-32-untied")
    assert tied.head.weight is tied.wte.weight and own.head.weight is not own.wte.weight
    assert own.head.weight.shape == own.wte.weight.shape
    assert "head.weight" in tied.no_weight_decay() and "head.weight" not in own.no_weight_decay()


def test_initialisation_of_gpt():
    torch.manual_seed(0)
    model = models.build("gpt-8-256", 512, size=128)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            deviation = 0.02 / 4 if name.endswith(("attn.proj.weight", "mlp.fc2.weight")) else 0.02
            assert weight.std().item() == pytest.approx(deviation, rel=0.03), name
        else:
            assert (weight == (1 if "norm" in name and name.endswith("weight") else 0)).all(), name


def test_initialisation_of_vit():
    torch.manual_seed(0)
    model = models.build("vit-2-256-4", 100)
    for name, weight in model.named_parameters():
        if name == "pos_embed" or (weight.dim() == 2):
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert weight.abs().max() <= 2.0
        elif name.endswith("bias") and not name.startswith("patch"):
            assert (weight == 0).all(), name
    assert 0 < model.cls_token.abs().max() < 1e-5


def test_dropout_is_in_training_only():
    for name, shape in SMALL.items():
        model, x = small(name, dropout=0.5), models.example(shape, CLASSES, 2)
        assert not torch.equal(model(x), model(x))
        assert torch.equal(model.eval()(x), model(x))
        assert torch.equal(small(name).train()(x), small(name).eval()(x))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-0-64", "layers must be from 1"),
        ("gpt-2000-64", "layers must be from 1"),
        ("gpt-2-31", "width must be a multiple of 64"),
        ("gpt-2-160", "width must be a multiple of 64"),
        ("gpt-100-8192", "at most 2,000,000,000 weights"),
        ("vit-2-64-5", "multiple of the patch size"),
        ("vit-2-64-0", "multiple of the patch size"),
        ("vit-xs-16", "unknown model 'vit-xs-16': did you mean 'vit-s-16'"),
        ("gpt-6", "unknown model"),
    ],
)
def test_impossible_networks(name, message):
    with pytest.raises(UserError, match=message) as caught, torch.device("meta"):
        models.build(name)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_what_does_not_fit_the_data():
    with pytest.raises(UserError, match="gpt-2-32 must be trained on tokens, got images"):
        models.build_for("gpt-2-32", 10, (3, 32, 32))
    with pytest.raises(UserError, match="resnet20 must be trained on images, got tokens"):
        models.build_for("resnet20", 10, (64,))
    with pytest.raises(UserError, match="must be square"):
        models.build_for("vit-2-32-4", 10, (3, 16, 32))
    with pytest.raises(UserError, match="has no dropout"):
        models.build("resnet20", dropout=0.1)
    with pytest.raises(UserError, match="at most 12 tokens, got 13"):
        small("gpt-2-32")(models.example((13,), CLASSES))
    with pytest.raises(UserError, match="size must be a whole number"):
        models.build("gpt-2-32", size=0)


# -- what the rest of the package makes of them ------------------------------------------------------------------------


@EVERY
def test_both_paths_train_and_the_roles_are_those_of_the_documents(name, shape):
    net = dcil.SparseNet(small(name), dcil.DCIL(sparsity=0.5, steps=4, warmup=0.0))
    assert set(net.masks) == {n for n, p in net.model.named_parameters() if p.dim() > 1 and "blocks" in n} | (
        {"patch_embed.proj.weight"} if len(shape) == 3 else set()
    )
    private = {entry.name for entry in net.summary().entries if entry.role == "private"}
    assert all("norm" in n or n.startswith("head") or (name == "gpt-2-32" and n == "wte.weight") for n in private)
    x = models.example(shape, CLASSES, 2)
    outputs = net(x)
    net.loss(outputs, outputs["pruned"].argmax(-1)).backward()
    assert all(p.grad is not None for p in net.parameters())


@EVERY
def test_traces_for_every_batch_size(name, shape):
    model = small(name).eval()
    traced = trace(model, models.example(shape, CLASSES, 2), training=False)
    for batch in (1, 3):
        x = models.example(shape, CLASSES, batch)
        torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("to", ["safetensors", "sparse", "compact", "onnx"])
@pytest.mark.parametrize("name", ["gpt-2-32", "vit-2-32-4"])
def test_exports(name, to, tmp_path: Path):
    model = small(name).eval()
    with torch.no_grad():
        for weight in model.blocks.parameters():
            weight.mul_(torch.rand_like(weight) > 0.8)
    written = export(model, to, tmp_path / "file", example=models.example(SMALL[name], CLASSES, 2))
    assert written.error is not None and written.error < 1e-5
