"""What is prunable, private, left dense by default, and what is said about it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from dcil import DCIL, DPF, NM, Filter, SparseNet, UserError

METHOD = DCIL(sparsity=0.5, steps=9)


class Conv1D(nn.Module):
    """GPT-2's linear layer, which stores (in, out)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 16)), nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x):
        return torch.relu(x @ self.up.mean(0)) @ self.down.mean(0)


class Attention(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True, **settings), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class Odd(nn.Module):
    """A matrix in a module that nobody knows."""

    def __init__(self, size=8):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(size, 8))
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x) + x @ self.matrix.T @ self.matrix)


def names(model, **settings):
    return list(SparseNet(model, METHOD, **settings).masks)


def test_packed_attention():
    assert names(Attention()) == ["attention.in_proj_weight", "attention.out_proj.weight"]
    separate = Attention(kdim=8, vdim=8)
    separate.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
    assert names(separate) == [*(f"attention.{x}_proj_weight" for x in "qkv"), "attention.out_proj.weight"]


def test_the_whole_of_a_transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4))
    net = SparseNet(model, METHOD)
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith("1.")}
    assert set(net.masks) == matrices


def test_stored_the_other_way_round():
    model = nn.Sequential(Conv1D(8, 6), nn.ReLU(), nn.Linear(6, 4))
    net = SparseNet(model, DPF(sparsity=0.5, steps=9, granularity=Filter()))
    net.model[0].weight.data[:, :3] *= 1e-3  # three outputs: columns
    net._steps_done = 8
    net.update_masks()
    assert net.masks["0.weight"][:, 3:].all()
    assert not net.masks["0.weight"][:, :3].any()


def test_stacked_experts():
    model = nn.Sequential()
    model.add_module("experts", Experts())
    model.add_module("head", nn.Linear(8, 4))
    assert names(model) == ["experts.up", "experts.down"]
    for granularity in (Filter(), NM(2, 4)):  # nobody knows which dimension holds the filters
        with pytest.raises(UserError, match="fits no layer"):
            SparseNet(model, DPF(sparsity=0.5, steps=9, granularity=granularity))


def test_summary_has_every_parameter_once_with_its_share():
    model = Attention()
    found = SparseNet(model, METHOD).summary()
    assert sum(entry.size for entry in found.entries) == sum(p.numel() for p in model.parameters())
    assert found.share("prunable") == 256 / sum(p.numel() for p in model.parameters())
    assert not found.doubts
    text = str(found)
    assert "attention.in_proj_weight (24x8)" in text
    assert "private" in text
    roles = {entry.name: entry.role for entry in found.entries}
    assert roles["head.weight"] == "private"
    assert roles["attention.in_proj_bias"] == "dense"


def test_much_left_dense_is_announced_when_wrapping():
    with pytest.warns(UserWarning, match=r"57 % of the weights stay dense .*matrix.*prunable="):
        SparseNet(Odd(16), METHOD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparseNet(Odd(16), METHOD, prunable=["matrix", "body.*"])
        SparseNet(Odd(16), METHOD, prunable=["body.*"])  # the user's own choice
        embedded = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        assert "embedding" in str(SparseNet(embedded, METHOD).summary())


class Heads(nn.Module):
    def __init__(self, last=3):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, last)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return {"a": self.a(hidden), "b": self.b(hidden)}


def test_two_heads_are_not_guessed():
    with pytest.raises(UserError, match=r"several heads: classifier=\['a', 'b'\]"):
        SparseNet(Heads(), METHOD)
    net = SparseNet(Heads(), METHOD, classifier=["a", "b"])
    assert list(net.masks) == ["body.weight"]
    assert dict(net.super.named_parameters()).keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    net.loss(net(x), y, logits=lambda out: out["b"]).backward()
    with pytest.raises(UserError, match="'c'"):
        SparseNet(Heads(), METHOD, classifier=["a", "c"])


def test_adapters_are_not_pruned():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A, self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)}), nn.ModuleDict()
            self.base_layer.weight.requires_grad_(False)

        def forward(self, x):
            return self.base_layer(x) + self.lora_A["default"](x).sum(-1, keepdim=True)

    model = nn.Sequential(Adapted(), nn.Linear(8, 4))
    with pytest.raises(UserError, match=r"LoRA.*base_layer.*merge"):
        SparseNet(model, METHOD)
    net = SparseNet(model, DPF(sparsity=0.5, steps=4, every=1, ramp=0.5), prunable=["*.base_layer.weight"])
    for _ in range(4):
        net.step()
    assert net.sparsity == 0.5  # frozen from the start, and asked for by name


# -- one tensor, several names ---------------------------------------------------------------------------------------


class Aliased(nn.Module):
    """Registers a block and a norm a second time; the second names are used as well."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.again = self.block
        self.norm = nn.BatchNorm1d(8)
        self.tail = nn.Sequential(self.norm, nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.tail(self.again(self.block(self.stem(x)))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.mid(self.embed(x))))


def check_against_plain_networks(net, x, y, task):
    """Outputs and gradients of both paths, without the KL terms."""
    for mask in net.masks.values():
        mask.copy_(torch.rand(mask.shape) < 0.5)
    pruned, whole = copy.deepcopy(net.model), copy.deepcopy(net.model)
    with torch.no_grad():
        for name, mask in net.masks.items():
            pruned.get_parameter(name).mul_(mask)
        for name, own in net.get_submodule("super").named_parameters():
            whole.get_parameter(name).copy_(own)
    before = dict(net.named_parameters())
    for _ in range(2):
        outputs = net(x)
    assert all(p is before[name] for name, p in net.named_parameters())
    for module in (pruned, whole):
        for _ in range(2):
            last = module(x)
        task(last, y).backward()
        torch.testing.assert_close(outputs["pruned" if module is pruned else "super"], last)
    net.loss(outputs, y, task).backward()
    for name, p in net.model.named_parameters():
        one, two = pruned.get_parameter(name).grad, whole.get_parameter(name).grad
        torch.testing.assert_close(p.grad, torch.where(net.masks[name], one, two) if name in net.masks else one)
    for name, p in net.get_submodule("super").named_parameters():
        torch.testing.assert_close(p.grad, whole.get_parameter(name).grad)
    torch.testing.assert_close(dict(net.model.named_buffers()), dict(pruned.named_buffers()))


def test_modules_with_two_names():
    torch.manual_seed(0)
    net = SparseNet(Aliased(), DCIL(sparsity=0.5, steps=8, kl=0.0))
    assert list(net.masks) == ["stem.weight", "block.0.weight"]
    check_against_plain_networks(net, torch.randn(6, 4), torch.randint(3, (6,)), nn.functional.cross_entropy)


@pytest.mark.parametrize(
    "choice",
    [{}, {"prunable": ["mid", "embed"]}, {"prunable": ["mid", "head"]}, {"private": ["norm", "embed"]},
     {"private": "norm"}],
)  # fmt: skip
def test_an_embedding_that_is_also_the_head(choice):
    torch.manual_seed(0)
    net = SparseNet(Tied(), DCIL(sparsity=0.5, steps=8, kl=0.0), **choice)
    x, y = torch.randint(11, (2, 11, 5))

    def task(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    check_against_plain_networks(net, x, y, task)


def test_names_that_dcil_uses_too():
    model = nn.ModuleDict({"put": nn.Linear(4, 8), "super": nn.LayerNorm(8), "a/b": nn.Linear(8, 8)})
    model["head"] = nn.Linear(8, 3)
    net = SparseNet(model, DCIL(sparsity=0.5, steps=8))
    other = SparseNet(copy.deepcopy(model), DCIL(sparsity=0.5, steps=8))
    net.masks["a/b.weight"][0] = False
    other.load_state_dict(net.state_dict())
    assert not other.masks["a/b.weight"][0].any()


@pytest.mark.parametrize("wrong", [{"prunable": 3}, {"private": [3]}, {"classifier": 3}])
def test_choices_of_a_wrong_type(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))} must be a name"):
        SparseNet(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), METHOD, **wrong)
