"""Partition: which weights of a network are prunable, which modules are private to each path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dcil.choice import Choice, listed, matching
from dcil.errors import UserError, unknown
from dcil.granularity import Filter
from dcil.method import Method

REAL = (torch.half, torch.bfloat16, torch.float, torch.double)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class FilterLayout:
    """Where a prunable weight stores its output filters (see weight.py)."""

    transposed: bool = False
    conv_groups: int = 1
    stacked: bool = False

    @classmethod
    def of(cls, module: nn.Module, weight: nn.Parameter) -> FilterLayout:
        """The layout of a module's weight."""
        if isinstance(module, _ConvTransposeNd) and weight is module.weight:
            return cls(transposed=True, conv_groups=module.groups)
        return cls(transposed=is_conv1d(module), stacked=weight.dim() == 3 and not isinstance(module, _ConvNd))


@dataclass(frozen=True)
class Partition:
    """The division of a network.

    prunable   prunable weights by parameter name, in the model's order
    private    names of the modules that each path has for itself
    classes    numbers of outputs of the classifiers
    chosen     whether the user named the prunable weights
    frozen     prunable weights that no gradient reaches from the start, such as a base model's under adapters
    """

    prunable: dict[str, FilterLayout]
    private: tuple[str, ...]
    classes: frozenset[int]
    chosen: bool
    frozen: frozenset[str]


def divide(
    model: nn.Module,
    method: Method,
    prunable: Choice | None = None,
    private: Choice | None = None,
    classifier: str | Sequence[str] | None = None,
) -> Partition:
    """Divide a network as the user's choices and the method's settings say."""
    owned, heads = find_private(model, private, classifier)
    found = find_prunable(model, prunable, owned, method)
    if private is None:  # a weight asked for by name is prunable, even if it would be private by default
        asked = {id(model.get_parameter(name)) for name in found}  # not names: a tied weight has several
        owned = {n: m for n, m in owned.items() if not any(id(p) in asked for p in m.parameters())}
    check_prunable(model, method, found, owned, heads)
    frozen = frozenset(name for name in found if not model.get_parameter(name).requires_grad)
    return Partition(found, tuple(owned), count_outputs(model, heads), prunable is not None, frozen)


def check_prunable(
    model: nn.Module, method: Method, found: Iterable[str], private: dict[str, nn.Module], heads: Sequence[str]
) -> None:
    """Refuse weights that cannot be pruned, by what they are and not by name: a tied weight has several."""
    owners = {id(p): name for name, module in private.items() for p in module.parameters()}
    outputs = {id(p): name for name in heads for p in model.get_submodule(name).parameters()}
    for name in found:
        weight = model.get_parameter(name)
        if weight.dtype not in REAL or weight.layout != torch.strided:
            raise UserError(
                f"prunable weights must be dense tensors of real floats (float16, bfloat16, float32, float64), got "
                f"{name} of {weight.dtype}, {weight.layout}: leave it out with prunable=['…']"
            )
        if is_computed_from(model, name):
            raise UserError(
                f"prunable weights must be what layers compute with, got {name}, from which that is computed (weight "
                "norm, torch.nn.utils.prune, …): remove that first, or leave the layer out with prunable=['…']"
            )
        if id(weight) in owners:
            raise UserError(
                f"a weight must be prunable or private, got {name} as both (it is in {owners[id(weight)]!r}): leave it "
                "out of prunable=, or that module out of private="
            )
        if id(weight) in outputs and isinstance(method.granularity, Filter):
            raise UserError(
                f"filters of the classifier must not be pruned, since each is a class, got {name} (it is in "
                f"{outputs[id(weight)]!r}): leave it out with prunable=['…'], or prune it with Weight()"
            )


def is_computed_from(model: nn.Module, name: str) -> bool:
    """Whether a layer's weight is computed from this parameter, by torch's parametrizations or its older hooks."""
    owner, _, key = name.rpartition(".")
    found = vars(model.get_submodule(owner))
    bases = [key.removesuffix(end) for end in ("_orig", "_v", "_bar") if key.endswith(end)]
    return ".parametrizations." in f".{name}" or any(isinstance(found.get(base), torch.Tensor) for base in bases)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm layer: torch's own, or a leaf module named like one (another library's RMSNorm)."""
    named_so = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
    return isinstance(module, NORMS) or (named_so and not isinstance(module, (nn.Linear, _ConvNd)))


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is GPT-2's Conv1D: a linear layer that stores (in, out)."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2


def find_private(
    model: nn.Module, private: Choice | None, classifier: str | Sequence[str] | None
) -> tuple[dict[str, nn.Module], list[str]]:
    """Find the modules that each path has copies of, by default the norm layers and the classifiers; and the latter."""
    modules = dict(model.named_modules())
    heads = find_classifiers(model, modules, classifier) if classifier is not None or private is None else []
    if private is not None:
        chosen = dict(matching(modules, private, "private"))
    else:
        chosen = {n: m for n, m in modules.items() if n and is_norm(m)}
    chosen |= {n: modules[n] for n in heads}
    # A module inside a chosen one comes along with it.
    inside = {n for n in chosen for outer in chosen if n.startswith(f"{outer}.")}
    chosen = {n: m for n, m in modules.items() if n in chosen and n not in inside}
    return chosen, heads or [n for n, m in chosen.items() if not is_norm(m)]


def find_classifiers(
    model: nn.Module, modules: dict[str, nn.Module], classifier: str | Sequence[str] | None
) -> list[str]:
    """Find the classifiers' names: those given, or that of the last Linear layer in order of registration."""
    if classifier is not None:
        names = listed(classifier, "classifier", "a name of a module or a list of them")
        for name in names:
            if name not in modules or not name:
                raise unknown("module for classifier=", name, (n for n in modules if n))
        return names
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    if not linears or list(linears) == [""]:
        owners = [n for n, m in modules.items() if n and any(True for _ in m.parameters(recurse=False))]
        last = f" (the last layer with parameters is {owners[-1]!r})" if owners else ""
        raise UserError(
            f"no classifier found: {type(model).__name__} has no nn.Linear inside{last}; "
            "name it with classifier='…', or pass private=[] if every path may share everything"
        )
    found, later = list(linears)[-1], [n for n, m in modules.items() if isinstance(m, (nn.Linear, _ConvNd))][-1]
    if later != found:
        raise UserError(
            f"no classifier found: {found!r} is the last nn.Linear of {type(model).__name__}, but {later!r} "
            "comes after it; name the classifier with classifier='…'"
        )
    if heads := [name for name in linears if name != found and side_by_side(linears, name, found)]:
        raise UserError(
            f"the classifier must be named, {type(model).__name__} seems to have several heads: "
            f"classifier={[*heads, found]}, or one of them"
        )
    return [found]


def side_by_side(linears: dict[str, nn.Linear], one: str, other: str) -> bool:
    """Whether two layers of one parent read the same input, and neither the other's output: two heads."""
    a, b = linears[one], linears[other]
    siblings = one.rpartition(".")[0] == other.rpartition(".")[0]
    return siblings and a.in_features == b.in_features and b.in_features not in (a.out_features, b.out_features)


def count_outputs(model: nn.Module, classifiers: Sequence[str]) -> frozenset[int]:
    """The numbers of outputs of the classifiers: of the last Linear or Conv layer inside each."""
    found = set()
    for name in classifiers:
        layers = [m for m in model.get_submodule(name).modules() if isinstance(m, (nn.Linear, _ConvNd))]
        if layers:
            found.add(layers[-1].out_features if isinstance(layers[-1], nn.Linear) else layers[-1].out_channels)
    return frozenset(found)


def find_prunable(
    model: nn.Module, prunable: Choice | None, private: dict[str, nn.Module], method: Method
) -> dict[str, FilterLayout]:
    """Find the prunable weights, by parameter name: by default every Conv and Linear weight, attention's packed
    projections and experts' stacked weights, if trained and not private, without the first layer or the shortcuts
    and with the classifier where the method's settings say so.

    Patterns and predicates match parameter names (``layer1.*.weight``) or the module that owns them (``fc``).
    A weight shared by several modules appears once, under its first name.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    if prunable is None:
        trained = [(m, w) for m, w in default_weights(model, method, private) if w.requires_grad]
        chosen = [(m, w) for m, w in trained if method.is_prunable(names[id(w)])]
    else:
        chosen = list(weights_matching(model, prunable))
    found: dict[str, FilterLayout] = {}
    for module, weight in chosen:
        if weight.numel():  # an empty layer has nothing to prune
            found.setdefault(names[id(weight)], FilterLayout.of(module, weight))
    if adapters := [name for name in found if ".lora_" in name]:
        raise UserError(
            f"prunable weights must not be LoRA matrices, got {adapters[0]!r}: prune what they adapt with "
            "prunable=['*.base_layer.weight'], and merge with dcil.integrations.peft.merge(net), which keeps the zeros"
        )
    if not found:
        raise UserError(
            f"nothing to prune: {type(model).__name__} has no trainable Conv or Linear weight besides its private "
            f"layers ({', '.join(private) or 'none'}); choose weights with prunable=['…'] or other private ones"
        )
    return found


def default_weights(
    model: nn.Module, method: Method, private: dict[str, nn.Module]
) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the weights that are prunable by default, with their modules."""
    owned = {id(p) for module in private.values() for p in module.parameters()}
    # A filter of the classifier is a class: it cannot be pruned.
    with_heads = method.classifier and not isinstance(method.granularity, Filter)
    heads = {id(p) for m in private.values() if with_heads and not is_norm(m) for p in m.parameters()}
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, _ConvNd)) or packed_weights(n, m)]
    for position, (name, module) in enumerate(layers):
        weights = packed_weights(name, module) or [module._parameters.get("weight")]
        if weights == [None] and any(module is m for m in private.values()):
            continue
        skipped = (not method.stem and position == 0) or (not method.shortcuts and is_shortcut(name))
        for weight in weights:
            if weight is None:
                raise UserError(
                    f"module {name!r}: its weight is computed (weight norm, torch.nn.utils.prune or another "
                    "parametrization); remove that first, or leave the layer out with prunable=['…']"
                )
            if not skipped and (id(weight) not in owned or id(weight) in heads):
                yield module, weight


def packed_weights(name: str, module: nn.Module) -> list[nn.Parameter | None]:
    """The weights of connections in modules that are neither Linear nor Conv: torch's attention, GPT-2's Conv1D,
    and experts, which stack one matrix each in a parameter of three dimensions."""
    if isinstance(module, nn.MultiheadAttention):
        return [p for n, p in module.named_parameters(recurse=False) if n.endswith("proj_weight")]
    if is_conv1d(module):
        return [module._parameters["weight"]]
    if "expert" in f"{name}.{type(module).__name__}".lower() and not isinstance(module, (nn.Linear, _ConvNd)):
        return [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return []


def is_shortcut(name: str) -> bool:
    """Whether the layer is a projection beside the main branch, by the names that residual networks give it."""
    return any(word in name for word in ("shortcut", "downsample", "proj_skip"))


def weights_matching(model: nn.Module, choice: Choice) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the weights that the patterns or the predicate choose, with their modules."""
    candidates: dict[str, tuple[nn.Module, nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if parameter.dim() >= 2:  # biases and norm scales are not weights of connections
                candidates[name] = (module, parameter)
    owners = {name: module for name, (module, _) in candidates.items()}
    for name in matching(owners, choice, "prunable", lambda name: (name, name.rpartition(".")[0])):
        yield candidates[name]
