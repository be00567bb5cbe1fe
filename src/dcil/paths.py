"""Paths: one unmodified module, computed through a method's views once per path.

Pruned weights and masks are shared by the paths; each further path has norm layers and a classifier for itself.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dcil import fsdp, views, wiring
from dcil.checks import Checks
from dcil.choice import Choice
from dcil.errors import unknown
from dcil.method import Method
from dcil.naming import ASKED, Nested, answer, first_names, put, tied_names
from dcil.partition import divide
from dcil.sharding import Counts, is_distributed, is_sharded, like, must_follow
from dcil.weight import PrunableWeight

Self = TypeVar("Self", bound="Paths")


class Paths(nn.Module):
    """The model with its masks and the private modules of further paths, under the model's own names.

    model.layer1.0.conv1.weight      the user's parameters: all of W, and what the pruned path has for itself
    super.layer1.0.bn1.weight        what another path has for itself
    _masks.layer1.0.conv1.weight     True = kept
    _state.fisher.…                  tensors of the method
    _kept                            the number of weights that the updates left
    """

    _kept: Tensor

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        prunable: Choice | None,
        private: Choice | None,
        classifier: str | Sequence[str] | None,
    ) -> None:
        super().__init__()
        wiring.check_method(method)
        wiring.check_model(model, Paths)
        if any(map(is_sharded, model.parameters())):
            fsdp.check_method(method)
        self.method = method
        self.model = method.prepare(model)
        self._partition = divide(self.model, method, prunable, private, classifier)
        self._masks, self._state = Nested(), Nested()
        for name in self._partition.prunable:
            put(self._masks, name, torch.ones_like(self.model.get_parameter(name), dtype=torch.bool))
        owned = self.private_modules()
        for path in list(method.paths)[1:]:
            self.add_module(path, Nested())
            for name, module in fsdp.copied(owned).items():  # all at once, so that what is tied stays tied
                put(self._private(path), name, module)
        own = {id(t) for module in owned.values() for t in (*module.parameters(), *module.buffers())}
        parameters, buffers = self.model.named_parameters(), self.model.named_buffers()
        self._shared = [n for n, p in parameters if n not in self._partition.prunable and id(p) not in own]
        self._shared_buffers = [n for n, b in buffers if id(b) not in own]
        self._first_names, self._tied_names = first_names(self.model), tied_names(self.model)
        self._checks, self._counts = Checks(list(method.paths)), Counts()
        self.register_buffer("_kept", torch.zeros((), dtype=torch.long, device=self.first_mask.device))

    def train(self: Self, mode: bool = True) -> Self:
        self._checks.new_phase(self.training, mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        if name in ASKED and hasattr(self.model, name):
            return answer(name, getattr(self.model, name), ["model", *list(self.method.paths)[1:]])
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In training: {path name: its output}. In evaluation: the pruned path's plain output."""
        if not self.training:
            return self.path("pruned", *args, **kwargs)
        return {name: self.path(name, *args, **kwargs) for name in self.method.paths}

    def path(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The output of one path."""
        if name not in list(self.method.paths):
            raise unknown("path", str(name), self.method.paths)
        blocks = fsdp.find_blocks(self)
        if blocks:
            self.follow_shards()
            self.remember_counts()
        self._checks.masks(self)
        seen = self.tensors(name, fsdp.names_outside(self.model, blocks))
        with self._checks.watched(self, name, seen), fsdp.substituted(blocks, lambda names: self.tensors(name, names)):
            output = self.call(seen, *args, **kwargs)
        self._checks.output(name, output)
        if name != "pruned":  # a module that assigned its buffer anew left the new one in ``seen``
            for key, buffer in self._private(name).named_buffers():
                if (new := seen[self._first_names.get(key, key)]) is not buffer:
                    buffer.copy_(new.detach())
        return output

    def call(self, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The model's output with ``tensors`` in place of its own; a tensor that the model replaced is left there."""
        tensors.update({name: tensors[first] for name, first in self._tied_names.items() if first in tensors})
        # Torch's own tying puts the wrong tensor back into a module that has two names.
        return functional_call(self.model, tensors, args, kwargs, tie_weights=False)

    def tensors(self, path: str, names: Container[str] | None = None) -> dict[str, Tensor]:
        """What the model's layers compute with on ``path`` instead of their own tensors; all of it, or ``names``."""

        def wants(name: str) -> bool:
            return names is None or name in names

        wanted = map(self.layer, filter(wants, self._partition.prunable))
        layers = [replace(layer, mask=like(layer.mask, layer.weight)) for layer in wanted]
        if path == "pruned" and not self.training:  # the product is M * W, whatever the method trains with
            seen = {layer.name: views.kept(layer.weight, layer.mask) for layer in layers}
        else:
            seen = {layer.name: self.method.view(path, layer, self.state) for layer in layers}
        if path != "pruned":
            private = self._private(path)
            seen |= {name: self.model.get_parameter(name).detach() for name in self._shared if wants(name)}
            seen |= {name: self.model.get_buffer(name).clone() for name in self._shared_buffers if wants(name)}
            for name, tensor in private.named_parameters():  # what is frozen in the model is frozen on every path
                if wants(first := self._first_names.get(name, name)):
                    parameter = self.model.get_parameter(name)
                    own = fsdp.in_place_of(name, parameter, tensor)
                    seen[first] = own if parameter.requires_grad else own.detach()
            owned = {self._first_names.get(name, name): buffer for name, buffer in private.named_buffers()}
            seen |= {name: buffer for name, buffer in owned.items() if wants(name)}
        return seen

    def _private(self, path: str) -> Nested:
        return cast(Nested, self.get_submodule(path))

    def private_modules(self) -> dict[str, nn.Module]:
        """The pruned path's own modules: the model's."""
        return {name: self.model.get_submodule(name) for name in self._partition.private}

    @torch.no_grad()
    def copy_private(self, part: nn.Module | None = None) -> None:
        """Give each further path the pruned path's private layers: all, or those that are or contain ``part``."""
        for path in list(self.method.paths)[1:]:
            for name, module in self.private_modules().items():
                if part is None or any(inner is part for inner in module.modules()):
                    self._private(path).get_submodule(name).load_state_dict(module.state_dict())

    @property
    def layers(self) -> list[PrunableWeight]:
        """The prunable weights with their masks: live tensors."""
        return [self.layer(name) for name in self._partition.prunable]

    def layer(self, name: str) -> PrunableWeight:
        """The prunable weight of that name with its mask: live tensors."""
        layout, mask = self._partition.prunable[name], self._masks.get_buffer(name)
        return PrunableWeight(name, fsdp.weight_of(self.model, name, mask), mask, **vars(layout))

    @property
    def masks(self) -> dict[str, Tensor]:
        """Parameter name -> bool tensor, True = kept."""
        return {name: self._masks.get_buffer(name) for name in self._partition.prunable}

    @property
    def first_mask(self) -> Tensor:
        """One of the masks, for what is the same of all."""
        return self._masks.get_buffer(next(iter(self._partition.prunable)))

    @property
    def state(self) -> dict[str, Tensor]:
        """The method's tensors by name, live."""
        return dict(self._state.named_buffers())

    @property
    def kept(self) -> Tensor:
        """How many weights each mask keeps."""
        return self._counts.of(list(self.masks.values()))

    def remember_counts(self) -> None:
        """Called where every process comes by, so that one of them may log ``sparsity`` or ``metrics()`` alone."""
        if is_distributed() and any(map(is_sharded, self.masks.values())):
            self._counts.of(list(self.masks.values()))

    def follow_shards(self) -> None:
        """Shard the masks and the method's tensors as the weights are, which may have been sharded after wrapping."""
        for layer in self.layers if is_distributed() else ():
            if is_sharded(layer.weight):
                fsdp.check_method(self.method)
            if must_follow(layer.mask, layer.weight):
                put(self._masks, layer.name, like(layer.mask, layer.weight))
                for name, tensor in self.state.items():
                    if name.endswith(f".{layer.name}") and tensor.shape == layer.weight.shape:
                        put(self._state, name, like(tensor, layer.weight))
