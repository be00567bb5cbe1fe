"""FSDP2: a path through a network whose blocks are gathered and freed by ``fully_shard``.

``fully_shard`` puts a block's gathered parameters in place when the block is called, over whatever stands there. So
the tensors of a path are put in after that, and taken out before the block is freed again.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dcil.errors import UserError
from dcil.method import Method
from dcil.naming import put
from dcil.sharding import is_distributed, is_sharded, like, must_follow
from dcil.wiring import tensors_in

#: In the names of the attributes by which fully_shard knows its modules.
COMPOSABLE = "__composable_api"
#: (module, key, names): a parameter's place, and the names that the model has for it, several if it is tied.
Place = tuple[nn.Module, str, list[str]]


def is_block(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def find_blocks(net: nn.Module) -> dict[nn.Module, list[Place]]:
    """The modules of ``net.model``, itself included, that ``fully_shard`` was called on, with their parameters."""
    model = net.get_submodule("model")
    if not is_distributed() or not any(map(is_block, model.modules())):
        return {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[nn.Module, list[Place]] = {}

    def visit(module: nn.Module, block: nn.Module | None) -> None:
        block = module if is_block(module) else block
        if block is not None:
            own = [(module, key, names[id(p)]) for key, p in module._parameters.items() if p is not None]
            found.setdefault(block, []).extend(own)
        for child in module.children():
            visit(child, block)

    visit(model, None)
    check_blocks(net, found)
    return found


def names_outside(model: nn.Module, blocks: Mapping[nn.Module, list[Place]]) -> set[str] | None:
    """The names of the model's tensors that are in none of the blocks; None where there are no blocks."""
    if not blocks:
        return None
    inside = {name for places in blocks.values() for _, _, names in places for name in names}
    every = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name for name, _ in every} - inside


class Substitution:
    """The hooks that put the tensors of a path into a block for the time of its forward pass.

    Autograd keeps a view of a weight, which is as large as the gathered weight. Where fully_shard frees that after the
    forward pass, the view's memory is freed too, and filled again when the backward pass arrives at the block.
    """

    def __init__(self, places: list[Place], tensors: Callable[[Collection[str]], Mapping[str, Tensor]]) -> None:
        self.places = places
        self.names = {name for _, _, names in places for name in names}
        self.tensors = tensors
        self.own: list[nn.Parameter | None] = []
        self.seen: Mapping[str, Tensor] = {}

    def register(self, block: nn.Module) -> list[RemovableHandle]:
        """Run after fully_shard's own hook that gathers, before and after the one that frees."""
        return [
            block.register_forward_pre_hook(self.enter),
            block.register_forward_hook(self.leave, prepend=True, always_call=True),
            block.register_forward_hook(self.free),
        ]

    def enter(self, block: nn.Module, args: object) -> None:
        self.own = [module._parameters[key] for module, key, _ in self.places]
        self.seen = self.tensors(self.names)
        for module, key, names in self.places:
            for name in names:
                if name in self.seen:
                    module._parameters[key] = self.seen[name]  # type: ignore[assignment]

    def leave(self, block: nn.Module, args: object, output: object) -> None:
        for (module, key, _), parameter in zip(self.places, self.own, strict=False):
            module._parameters[key] = parameter
        self.own = []

    def free(self, block: nn.Module, args: object, output: object) -> None:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        views = {name: view for name, view in self.seen.items() if view.grad_fn is not None and not is_sharded(view)}
        self.seen = {}
        if outputs and all(is_sharded(module._parameters[key]) for module, key, _ in self.places):
            refill = functools.partial(self.refill, views)
            torch.autograd.graph.register_multi_grad_hook(outputs, refill, mode="any")
            for view in views.values():
                view.untyped_storage().resize_(0)

    @torch.no_grad()
    def refill(self, views: Mapping[str, Tensor], gradient: object) -> None:
        for name, tensor in self.tensors(views.keys()).items():
            view = views[name]
            view.untyped_storage().resize_(view.numel() * view.element_size())
            with torch.autograd._unsafe_preserve_version_counter(view):  # type: ignore[attr-defined]
                view.copy_(tensor)


@contextmanager
def substituted(
    blocks: Mapping[nn.Module, list[Place]], tensors: Callable[[Collection[str]], Mapping[str, Tensor]]
) -> Iterator[None]:
    """While the context is open, each block computes with ``tensors(names of its parameters)``."""
    with ExitStack() as stack:
        for block, places in blocks.items():
            for handle in Substitution(places, tensors).register(block):
                stack.callback(handle.remove)
        yield


def tensors(net: Any, path: str, names: Container[str] | None) -> dict[str, Tensor]:
    """``net.tensors`` where weights are sharded, or gathered just now: looked up as they are at this moment."""

    def wants(name: str) -> bool:
        return names is None or name in names

    wanted = map(net.layer, filter(wants, net.masks))
    layers = [replace(layer, mask=like(layer.mask, layer.weight)) for layer in wanted]
    if path == "pruned" and not net.training:  # whatever the method trains with
        seen = {layer.name: net.method.product(layer, net.state) for layer in layers}
    else:
        seen = {layer.name: net.method.view(path, layer, net.state) for layer in layers}
    if path != "pruned":
        first, private = net._first_names, net.get_submodule(path)
        seen |= {name: net.model.get_parameter(name).detach() for name in net._shared if wants(name)}
        seen |= {name: net.model.get_buffer(name).clone() for name in net._shared_buffers if wants(name)}
        for name, tensor in private.named_parameters():  # what is frozen in the model is frozen on every path
            if wants(first.get(name, name)):
                parameter = net.model.get_parameter(name)
                own = in_place_of(name, parameter, tensor)
                seen[first.get(name, name)] = own if parameter.requires_grad else own.detach()
        owned = {first.get(name, name): buffer for name, buffer in private.named_buffers()}
        seen |= {name: buffer for name, buffer in owned.items() if wants(name)}
    return seen


def in_place_of(name: str, parameter: Tensor, tensor: Tensor) -> Tensor:
    """A path's own ``tensor`` as the layer expects it: gathered where the parameter is, in its dtype."""
    if is_sharded(tensor) and not is_sharded(parameter):
        tensor = gathered(tensor)
    elif is_sharded(parameter) and not (is_sharded(tensor) and tensor.device_mesh == parameter.device_mesh):
        raise UserError(
            f"{name} must be sharded in the same way on every path, which has a copy of it: call parallelize_module "
            "before SparseNet(model, …), and fully_shard on blocks and net after it"
        )
    return tensor.to(parameter.dtype) if tensor.dtype != parameter.dtype else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor; its gradient is averaged over the processes, as that of the parameters of a block is."""
    assert is_sharded(tensor)
    from torch.distributed.tensor import Partial

    processes = tensor.device_mesh.size()
    found = tensor.full_tensor(grad_placements=[Partial()] * tensor.device_mesh.ndim)
    if processes == 1:  # else it would share the memory of the parameter, and a block frees that of its views
        found = found.clone()
    if found.requires_grad:
        found.register_hook(lambda grad: grad / processes)  # type: ignore[no-untyped-call]
    return found


def reshard(net: nn.Module) -> None:
    """Free gathered parameters, so that the modules hold the sharded ones, which the optimizer changes."""
    for module in net.modules() if is_distributed() else ():
        if is_block(module):
            module.reshard()  # type: ignore[operator]


def check_blocks(net: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Refuse parameters whose gradients nobody averages: those outside of the blocks, where net is not sharded too."""
    if not blocks or is_block(net):
        return
    plain = [name for name, p in net.named_parameters() if p.requires_grad and not is_sharded(p)]
    inside = {id(p) for block in blocks for p in block.parameters()}  # a block may be gathered just now
    if left := [name for name in plain if id(net.get_parameter(name)) not in inside]:
        raise UserError(
            f"every parameter must be sharded where some are, got {len(left)} that are not ({left[0]}, …), whose "
            "gradients would differ from process to process: call fully_shard(net) after its blocks, or fully_shard "
            "on the whole model before SparseNet(model, …)"
        )


def weight_of(model: nn.Module, name: str, mask: Tensor) -> nn.Parameter:
    """The weight of that name; refused where another tool has flattened it or taken it away."""
    module, _, key = name.rpartition(".")
    try:
        found = model.get_submodule(module)._parameters.get(key)
    except AttributeError:  # the module was removed
        found = None
    if not isinstance(found, nn.Parameter) or found.shape != mask.shape or found.is_complex():
        got = "none" if found is None else f"a {found.dtype} {type(found).__name__} of shape {tuple(found.shape)}"
        raise UserError(
            f"{name} must be a real parameter of shape {tuple(mask.shape)} wherever net uses it, got {got}: "
            "FullyShardedDataParallel and ZeRO-3 flatten or take away weights, fully_shard(net) keeps them; change "
            "layers before SparseNet(model, …)"
        )
    return found


def check_method(method: Method) -> None:
    """Refuse methods that would be wrong on parts of the weights."""
    if not method.shards():
        raise UserError(
            f"{type(method).__name__} with {method.criterion} must see whole weights, got sharded ones: train it with "
            "DistributedDataParallel(net), or declare shards() where a method of your own is right on DTensors"
        )


# -- masks ---------------------------------------------------------------------------------------------------------


def follow_shards(net: Any) -> None:
    """Shard the masks and the method's tensors as the weights are, which may have been sharded after wrapping."""
    for layer in net.layers if is_distributed() else ():
        if is_sharded(layer.weight):
            check_method(net.method)
        if must_follow(layer.mask, layer.weight):
            put(net._masks, layer.name, like(layer.mask, layer.weight))
            for name, tensor in net.state.items():
                if name.endswith(f".{layer.name}") and tensor.shape == layer.weight.shape:
                    put(net._state, name, like(tensor, layer.weight))


def at_rest(net: Any, *_: Any) -> None:
    """Called before a state dict is read or written, and by what works on the weights outside of a forward pass."""
    reshard(net)
    follow_shards(net)


def remember_counts(net: Any) -> None:
    """Called where every process comes by, so that one of them may log ``sparsity`` or ``metrics()`` alone."""
    if net.is_sharded:
        net._counts.of(list(net.masks.values()))
