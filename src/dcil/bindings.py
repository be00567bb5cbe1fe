"""Bindings: in which dictionaries of its modules a network keeps its tensors.

Looking a name up walks down the modules, and a step would do so for every tensor of every path. It is done once, and
again when a module or a parameter was exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from dcil.weight import PrunableWeight

#: A dictionary of a module (``_parameters``, ``_buffers``) and a key in it.
Place = tuple[dict[str, Any], str]


class Bindings:
    """The places of the tensors of ``net``, valid while it is ``current``."""

    def __init__(self, net: Any) -> None:
        private = {path: net.get_submodule(path) for path in list(net.method.paths)[1:]}
        modules = [net, *net.model.modules(), *chain.from_iterable(owner.modules() for owner in private.values())]
        self._tables = [table for module in modules for table in (module._modules, module._parameters)]
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        self._settled = False
        self.places: dict[str, list[Place]] = {}
        for name, place in places_of(net.model):
            self.places.setdefault(net._tied_names.get(name, name), []).append(place)
        parameters = dict(net.model.named_parameters(remove_duplicate=False))
        self._layers = [net.layer(name) for name in net._partition.prunable]
        self._masks = [place_of(net._masks, name) for name in net._partition.prunable]
        # What was taken away since is refused in training, and is nobody's business afterwards.
        self.shared = [(name, parameters[name]) for name in net._shared if name in parameters]
        self.shared_buffers = [(name, self.places[name][0]) for name in net._shared_buffers if name in self.places]
        first = net._first_names
        self.private = {
            path: [(first.get(n, n), parameters[n], own) for n, own in owner.named_parameters() if n in parameters]
            for path, owner in private.items()
        }
        self.private_buffers = {
            path: [(first.get(name, name), place_of(owner, name)) for name, _ in owner.named_buffers()]
            for path, owner in private.items()
        }

    def current(self) -> bool:
        """Whether every module and every parameter is the one that it was."""
        if self._settled:
            return True
        same = map(is_, self._held, chain.from_iterable(map(dict.values, self._tables)))
        return sum(map(len, self._tables)) == len(self._held) and all(same)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """While open, in a pass through all paths, ``current`` need not be asked again."""
        before, self._settled = self._settled, True
        try:
            yield
        finally:
            self._settled = before

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the net looks up its own

    def layers(self, find: Callable[[str], PrunableWeight]) -> list[PrunableWeight]:
        """The prunable weights with their masks; ``find`` looks one up whose tensors were moved or taken away."""
        for i, (layer, (table, key)) in enumerate(zip(self._layers, self._masks, strict=True)):
            moved = table[key] is not layer.mask or layer.weight.shape != layer.mask.shape
            if moved or layer.weight.is_complex():
                self._layers[i] = find(layer.name)
        return list(self._layers)

    def besides_views(self, path: str) -> dict[str, Tensor]:
        """What the model computes with on ``path`` in place of its own tensors, prunable weights aside."""
        if path not in self.private:
            return {}
        seen: dict[str, Tensor] = {name: parameter.detach() for name, parameter in self.shared}
        seen |= {name: table[key].clone() for name, (table, key) in self.shared_buffers}
        for name, parameter, own in self.private[path]:  # what is frozen in the model is frozen on every path
            seen[name] = own if parameter.requires_grad else own.detach()
        return seen | {name: table[key] for name, (table, key) in self.private_buffers[path]}

    def call(self, model: nn.Module, tensors: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        """The model's output with ``tensors`` in place of its own; what the model puts there instead is left in it."""
        own: list[tuple[str, Place, Any]] = []
        try:
            for name, tensor in tensors.items():
                for table, key in self.places.get(name, ()):
                    own.append((name, (table, key), table[key]))
                    table[key] = tensor
            return model(*args, **kwargs)
        finally:
            for name, (table, key), before in own:
                tensors[name], table[key] = table[key], before


def places_of(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Every parameter and buffer of the model with its place; a module registered twice has one."""
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{prefix}.{key}".lstrip("."), (table, key)


def place_of(module: nn.Module, name: str) -> Place:
    """The place of the buffer called ``name``."""
    owner, _, key = name.rpartition(".")
    return module.get_submodule(owner)._buffers, key
