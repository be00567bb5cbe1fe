"""peft: adapters over pruned weights, and merging that keeps the zeros."""

from __future__ import annotations

import warnings

import peft
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

import dcil
from dcil.integrations.peft import merge
from dcil.integrations.transformers import SparseTrainer

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
BASE = ["*.base_layer.weight"]


def method(**settings):
    return dcil.DCIL(**{"sparsity": 0.5, "steps": 4, "every": 1, "warmup": 0.0, **settings})


def adapted(name, **settings):
    config = peft.LoraConfig(
        r=2, target_modules=TARGETS[name], lora_dropout=0.0, fan_in_fan_out=name == "gpt2", **settings
    )
    model = peft.get_peft_model(model_of(name), config)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:  # which are 0 at the start
            parameter.data.normal_(std=0.1)
    return model


def test_adapters_are_never_pruned_by_default():
    with pytest.raises(dcil.UserError, match=r"base_layer\.weight"):
        dcil.SparseNet(adapted("llama"), method())


@pytest.mark.parametrize("name", TARGETS)
def test_merging_keeps_the_zeros(name):
    net = dcil.SparseNet(adapted(name), method(), prunable=BASE)
    disturb_masks(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse, whole = merge(net), adapted(name).merge_and_unload()
    assert type(sparse) is type(model_of(name)) and sparse.state_dict().keys() == model_of(name).state_dict().keys()
    assert len(net.masks) == 2 * len(TARGETS[name]) + (2 if name == "gpt2" else 0)  # c_proj is in attention and MLP
    for key, mask in net.masks.items():
        plain = key.removeprefix("base_model.model.").replace(".base_layer", "")
        found = sparse.get_parameter(plain)
        assert torch.equal(found == 0, ~mask)
        torch.testing.assert_close(found[mask], whole.get_parameter(plain)[mask])
    assert any("lora_" in key for key, _ in net.model.named_parameters())  # the net itself is as it was


def disturb_masks(net):
    random = torch.Generator().manual_seed(2)
    for mask in net.masks.values():
        mask.copy_(torch.rand(mask.shape, generator=random) < 0.5)


def test_what_has_no_adapters_is_not_merged():
    with pytest.raises(dcil.UserError, match="finalize"):
        merge(dcil.SparseNet(model_of("llama"), method()))


def test_adapters_get_the_pruned_networks_gradients(tmp_path):
    watch, data = Watch(), dataset_of("llama")
    settings = {"gradient_accumulation_steps": 3, "max_steps": 1, "train_sampling_strategy": "sequential"}
    trainer = SparseTrainer(
        model=adapted("llama"), method=method(steps=1), prunable=BASE, args=arguments(tmp_path, **settings),
        train_dataset=data, callbacks=[watch],
    )  # fmt: skip
    watch.net = trainer.net
    disturb(trainer.net)
    expected = gradients(trainer.net, CASES["llama"].rows, [batch_of(data[2 * i : 2 * i + 2]) for i in range(3)])
    trainer.train()
    assert any(grad is not None and grad.any() for name, grad in watch.gradients[0].items() if "lora_" in name)
    assert_gradients(watch.gradients[0], expected)


def test_the_trainer_saves_the_merged_network_and_resumes(tmp_path):
    data = dataset_of("llama")

    def trainer(folder):
        torch.manual_seed(0)
        args = arguments(folder, max_steps=4, save_strategy="steps", save_steps=2)
        return SparseTrainer(model=adapted("llama"), method=method(), prunable=BASE, args=args, train_dataset=data)

    first = trainer(tmp_path)
    first.train()
    first.save_model(str(tmp_path / "saved"))
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = merge(first.net)
    for key, value in merged.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    zeros = sum(int((p == 0).sum()) for p in loaded.parameters())
    assert zeros == sum(int((~mask).sum()) for mask in first.net.masks.values()) > 0
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for key, value in first.net.state_dict().items():
        assert torch.equal(value, again.net.state_dict()[key]), key


def test_a_classifier_that_peft_trains_is_private(tmp_path):
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3))
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    net = dcil.SparseNet(peft.get_peft_model(model, config), method(), prunable=BASE)
    heads = [name for name, p in net.named_parameters() if name.startswith("super.") and p.requires_grad]
    assert {name.rsplit(".", 1)[1] for name in heads if "classifier" in name} == {"weight", "bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert type(merge(net)) is hf.BertForSequenceClassification


def test_prompts_which_cannot_be_merged_are_refused(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model, args = peft.get_peft_model(model_of("llama"), config), arguments(tmp_path, max_steps=1)
    with pytest.raises(dcil.UserError, match="mergeable"):
        SparseTrainer(model=model, method=method(), args=args, prunable="*_proj", train_dataset=dataset_of("llama"))
