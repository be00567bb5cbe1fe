"""Partition: which weights of a network are prunable, which modules are private to each path."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from dcil.errors import UserError, unknown
from dcil.granularity import Filter
from dcil.method import Method

#: Name patterns (``layer1.*``), or a predicate on a name and its module.
Choice = str | Sequence[str] | Callable[[str, nn.Module], bool]
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class FilterLayout:
    """Where a prunable weight stores its output filters (see weight.py)."""

    transposed: bool = False
    conv_groups: int = 1


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm layer: torch's own, or a leaf module named like one (another library's RMSNorm)."""
    named_so = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
    return isinstance(module, NORMS) or (named_so and not isinstance(module, (nn.Linear, _ConvNd)))


def find_private(model: nn.Module, private: Choice | None, classifier: str | None) -> dict[str, nn.Module]:
    """Find the modules that each path has copies of: by default the norm layers and the classifier."""
    modules = dict(model.named_modules())
    if private is not None:
        chosen = dict(matching(modules, private, "private"))
    else:
        name = find_classifier(model, modules, classifier)
        chosen = {n: m for n, m in modules.items() if n and (n == name or is_norm(m))}
    if classifier is not None and classifier not in chosen:
        chosen[classifier] = modules[find_classifier(model, modules, classifier)]
    # A module inside a chosen one comes along with it.
    inside = {n for n in chosen for outer in chosen if n.startswith(f"{outer}.")}
    return {n: m for n, m in chosen.items() if n not in inside}


def find_classifier(model: nn.Module, modules: dict[str, nn.Module], classifier: str | None) -> str:
    """Find the classifier's name: the one given, or that of the last Linear layer in order of registration."""
    if classifier is not None:
        if classifier not in modules:
            raise unknown("module for classifier=", classifier, (n for n in modules if n))
        return classifier
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not linears or linears == [""]:
        owners = [n for n, m in modules.items() if n and any(True for _ in m.parameters(recurse=False))]
        last = f" (the last layer with parameters is {owners[-1]!r})" if owners else ""
        raise UserError(
            f"no classifier found: {type(model).__name__} has no nn.Linear inside{last}; "
            "name it with classifier='…', or pass private=[] if every path may share everything"
        )
    later = [n for n, m in modules.items() if isinstance(m, (nn.Linear, _ConvNd))][-1]
    if later != linears[-1]:
        raise UserError(
            f"no classifier found: {linears[-1]!r} is the last nn.Linear of {type(model).__name__}, but {later!r} "
            "comes after it; name the classifier with classifier='…'"
        )
    return linears[-1]


def find_prunable(
    model: nn.Module, prunable: Choice | None, private: dict[str, nn.Module], method: Method
) -> dict[str, FilterLayout]:
    """Find the prunable weights, by parameter name: by default every Conv and Linear weight that is trained and not
    private, without the first layer or the shortcuts and with the classifier where the method's settings say so.

    Patterns and predicates match parameter names (``layer1.*.weight``) or the module that owns them (``fc``).
    A weight shared by several modules appears once, under its first name.
    """
    check_ready(model)
    names = {id(p): name for name, p in model.named_parameters()}
    if prunable is None:
        trained = [(m, w) for m, w in default_weights(model, method, private) if w.requires_grad]
        chosen = [(m, w) for m, w in trained if method.is_prunable(names[id(w)])]
    else:
        chosen = list(weights_matching(model, prunable))
    found: dict[str, FilterLayout] = {}
    for module, weight in chosen:
        transposed = isinstance(module, _ConvTransposeNd) and weight is module.weight
        groups = module.groups if isinstance(module, _ConvTransposeNd) and transposed else 1
        found.setdefault(names[id(weight)], FilterLayout(transposed, groups))
    if not found:
        raise UserError(
            f"nothing to prune: {type(model).__name__} has no trainable Conv or Linear weight besides its private "
            f"layers ({', '.join(private) or 'none'}); choose weights with prunable=['…'] or other private ones"
        )
    return found


#: A layer that is recomputed in the backward pass is recomputed outside of its path's views.
RECOMPUTED = "checkpoints its activations: the second forward pass would see the unmasked weights; switch that off"


@contextmanager
def checkpointing_refused() -> Iterator[None]:
    """Make torch.utils.checkpoint(use_reentrant=False) raise while the context is open."""
    with ExitStack() as stack:
        if not torch.compiler.is_compiling():
            # Torch refuses where something around the whole network uses these hooks already, which is fine.
            with suppress(RuntimeError):
                stack.enter_context(disable_saved_tensors_hooks(f"the model {RECOMPUTED}"))
        yield


def check_ready(model: nn.Module) -> None:
    """Refuse what would fail later or be silently wrong: lazy modules and activation checkpointing."""
    for name, module in model.named_modules():
        if (
            getattr(module, "gradient_checkpointing", False) is True
            or getattr(module, "grad_checkpointing", False) is True
        ):
            raise UserError(
                f"module {name or type(model).__name__!r} {RECOMPUTED}, "
                "e.g. with model.gradient_checkpointing_disable()"
            )
        if any(is_lazy(t) for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            raise UserError(
                f"module {name!r} ({type(module).__name__}) has no shape yet: run one batch through the model first"
            )


def default_weights(
    model: nn.Module, method: Method, private: dict[str, nn.Module]
) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the weights that are prunable by default, with their modules."""
    owned = {id(p) for module in private.values() for p in module.parameters()}
    # A filter of the classifier is a class: it cannot be pruned.
    with_heads = method.classifier and not isinstance(method.granularity, Filter)
    heads = {id(p) for m in private.values() if with_heads and not is_norm(m) for p in m.parameters()}
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, _ConvNd))]
    for position, (name, module) in enumerate(layers):
        weight = module._parameters.get("weight")
        if weight is None and any(module is m for m in private.values()):
            continue
        if weight is None:
            raise UserError(
                f"module {name!r}: its weight is computed (weight norm, torch.nn.utils.prune or another "
                "parametrization); remove that first, or leave the layer out with prunable=['…']"
            )
        skipped = (not method.stem and position == 0) or (not method.shortcuts and is_shortcut(name))
        if not skipped and (id(weight) not in owned or id(weight) in heads):
            yield module, weight


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


def matching(
    modules: dict[str, nn.Module],
    choice: Choice,
    what: str,
    aliases: Callable[[str], tuple[str, ...]] = lambda name: (name,),
) -> dict[str, nn.Module]:
    """Choose by name pattern or predicate; a pattern that matches nothing is an error."""
    if callable(choice):
        return {name: module for name, module in modules.items() if name and choice(name, module)}
    found: dict[str, nn.Module] = {}
    for pattern in [choice] if isinstance(choice, str) else choice:
        hits = {n: m for n, m in modules.items() if n and any(fnmatch.fnmatchcase(a, pattern) for a in aliases(n))}
        if not hits:
            raise unknown(f"name or pattern in {what}=", pattern, (n for n in modules if n))
        found.update(hits)
    return found
