"""Wiring: refuse what would train something else than was meant, where it happens and with the way out."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, disable_saved_tensors_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dcil.errors import UserError, described
from dcil.method import Method

# -- the model -----------------------------------------------------------------------------------------------------

#: A layer that is recomputed in the backward pass is recomputed outside of its path's views.
RECOMPUTED = "checkpoints its activations: the second forward pass would see the unmasked weights; switch that off"
CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")


def check_method(method: Method) -> None:
    """Refuse a method's name or class."""
    if not isinstance(method, Method):
        raise UserError(
            f"method must be a dcil.Method such as DCIL(sparsity=0.95, steps=60_000), got {described(method)}"
        )


def check_model(model: nn.Module, net: type[nn.Module]) -> None:
    """Refuse models that cannot be right: wrapped already, compiled to TorchScript, lazy, or checkpointing."""
    if not isinstance(model, nn.Module):
        raise UserError(f"the model must be an nn.Module, got {described(model)}")
    tensors = [*model.parameters(), *model.buffers()]
    if torch.is_inference_mode_enabled() or any(t.is_inference() for t in tensors if not is_lazy(t)):
        raise UserError("the model must be made and wrapped outside of torch.inference_mode, got tensors without "
                        "gradients: use torch.no_grad there, or copy.deepcopy(model) outside")  # fmt: skip
    if len({t.is_meta for t in model.parameters()}) > 1:
        raise UserError("the model must be whole or on the meta device, got some of its parameters on meta: give them "
                        "values first, e.g. with model.to_empty(device=…)")  # fmt: skip
    for name, module in model.named_modules():
        check_module(name or type(model).__name__, module)
        if isinstance(module, net):
            raise UserError(f"the model must be plain, got a {type(module).__name__} in it: wrap that one's .model, or "
                            "what its finalize() returns, with masks='zeros'")  # fmt: skip


def check_module(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        raise UserError(f"the model must be plain, got {kind} in {name!r}: wrap the other way round, "
                        f"{kind}(SparseNet(model, …)), so that every path's gradients are averaged")  # fmt: skip
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"the model must be plain, got TorchScript in {name!r}, whose weights cannot be replaced by "
                        "views: wrap the module that it was made from, and script what finalize returns")  # fmt: skip
    if kind == "FullyShardedDataParallel":
        raise UserError(f"the model {name!r} must be plain or sharded by fully_shard, got {kind}, which flattens "
                        "weights: call fully_shard on the net's blocks and on the net")  # fmt: skip
    if any(getattr(module, flag, False) is True for flag in CHECKPOINTING):
        raise UserError(f"module {name!r} {RECOMPUTED}, e.g. with model.gradient_checkpointing_disable()")
    if any(map(is_lazy, own)):
        raise UserError(f"module {name!r} ({kind}) has no shape yet: run one batch through the model first")


@contextmanager
def checkpointing_refused() -> Iterator[None]:
    """Make torch.utils.checkpoint(use_reentrant=False) raise while the context is open."""
    with ExitStack() as stack:
        if not torch.compiler.is_compiling():
            # Torch refuses where something around the whole network uses these hooks already, which is fine.
            with suppress(RuntimeError):
                stack.enter_context(disable_saved_tensors_hooks(f"the model {RECOMPUTED}"))
        yield


def refuse_checkpoints_in(output: Any) -> None:
    """Refuse an output that was computed through torch.utils.checkpoint(use_reentrant=True)."""
    queue = deque(tensor.grad_fn for tensor in tensors_in(output))
    seen: set[Node] = set()
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UserError(f"the model {RECOMPUTED}")
        queue.extend(child for child, _ in node.next_functions)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output, whatever it is made of."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
    elif isinstance(found := getattr(output, "logits", None), Tensor):
        yield found


# -- the optimizer -------------------------------------------------------------------------------------------------


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside those of accelerate, Lightning and others that step one for it."""
    found = optimizer
    while (inner := inner_optimizer(found)) is not None and inner is not found:
        found = inner
    if not isinstance(found, Optimizer):
        raise UserError(f"the optimizer must be a torch.optim.Optimizer, got {described(optimizer)}")
    return found


def inner_optimizer(optimizer: Any) -> Optimizer | None:
    """The optimizer that another one steps, by the names that wrappers give it."""
    for name in ("optimizer", "_base_optimizer"):  # the second: timm's Lookahead, whose own hooks are never called
        if isinstance(found := getattr(optimizer, name, None), Optimizer):
            return found
    return None


def check_optimizer(net: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that lack trained parameters of ``net``, such as one made from ``model.parameters()``."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    lacking = [name for name, p in net.named_parameters() if p.requires_grad and id(p) not in held]
    if lacking:
        names = ", ".join(lacking[:3]) + (", …" if len(lacking) > 3 else "")
        raise UserError(
            f"the optimizer must hold every parameter of net that requires a gradient, it lacks {len(lacking)} "
            f"({names}): create it from net.parameters() (after sharding or moving net), or freeze these with "
            "requires_grad_(False)"
        )


def check_held(net: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer that has lost parameters, because layers were exchanged or unfrozen since it was made."""
    if (groups := getattr(optimizer, "param_groups", None)) is not None and groups:
        check_optimizer(net, [optimizer])


def checked_state(optimizer: Any) -> Any:
    """Return the optimizer; refuse what has no optimizer state where an optimizer is meant."""
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise UserError(f"the optimizer must be a torch.optim.Optimizer, got {described(optimizer)}")
    return optimizer


def checked_observer(observer: Any) -> Any:
    """Return the observer; refuse what cannot be told of mask updates."""
    methods = ("before_update", "after_update")
    if isinstance(observer, type) or not all(callable(getattr(observer, name, None)) for name in methods):
        raise UserError("an observer must have before_update(step) and after_update(update), as dcil.MaskObserver, "
                        f"got {described(observer)}")  # fmt: skip
    return observer


def checked_net(net: Any, kind: type[nn.Module]) -> Any:
    """Return the net; refuse what is none."""
    if not isinstance(net, kind):
        raise UserError(f"the other net must be a {kind.__name__}, got {described(net)}")
    return net


def check_gradients(model: nn.Module, private: Mapping[str, nn.Module]) -> None:
    """Refuse gradients of a loss that a path has no part in, such as one of ``net(x)["pruned"]`` alone."""
    if all(parameter.grad is None for parameter in model.parameters()):
        return  # zeroed already
    for path, module in private.items():
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            raise UserError(
                f"the loss must be that of all paths, as net.loss(net(x), y) gives it, got one that the {path} "
                "path has no part in"
            )


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether the step changed no weight: a GradScaler told a fused optimizer so, or it only created its state."""
    found = getattr(optimizer, "found_inf", None)
    return (found is not None and bool(found)) or creates_state()


def creates_state() -> bool:
    """Whether torch.distributed.checkpoint takes the present step, with a rate of 0, so that there is state to load."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def check_layers(net: Any) -> None:
    """Refuse layers that were added, exchanged or taken away since the model was wrapped: paths would not know them."""
    for name in net.masks:
        net.layer(name)  # refuses weights that are not there
    here, modules = dict(net.model.named_parameters(remove_duplicate=False)), dict(net.model.named_modules())
    copies = {name: net.get_submodule(path) for path in list(net.method.paths)[1:] for name in net._partition.private}
    changed = [name for name in net._shared if name not in here]
    for name, path in copies.items():
        own, copy = modules.get(name), path.get_submodule(name)
        alike = isinstance(own, type(copy)) or isinstance(copy, type(own))  # fully_shard derives a class of its own
        if own is None or not alike or shapes(own) != shapes(copy):
            changed.append(name)
    known = {id(here[name]) for name in (*net.masks, *net._shared) if name in here}
    known |= {id(p) for name in net._partition.private if name in modules for p in modules[name].parameters()}
    changed += [name for name, parameter in here.items() if id(parameter) not in known]
    if changed:
        raise UserError(f"the model must keep the layers that it was wrapped with, got another {changed[0]}: change it "
                        "before SparseNet(model, …)")  # fmt: skip


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


# -- the weights -------------------------------------------------------------------------------------------------------


class CopyOnLoad:
    """Called after a state dict was loaded into the model: gives the private modules of further paths the same.

    Weights loaded into ``net.model`` after wrapping would otherwise reach the pruned path only. A state dict of the
    net has them for every path, and may hold the net's own tensors, as distributed checkpoints do: nothing is copied.
    """

    def __init__(self, net: Any = None) -> None:
        self.net = None if net is None else weakref.ref(net)
        self.loading: list[str] | None = None

    def register(self) -> None:
        if self.net is not None and (net := self.net()) is not None:
            net.register_load_state_dict_pre_hook(self.begin)
            # Not the model: a state dict may be loaded into a part of it.
            for module in {inner: None for private in net.private_modules().values() for inner in private.modules()}:
                module.register_load_state_dict_post_hook(self)

    def begin(self, net: Any, state: Any, prefix: Any, metadata: Any, strict: Any, missing: list[str], *_: Any) -> None:
        """Called before a state dict is loaded into the net: its list of missing keys identifies this loading."""
        self.loading = missing

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        net = None if self.net is None else self.net()
        if net is not None and incompatible_keys.missing_keys is not self.loading:
            net.copy_private(module)

    def __reduce__(self) -> tuple[type[CopyOnLoad], tuple[()]]:
        return CopyOnLoad, ()  # a copy of the model alone belongs to no net

    @staticmethod
    def remove(root: nn.Module) -> None:
        for module in root.modules():
            for hooks in (module._load_state_dict_post_hooks, module._load_state_dict_pre_hooks):
                for key, hook in list(hooks.items()):
                    hook = getattr(hook, "hook", hook)  # as torch wraps those before
                    if isinstance(getattr(hook, "__self__", hook), CopyOnLoad):
                        del hooks[key]
