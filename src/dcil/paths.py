"""Paths: one unmodified module, computed through a method's views once per path.

Pruned weights and masks are shared by the paths; each further path has norm layers and a classifier for itself.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dcil import fsdp, wiring
from dcil.batch_share import first_samples
from dcil.batched_views import batched
from dcil.bindings import Bindings
from dcil.checks import Checks
from dcil.choice import Choice
from dcil.copies import copied
from dcil.errors import unknown
from dcil.method import Method
from dcil.naming import ASKED, Nested, answer, first_names, put, tied_names
from dcil.partition import divide
from dcil.sharding import Counts, is_distributed, is_sharded
from dcil.weight import PrunableWeight

Self = TypeVar("Self", bound="Paths")
Views = dict[str, Tensor]


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
        self.method, self.model = method, method.prepare(model)
        self._partition = divide(self.model, method, prunable, private, classifier)
        self._masks, self._state = Nested(), Nested()
        for name in self._partition.prunable:
            put(self._masks, name, torch.ones_like(self.model.get_parameter(name), dtype=torch.bool))
        owned = self.private_modules()
        for path in list(method.paths)[1:]:
            self.add_module(path, Nested())
            for name, module in copied(owned).items():  # all at once, so that what is tied stays tied
                put(self._private(path), name, module)
        own = {id(t) for module in owned.values() for t in (*module.parameters(), *module.buffers())}
        parameters, buffers = self.model.named_parameters(), self.model.named_buffers()
        self._shared = [n for n, p in parameters if n not in self._partition.prunable and id(p) not in own]
        self._shared_buffers = [n for n, b in buffers if id(b) not in own]
        self._first_names, self._tied_names = first_names(self.model), tied_names(self.model)
        self._checks, self._counts = Checks(list(method.paths)), Counts()
        self._bindings: Bindings | None = None
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
        paths, share = list(self.method.paths) if self.training else ["pruned"], self.method.share
        self._checks.masks(self)  # sees layers that were exchanged, which the bindings would follow
        with self.bindings.settled():
            views = self.views(paths)
            outputs = {p: self._output(p, views.get(p), *first_samples(args, kwargs, share(p))) for p in paths}
        return outputs if self.training else outputs["pruned"]

    def path(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The output of one path."""
        if name not in list(self.method.paths):
            raise unknown("path", str(name), self.method.paths)
        return self._output(name, self.views([name]).get(name), args, kwargs)

    def _output(self, path: str, views: Views | None, args: Any, kwargs: Any) -> Any:
        blocks = fsdp.find_blocks(self)
        seen = self.tensors(path, fsdp.names_outside(self.model, blocks), views)
        with self._checks.watched(self, path, seen), fsdp.substituted(blocks, lambda names: self.tensors(path, names)):
            output = self.call(seen, *args, **kwargs)
        self._checks.output(path, output)
        for name, (table, key) in self.bindings.private_buffers.get(path, ()):
            if (new := seen[name]) is not (buffer := table[key]):  # a module that assigned it anew left the new one
                buffer.copy_(new.detach())
        return output

    def call(self, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The model's output with ``tensors`` in place of its own; a tensor that the model replaced is left there."""
        if torch.compiler.is_compiling():  # as compilers know it
            tensors.update({name: tensors[first] for name, first in self._tied_names.items() if first in tensors})
            # Torch's own tying puts the wrong tensor back into a module that has two names.
            return functional_call(self.model, tensors, args, kwargs, tie_weights=False)
        return self.bindings.call(self.model, tensors, args, kwargs)

    def tensors(self, path: str, names: Container[str] | None = None, views: Views | None = None) -> Views:
        """What the model's layers compute with on ``path`` instead of their own tensors; all of it, or ``names``."""
        views = self.views([path]).get(path) if names is views is None else views
        return fsdp.tensors(self, path, names) if views is None else views | self.bindings.besides_views(path)

    def views(self, paths: Sequence[str]) -> dict[str, Views]:
        """What the layers of each path see in place of the prunable weights; nothing if these are sharded."""
        if fsdp.find_blocks(self):
            fsdp.follow_shards(self)
            fsdp.remember_counts(self)
        self._checks.masks(self)
        if self.is_sharded:
            return {}
        method, layers, state = self.method, self.layers, self.state
        if not self.training and "pruned" in paths:  # whatever the method trains with
            return {"pruned": {layer.name: method.product(layer, state) for layer in layers}}
        keys = {path: method.view_key(path) for path in paths}
        found = batched({path: key for path, key in keys.items() if key is not None}, layers)
        for path in keys.keys() - found.keys():
            found[path] = {layer.name: method.view(path, layer, state) for layer in layers}
        return found

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
    def bindings(self) -> Bindings:
        """The places of the tensors, as the modules are now."""
        if self._bindings is None or not self._bindings.current():
            self._bindings = Bindings(self)
        return self._bindings

    @property
    def layers(self) -> list[PrunableWeight]:
        """The prunable weights with their masks: live tensors."""
        return list(map(self.layer, self._partition.prunable)) if self.is_sharded else self.bindings.layers(self.layer)

    def layer(self, name: str) -> PrunableWeight:
        """The prunable weight of that name with its mask: live tensors."""
        layout, mask = self._partition.prunable[name], self._masks.get_buffer(name)
        return PrunableWeight(name, fsdp.weight_of(self.model, name, mask), mask, **vars(layout))

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the weights, which may be gathered just now."""
        return is_distributed() and any(map(is_sharded, (*self.masks.values(), *self.model.parameters())))

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
