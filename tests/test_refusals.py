"""Wrong arguments and models that cannot be right: one line each, where it happens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import dcil
from dcil import DCIL, DPF, SM, Filter, RigL, SparseNet, UserError

X, Y = torch.randn(8, 6), torch.randint(0, 3, (8,))


class Model(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.a, self.norm, self.b, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)
        if head is not None:
            self.head = head

    def forward(self, x):
        return self.head(F.relu(self.b(self.norm(self.a(x)))))


def method(**settings):
    return DCIL(**{"sparsity": 0.5, "steps": 8, "every": 1, "warmup": 0.0, **settings})


def make(model=None, **choices):
    return SparseNet(model or Model(), method(), **choices)


def train(net, steps=2, **arguments):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        opt.zero_grad()
        net.loss(net(X), arguments.get("target", Y), **{k: v for k, v in arguments.items() if k != "target"}).backward()
        opt.step()
        net.step(opt)
    return net


def refused(match, call, *args, **kwargs):
    with pytest.raises(UserError, match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)


# -- what is wrapped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, "resnet", [], nn.Linear, torch.zeros(2, 2)])
def test_what_is_no_model(wrong):
    refused("the model must be an nn.Module, got", SparseNet, wrong, method())


@pytest.mark.parametrize("wrong", [None, "dcil", DCIL, {}, 0.9])
def test_what_is_no_method(wrong):
    refused(r"method must be a dcil\.Method such as .*, got", SparseNet, Model(), wrong)


def wrapped():
    return {
        "got a SparseNet": make(),
        "SparseNet in it": nn.Sequential(make(), nn.Linear(3, 3)),
        "got a SparseNet in it": dcil.EMA(make()),
        "got DataParallel in '0'": nn.Sequential(nn.DataParallel(nn.Linear(6, 8)), nn.Linear(8, 3)),
        "got TorchScript in '0'": nn.Sequential(torch.jit.script(nn.Linear(6, 8)), nn.Linear(8, 3)),
        "got TorchScript": torch.jit.trace(Model(), X),
        "whole or on the meta device": Model(nn.Linear(8, 3, device="meta")),
    }


@pytest.mark.parametrize("match", list(wrapped()))
def test_models_that_are_not_plain(match):
    refused(match, SparseNet, wrapped()[match], method())


def test_inference_mode():
    with torch.inference_mode():
        model = Model()
        refused("outside of torch.inference_mode", make)
    refused("outside of torch.inference_mode", make, model)


# -- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["prunable", "private", "classifier"])
@pytest.mark.parametrize("wrong", [3, [1], {"b"}, "nothing*", "", nn.Linear, nn.Linear(2, 2), b"b"])
def test_choices_that_choose_nothing(what, wrong):
    refused(f"{what}(=| must be)", make, **{what: wrong})


@pytest.mark.parametrize("what", ["prunable", "private"])
@pytest.mark.parametrize(
    "wrong", [lambda name, module: 1 / 0, lambda name: True, lambda n, m: None, lambda n, m: "yes"]
)
def test_predicates_that_do_not_decide(what, wrong):
    refused(rf"{what} must be a name pattern, .* or a function \(name, module\) -> bool, got", make, **{what: wrong})


def complex_layer():
    return nn.Sequential(nn.Linear(6, 8, dtype=torch.cfloat), nn.Linear(8, 3))


def other_weight(weight):
    model = Model()
    model.b.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return model


@pytest.mark.parametrize(
    "model",
    [
        complex_layer(),
        other_weight(torch.ones(8, 8, dtype=torch.int8)),
        other_weight(torch.ones(8, 8).to(torch.float8_e4m3fn)),
        other_weight(torch.eye(8).to_sparse()),
    ],
    ids=["complex", "integer", "float8", "sparse"],
)
def test_weights_of_other_numbers(model):
    refused("must be dense tensors of real floats", make, model, prunable="*")


def test_a_net_made_complex_later():
    net = make().to(torch.cfloat)
    refused("must be a real parameter", net, X)


def test_complex_parameters_elsewhere_are_averaged():
    model = Model()
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    net = make(model)
    average = dcil.EMA(net, decay=0.5)
    with torch.no_grad():
        model.scale.fill_(3j)
    average.update()
    assert average.net.model.scale[0] == 0.5 + 1.5j


@pytest.mark.parametrize("name", list(dcil.METHODS))
def test_empty_layers_have_nothing_to_prune(name):
    model = Model()
    model.none, model.input = nn.Linear(5, 0), nn.Linear(0, 4)
    kind = dcil.METHODS[name]
    settings = {"inner": False} if name == "l1filter" else {}
    made = kind(sparsity=0.5 if kind.prunes else 0.0, steps=4, every=1, **settings)
    net = train(SparseNet(model, made, classifier="head"), steps=3)
    assert not {"none.weight", "input.weight"} & set(net.masks)
    assert 0 <= net.sparsity < 1
    refused("nothing to prune", SparseNet, model, made, prunable=["none", "input"])


@pytest.mark.parametrize("computed", [weight_norm, parametrizations.weight_norm, lambda m: prune.identity(m, "weight")])
def test_computed_weights(computed):
    model = Model()
    computed(model.b)
    refused("weight is computed", make, model)
    refused("from which that is computed", make, model, prunable="*")
    assert list(make(model, prunable="a").masks) == ["a.weight"]


@pytest.mark.parametrize("computed", [weight_norm, lambda m: prune.identity(m, "weight")])
def test_a_classifier_that_is_computed_is_private(computed):
    model = Model()
    computed(model.head)
    train(make(model))


def tied():
    model = Model(nn.Linear(8, 8))
    model.head.weight = model.b.weight
    return model


@pytest.mark.parametrize("name", ["b", "b.weight", "head", "head.weight"])
def test_a_tied_classifier_under_any_of_its_names(name):
    refused("as both", make, tied(), prunable=name, private=["norm", "head"])
    refused("filters of the classifier", SparseNet, tied(), method(granularity=Filter()), prunable=name)
    net = train(make(tied(), prunable=name))
    assert list(net.masks) == ["b.weight"]
    final = net.finalize()
    assert final.head.weight is final.b.weight
    torch.testing.assert_close(net.eval()(X), final(X))


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, "y", 3, Y.tolist(), Y[:3], Y + 5, Y[:, None, None]])
@pytest.mark.parametrize("kind", [DCIL, DPF])
def test_targets_that_do_not_fit(kind, target):
    net = SparseNet(Model(), kind(sparsity=0.5, steps=8))
    refused("cross_entropy must get logits and a target that fit, got torch.float32", train, net, target=target)


@pytest.mark.parametrize("task", [nn.CrossEntropyLoss, "mse", 3, lambda output: output.sum()])
def test_tasks_that_cannot_be_called(task):
    refused("task must be a function", train, SparseNet(Model(), DPF(sparsity=0.5, steps=8)), task=task)


@pytest.mark.parametrize("logits", ["", [], {}, 3, "logits", lambda: 1])
def test_logits_that_cannot_be_called(logits):
    refused("logits must be a function", train, make(), logits=logits)


@pytest.mark.parametrize("distill", [lambda student: student, lambda s, t: s, lambda s, t: 1.0, nn.MSELoss])
def test_distances_that_are_none(distill):
    refused("distill must", train, SparseNet(Model(), method(distill=distill)))


def test_mistakes_inside_a_users_function_stay_theirs():
    with pytest.raises(TypeError, match="len"):
        train(SparseNet(Model(), DPF(sparsity=0.5, steps=8)), task=lambda output, target: len(3))


@pytest.mark.parametrize("wrong", [3, "sgd", [], object(), torch.optim.SGD])
def test_what_is_no_optimizer(wrong):
    sparse_momentum = SparseNet(Model(), SM(sparsity=0.5, steps=8))
    for call in (make().attach, make().step, make().update_masks, sparse_momentum.update_masks):
        refused("the optimizer must be a torch.optim.Optimizer, got", call, wrong)


@pytest.mark.parametrize("kind", [SM, RigL])
def test_gradients_zeroed_before_the_step(kind):
    net = SparseNet(Model(), kind(sparsity=0.5, steps=4, every=1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net.loss(net(X), Y).backward()
    opt.step()
    opt.zero_grad()
    refused(r"before zero_grad\(\)", net.step, opt)


@pytest.mark.parametrize(
    "made",
    [
        SM(sparsity=0.5, steps=4, every=1),
        RigL(sparsity=0.5, steps=4, every=1),
        *(
            dcil.GMP(sparsity=0.5, steps=4, every=1, criterion=criterion)
            for criterion in (dcil.Gradient(), dcil.Taylor(), dcil.OBD(), dcil.OBS())
        ),
    ],
    ids=lambda made: f"{type(made).__name__}-{type(made.criterion).__name__}",
)
def test_gradients_set_to_zero_before_the_step(made):
    net = SparseNet(Model(), made)
    masks = {name: mask.clone() for name, mask in net.masks.items()}
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net.loss(net(X), Y).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    refused(r"must not be zero in every layer, .* before zero_grad\(\)", net.step, opt)
    assert all(torch.equal(mask, masks[name]) for name, mask in net.masks.items())


def test_a_network_that_nothing_passes_any_more_is_trained_on():
    net = SparseNet(Model(), SM(sparsity=0.5, steps=4, every=1, classifier=False))
    with torch.no_grad():
        net.model.b.bias.fill_(-1e9)  # no gradient passes the ReLU, but the classifier's bias has one
    assert train(net).steps_done == 2


@pytest.mark.parametrize("wrong", [None, print, 3, dcil.MaskObserver])
def test_what_is_no_observer(wrong):
    refused("an observer must have before_update", make().add_observer, wrong)


@pytest.mark.parametrize("wrong", [None, 3, [], "Pruned"])
def test_paths_that_are_not_there(wrong):
    refused("unknown path", make().path, wrong, X)


@pytest.mark.parametrize("setting", [{"decay": "0.9"}, {"decay": torch.zeros(3)}, {"warmup": 5}, {"warmup": "no"}])
def test_settings_of_averages(setting):
    refused("EMA: ", dcil.EMA, make(), **setting)


def replace_norm(model):
    model.norm = nn.BatchNorm1d(8)


def remove_norm(model):
    del model.norm


def add_layer(model):
    model.more = nn.Linear(3, 3)


def widen_head(model):
    model.head = nn.Linear(8, 5)


@pytest.mark.parametrize("change", [replace_norm, remove_norm, add_layer, widen_head])
def test_layers_exchanged_after_wrapping(change):
    net = make()
    change(net.model)
    refused("the model must keep the layers that it was wrapped with, got another", net, X)


def remove_bias(model):
    model.b.bias = None


@pytest.mark.parametrize(
    "change",
    [
        replace_norm,
        remove_norm,
        add_layer,
        widen_head,
        remove_bias,
        lambda model: parametrizations.weight_norm(model.b),
        lambda model: parametrizations.spectral_norm(model.head),
        lambda model: weight_norm(model.a),
        lambda model: prune.random_unstructured(model.b, "weight", amount=0.5),
        lambda model: setattr(model, "norm", nn.Identity()),
    ],
)
def test_layers_exchanged_between_two_steps(change):
    net = train(make())
    change(net.model)
    refused("must keep the layers that it was wrapped with|must be a real parameter", net, X)


@pytest.mark.parametrize("attached", [False, True])
def test_weights_that_the_optimizer_does_not_have(attached):
    net = make()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    step = (lambda opt: None) if attached else net.step
    if attached:
        net.attach(opt)
    for number in range(2):
        net.loss(net(X), Y).backward()
        if number:
            net.model.b.weight = nn.Parameter(torch.randn(8, 8))
            refused(r"must hold every parameter .* it lacks 1 \(model.b.weight\)", lambda: (opt.step(), step(opt)))
        else:
            opt.step()
            step(opt)


@pytest.mark.parametrize("wrong", ["x", None, 1.5, [], torch.ones(3)])
def test_arguments_of_other_types(wrong):
    refused("net.train must get True or False", make().train, wrong)
    refused("the other net must be a SparseNet", make().take_position, wrong)
    for curve in (method().sparsity_at, method().due, dcil.Cubic(final=0.5, steps=8)):
        refused("the step must be a number", curve, [wrong])


def test_masks_of_another_type():
    net = make()
    refused("the masks must be bool", net.type(torch.float), X)


# -- state dicts -----------------------------------------------------------------------------------------------------


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("wrong", [None, 3, [], {1: 2}, "x", Model()])
def test_what_is_no_state_dict(wrong):
    refused("must be a mapping from names to tensors", make().load_model, wrong)
    refused("must be a mapping from names to tensors", make().load_state_dict, wrong)


def test_state_dicts_that_do_not_fit():
    net = make()
    state = net.state_dict()
    wider = Model(nn.Linear(8, 4))
    refused("must fit the model .* size mismatch", net.load_model, wider.state_dict())
    refused("must fit the model .* Missing key", net.load_model, state)
    refused("must fit the net .* Missing key", net.load_state_dict, net.model.state_dict())
    refused("must fit the net .* Missing key.*_masks.b.weight", net.load_state_dict, without(state, "_masks.b.weight"))
    refused("size mismatch", net.load_state_dict, make(wider).state_dict())
    for extra in (3, torch.zeros(3), torch.tensor(-5), torch.zeros(3, dtype=torch.long)):
        refused("_extra_state must be", net.load_state_dict, state | {"_extra_state": extra})
    refused("must be a bool tensor", net.load_state_dict, state | {"_masks.b.weight": torch.full((8, 8), 0.3)})
    with pytest.raises(RuntimeError, match="must fit"):  # as code that was written for torch expects it
        net.load_state_dict({})
    assert net.load_model({}, strict=False).missing_keys


@pytest.mark.parametrize("options", [{}, {"assign": True}, {"strict": False}])
def test_a_state_dict_that_is_refused_changes_nothing(options):
    net, other = make(), train(make())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    parameters = list(net.parameters())
    state, weights = other.state_dict(), other.model.state_dict()
    wrong = [
        without(state, "super.head.bias"),
        state | {"more": torch.zeros(1)},
        state | {"model.b.weight": torch.zeros(3, 3)},
        state | {"model.norm.bias": "x"},
        state | {"_extra_state": torch.zeros(5, dtype=torch.long)},
        state | {"_masks.b.weight": torch.full((8, 8), 0.3)},
    ]
    loads = [
        lambda bad=bad: net.load_state_dict(bad, **options)
        for bad in wrong[2 if options.get("strict") is False else 0 :]
    ]
    loads += [lambda: net.load_model(weights | {"b.weight": torch.zeros(3, 3)}, strict="strict" not in options)]
    loads += [lambda: net.load_model(without(weights, "head.bias"))]
    for load in loads:
        refused("", load)
        assert net.steps_done == 0
        assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_to_begin_anew_is_to_begin_with_the_settings_that_were_given():
    model = Model()
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.b.weight[:4] = 0
    net = make(model, masks="zeros")
    assert net.method.initial_sparsity > 0.2
    net.load_model(dense)
    assert net.method.initial_sparsity == 0
    net = make(net.finalize(), masks={"b.weight": torch.eye(8).bool()})
    net.reset()
    assert net.method.initial_sparsity == 0 == net.sparsity


def test_masks_without_values():
    ones = torch.ones(8, 8, dtype=torch.bool)
    for wrong in (ones.to("meta"), ones.to_sparse()):
        refused("must be a bool tensor of shape", make, masks={"b.weight": wrong})


def test_momentum_of_an_optimizer_that_has_no_second_moment():
    net = SparseNet(Model(), SM(sparsity=0.5, steps=4, every=1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        opt.state[parameter] = {"exp_avg": torch.rand_like(parameter)}  # as Lion has it
    assert net.update_masks(opt).step == 0
