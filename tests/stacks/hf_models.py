"""Tiny random Hugging Face models with data for them, and what DCIL must do to them: two independent plain networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision_operators  # noqa: F401
import transformers as hf
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

import dcil
from dcil.integrations.accelerate import SparseModel

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT = {**SIZE, "vocab_size": 40, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
BERT["attention_probs_dropout_prob"] = 0.0
LLAMA = {**SIZE, "vocab_size": 40, "num_key_value_heads": 1, "max_position_embeddings": 16, "head_dim": 8}
LENGTH, CLASSES = 8, 3

Rows = Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor]]


# -- which rows of the logits meet which targets, written out by hand --------------------------------------------------


def aligned(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Position t predicts label t."""
    keep = batch["labels"].reshape(-1) != -100
    return output.logits.reshape(-1, output.logits.shape[-1])[keep], batch["labels"].reshape(-1)[keep]


def shifted(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Position t predicts label t + 1."""
    rows = [(output.logits[b, t], y[t + 1]) for b, y in enumerate(batch["labels"]) for t in range(len(y) - 1)]
    rows = [(logits, label) for logits, label in rows if label != -100]
    return torch.stack([r for r, _ in rows]), torch.stack([y for _, y in rows])


def spans(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = torch.cat([output.start_logits, output.end_logits])
    return logits, torch.cat([batch["start_positions"], batch["end_positions"]])


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    rows: Rows
    data: Callable[[torch.Generator], dict[str, Tensor]]


def draw(high: int, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=random)


def tokens(random: torch.Generator, labels: Callable[[Tensor, torch.Generator], Tensor]) -> dict[str, Tensor]:
    ids = draw(38, (LENGTH,), random) + 2
    length = int(draw(LENGTH - 3, (), random)) + 4  # what follows is padding
    mask = (torch.arange(LENGTH) < length).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels(torch.where(mask.bool(), ids, -100), random)}


def lm(random: torch.Generator) -> dict[str, Tensor]:
    return tokens(random, lambda ids, _: ids)


def masked(random: torch.Generator) -> dict[str, Tensor]:
    return tokens(random, lambda ids, r: torch.where(torch.rand(LENGTH, generator=r) < 0.6, ids, -100))


def tagged(random: torch.Generator) -> dict[str, Tensor]:
    return tokens(random, lambda ids, r: torch.where(ids < 0, ids, draw(CLASSES, (LENGTH,), r)))


def classified(random: torch.Generator) -> dict[str, Tensor]:
    return tokens(random, lambda _, r: draw(CLASSES, (), r))


def answered(random: torch.Generator) -> dict[str, Tensor]:
    ends = {name: draw(LENGTH, (), random) for name in ("start_positions", "end_positions")}
    return {"input_ids": draw(40, (LENGTH,), random), **ends}


def seen(random: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 8, 8, generator=random), "labels": draw(CLASSES, (), random)}


def translated(random: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": draw(38, (LENGTH,), random) + 2, "labels": lm(random)["labels"]}


def bert(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, f"BertFor{kind}")(hf.BertConfig(**BERT, **settings))


def vit() -> nn.Module:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZE, **quiet, image_size=8, patch_size=4, num_labels=CLASSES))


def t5() -> nn.Module:
    size = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    return hf.T5ForConditionalGeneration(hf.T5Config(**size, dropout_rate=0.0, decoder_start_token_id=0))


def gpt2() -> nn.Module:
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bart_decoder() -> nn.Module:
    """A causal language model whose loss does not shift the labels."""
    size = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "vocab_size": 40}
    return hf.BartForCausalLM(hf.BartConfig(**size, max_position_embeddings=16, dropout=0.0))


def albert() -> nn.Module:
    """All layers are one."""
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**BERT, embedding_size=8))


def convnext() -> nn.Module:
    """Convolutions; its class says that it does not take the number of items."""
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, num_labels=CLASSES)
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, **experts))


CASES = {
    "bert-classification": Case(bert("SequenceClassification", num_labels=CLASSES), aligned, classified),
    "bert-tokens": Case(bert("TokenClassification", num_labels=CLASSES), aligned, tagged),
    "bert-masked-lm": Case(bert("MaskedLM"), aligned, masked),
    "bert-questions": Case(bert("QuestionAnswering"), spans, answered),
    "vit": Case(vit, aligned, seen),
    "llama": Case(llama, shifted, lm),
    "gpt2": Case(gpt2, shifted, lm),
    "albert": Case(albert, aligned, masked),
    "convnext": Case(convnext, aligned, seen),
    "bart-decoder": Case(bart_decoder, aligned, lm),
    "t5": Case(t5, aligned, translated),
    "mixtral": Case(mixtral, shifted, lm),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = CASES[name].make()
    for parameter in model.parameters():  # the usual 0.02 makes all logits nearly equal
        parameter.data += 0.15 * torch.randn_like(parameter)
    return model


def dataset_of(name: str, size: int = 12) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [CASES[name].data(random) for _ in range(size)]


def batch_of(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def disturb(net: dcil.SparseNet) -> None:
    """Prune half of the weights at random, and let the super path's private layers differ from the pruned path's."""
    random = torch.Generator().manual_seed(2)
    for mask in net.masks.values():
        mask.copy_(torch.rand(mask.shape, generator=random) < 0.5)
    for parameter in net.get_submodule("super").parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)


# -- the reference -----------------------------------------------------------------------------------------------------


def two_networks(net: dcil.SparseNet) -> tuple[nn.Module, nn.Module]:
    """The pruned and the super network, each a plain model of its own."""
    model = copy.deepcopy(net.model)
    model._load_state_dict_post_hooks.clear()
    pruned, whole = model, copy.deepcopy(model)
    with torch.no_grad():
        for name, mask in net.masks.items():
            pruned.get_parameter(name).mul_(mask)
        for name, parameter in net.get_submodule("super").named_parameters():
            whole.get_parameter(name).copy_(parameter)
    return pruned.train(), whole.train()


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student), summed over the rows."""
    p, q = (teacher.detach() / temperature).softmax(-1), (student / temperature).softmax(-1)
    return temperature**2 * (p * (p / q).log()).sum()


def gradients(net: dcil.SparseNet, rows: Rows, batches: list[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """What must be in the gradients of ``net`` after these batches of one optimizer step."""
    pruned, whole = two_networks(net)
    method: dcil.DCIL = net.method
    inputs = [{k: v for k, v in batch.items() if "positions" not in k} for batch in batches]
    found = [(rows(pruned(**x), y), rows(whole(**x), y)) for x, y in zip(inputs, batches, strict=True)]
    total = sum(len(target) for (_, target), _ in found)
    loss = torch.zeros(())
    for (p, target), (s, _) in found:
        loss = loss + F.cross_entropy(p, target, reduction="sum") + F.cross_entropy(s, target, reduction="sum")
        kl = divergence(p, s, method.temperature) + divergence(s, p, method.temperature)
        loss = loss + method.kl_at(net.steps_done) * kl
    (loss / total).backward()
    expected: dict[str, Tensor | None] = {}
    for name, _ in net.named_parameters():
        path, _, plain = name.partition(".")
        expected[name] = (whole if path == "super" else pruned).get_parameter(plain).grad
        if path == "model" and plain in net.masks:
            one, other = (network.get_parameter(plain).grad for network in (pruned, whole))
            expected[name] = None if one is None else torch.where(net.masks[plain], one, other)
    return expected


def assert_gradients(
    got: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-5
) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        found = torch.zeros_like(wanted) if got[name] is None and wanted is not None else got[name]
        if wanted is None:
            assert found is None or not found.any(), name
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def grads_of(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


class Watch(TrainerCallback):
    """Keeps the gradients and the masks of every optimizer step."""

    def __init__(self) -> None:
        self.net: SparseModel | None = None
        self.gradients: list[dict[str, Tensor | None]] = []
        self.sparsity: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.gradients.append(grads_of(self.net))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.sparsity.append(self.net.sparsity)


def arguments(folder: Any, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "seed": 0}
    fixed = {
        "per_device_train_batch_size": 2,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**quiet, **fixed, **settings})
