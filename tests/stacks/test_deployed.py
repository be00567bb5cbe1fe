"""Real networks of timm, torchvision and transformers as CPU plans: all that people deploy gives what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers as hf
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision.models import segmentation

from dcil.runtime.lower import lower
from dcil_runtime import Plan
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
LENGTH = 16
LEAST = torch.finfo(torch.float32).min


def of_timm(name: str, size: int = 64, **settings: Any) -> Build:
    return lambda: (timm.create_model(name, num_classes=10, **settings), (torch.randn(2, 3, size, size),))


def of_torchvision(name: str, size: int = 64, **settings: Any) -> Build:
    make = lambda: torchvision.models.get_model(name, weights=None, num_classes=10, **settings)  # noqa: E731
    return lambda: (make(), (torch.randn(2, 3, size, size),))


def segments(make: Any, **settings: Any) -> Build:
    model = lambda: make(weights=None, weights_backbone=None, num_classes=4, **settings)  # noqa: E731
    return lambda: (model(), (torch.randn(2, 3, 65, 65),))


class Bert(nn.Module):
    """BERT-tiny; the mask of padding is given in four dimensions, because transformers looks at others' numbers."""

    def __init__(self) -> None:
        super().__init__()
        size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
        self.bert = hf.BertForSequenceClassification(hf.BertConfig(**size, vocab_size=300))

    def forward(self, words: Tensor, keep: Tensor) -> Any:
        return self.bert(input_ids=words, attention_mask=(1 - keep[:, None, None].float()) * LEAST)


class Gpt(nn.Module):
    """GPT-2 without a cache, its causal mask given."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=300, n_positions=32, bos_token_id=0)
        self.gpt = hf.GPT2LMHeadModel(config)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), LEAST).triu(1)[None, None])

    def forward(self, words: Tensor) -> Tensor:
        mask = self.mask.expand(len(words), -1, -1, -1)
        logits: Tensor = self.gpt(input_ids=words, attention_mask=mask, use_cache=False).logits
        return logits


def words() -> Tensor:
    return torch.randint(300, (2, LENGTH))


def padded() -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])).long()


#: The first ones are quick; the rest take seconds each.
QUICK: dict[str, Build] = {
    "mobilenetv3": of_timm("mobilenetv3_small_050"),
    "efficientnet": of_timm("efficientnet_b0"),
    "regnety": of_timm("regnety_002"),
    "convnext": of_timm("convnext_atto"),
    "shufflenet": of_torchvision("shufflenet_v2_x0_5"),
    "vit": of_timm("vit_tiny_patch16_224", img_size=64),
    "mixer": of_timm("mixer_s32_224", img_size=64),
    "swin": of_timm("swin_tiny_patch4_window7_224", 56, img_size=56),
    "deeplab": segments(segmentation.deeplabv3_mobilenet_v3_large, aux_loss=True),
    "bert": lambda: (Bert(), (words(), padded())),
    "gpt": lambda: (Gpt(), (words(),)),
}
SLOW: dict[str, Build] = {
    "densenet": of_torchvision("densenet121"),
    "vgg, smaller": of_torchvision("vgg11_bn", 64),
    "vgg, larger": of_torchvision("vgg11_bn", 288),
    "vgg, odd": of_torchvision("vgg11_bn", 161),
    "mobilenetv3 of torchvision": of_torchvision("mobilenet_v3_large"),
    "convnext of torchvision": of_torchvision("convnext_tiny"),
    "deit": of_timm("deit_tiny_patch16_224", img_size=64),
    "lraspp": segments(segmentation.lraspp_mobilenet_v3_large),
    "maxvit": lambda: (torchvision.models.maxvit_t(weights=None), (torch.randn(2, 3, 224, 224),)),
    "inception": of_torchvision("inception_v3", 80, init_weights=False, aux_logits=False),
    "googlenet": of_torchvision("googlenet", init_weights=False, aux_logits=False),
}


def sparse(model: nn.Module) -> nn.Module:
    """Random zeros in matrices, and nothing that is trivial: norms, biases, what starts as zero."""
    for name, parameter in model.named_parameters():
        if not parameter.any():
            parameter.normal_(0, 0.05)
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        elif "embed" not in name and "wte" not in name:
            parameter.mul_(torch.rand_like(parameter) < 0.2).mul_(5**0.5)
    for name, buffer in model.named_buffers():
        if "running_mean" in name:
            buffer.add_(torch.randn_like(buffer), alpha=0.1)
    return model.eval()


@torch.no_grad()
def check(build: Build) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    want = [y for y in tree_leaves(sparse(model)(*inputs)) if isinstance(y, Tensor)]
    plan = Plan(lower(model, inputs), tune_seconds=0, max_work=None)
    found = plan(*(x.numpy() for x in inputs))
    for got, y in zip(found if isinstance(found, tuple) else (found,), want, strict=True):
        assert got.shape == tuple(y.shape)
        assert np.abs(got - y.numpy()).max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize("name", QUICK)
def test_deployed_networks(name):
    check(QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_deployed_networks(name):
    check(SLOW[name])
