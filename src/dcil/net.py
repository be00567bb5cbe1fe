"""SparseNet: one unmodified module, computed through a method's views on one or more paths."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from dcil import views
from dcil.errors import UserError, unknown
from dcil.method import Method, StepContext, StepHooks, Task
from dcil.partition import Choice, checkpointing_refused, find_private, find_prunable
from dcil.weight import PrunableWeight


@dataclass(frozen=True)
class Update:
    """A mask update: after which step, and how many weights it (revived, dropped), left on the device."""

    step: int
    changes: Tensor


class MaskObserver(Protocol):
    """Called before and after every mask update; see ``SparseNet.add_observer``."""

    def before_update(self, step: int) -> None: ...

    def after_update(self, update: Update) -> None: ...


class SparseNet(nn.Module):
    """Trains ``model`` with ``method``; the model is used as it is and never modified.

        net = SparseNet(model, DCIL(sparsity=0.95, steps=60_000))
        loss = net.loss(net(x), y)           # in training, net(x) holds every path's output
        loss.backward(); opt.step()
        net.step(opt)                        # after every optimizer step that was really taken
        sparse = net.finalize()

    The first path ("pruned") uses the model's own norm layers and classifier; each further path ("super") has
    copies of these for itself. What is neither prunable nor private (biases, embeddings, other buffers) counts as
    kept: further paths read it, only the pruned path changes it.

    prunable     parameter-name patterns, or a predicate (name, owning module); default: every Conv and Linear
                 weight outside the private modules
    private      module-name patterns, or a predicate (name, module); default: norm layers and the classifier
    classifier   the classifier's module name; default: the last Linear
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        prunable: Choice | None = None,
        private: Choice | None = None,
        classifier: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(method, Method):
            raise UserError(f"method must be a dcil.Method such as DCIL(sparsity=0.95, steps=60_000), got {method!r}")
        self.method = method
        self.model = model = method.prepare(model)
        owned = find_private(model, private, classifier)
        self._prunable = find_prunable(model, prunable, owned, method)
        if private is None:  # a weight asked for by name is prunable, even if it would be private by default
            owned = {
                n: m for n, m in owned.items() if not any(f"{n}.{k}" in self._prunable for k, _ in m.named_parameters())
            }
        self._masks = nn.Module()
        for name in self._prunable:
            mask = torch.ones_like(model.get_parameter(name), dtype=torch.bool)
            self._masks.register_buffer(_plain(name), mask)
        if not any(map(method.granularity.supports, self.layers)):
            raise UserError(f"nothing to prune: {method.granularity} fits no layer of {type(model).__name__}")
        self._copy_private(owned)
        self._state = nn.Module()
        for name, tensor in method.init_state(self.layers, model).items():
            self._state.register_buffer(_plain(name), tensor)
        self._steps_done = 0
        self.hooks: StepHooks = method  # an engine that has recorded them puts its own in place
        self._observers: list[MaskObserver] = []
        self.train()
        with torch.no_grad():
            method.start(self.context(None))

    def _copy_private(self, owned: Mapping[str, nn.Module]) -> None:
        """Give each further path its own copies of the private modules; everything else is shared."""
        self._private = nn.Module()
        for path in list(self.method.paths)[1:]:
            self._private.add_module(path, nn.Module())
            for name, module in copy.deepcopy(dict(owned)).items():  # all at once, so that what is tied stays tied
                self._private.get_submodule(path).add_module(_plain(name), module)
        own = {id(t) for module in owned.values() for t in (*module.parameters(), *module.buffers())}
        parameters, buffers = self.model.named_parameters(), self.model.named_buffers()
        self._shared = [n for n, p in parameters if n not in self._prunable and id(p) not in own]
        self._shared_buffers = [n for n, b in buffers if id(b) not in own]

    # -- the paths -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In training: {path name: its output}. In evaluation: the pruned path's plain output."""
        if not self.training:
            return self.path("pruned", *args, **kwargs)
        return {name: self.path(name, *args, **kwargs) for name in self.method.paths}

    def path(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The output of one path."""
        if name not in self.method.paths:
            raise unknown("path", name, self.method.paths)
        seen = self.tensors(name)
        with checkpointing_refused():
            output = functional_call(self.model, seen, args, kwargs)
        if name != "pruned":  # a module that assigned its buffer anew left the new one in ``seen``
            for key, buffer in self._private.get_submodule(name).named_buffers():
                if (new := seen[key.replace("/", ".")]) is not buffer:
                    buffer.copy_(new.detach())
        return output

    def tensors(self, path: str) -> dict[str, Tensor]:
        """What the model's layers compute with on ``path`` instead of their own tensors."""
        if path == "pruned" and not self.training:  # the product is M * W, whatever the method trains with
            seen = {layer.name: views.kept(layer.weight, layer.mask) for layer in self.layers}
        else:
            seen = {layer.name: self.method.view(path, layer, self.state) for layer in self.layers}
        if path != "pruned":
            seen |= {name: self.model.get_parameter(name).detach() for name in self._shared}
            seen |= {name: self.model.get_buffer(name).clone() for name in self._shared_buffers}
            private = self._private.get_submodule(path)
            seen |= {name.replace("/", "."): tensor for name, tensor in private.named_parameters()}
            seen |= {name.replace("/", "."): tensor for name, tensor in private.named_buffers()}
        return seen

    # -- training ------------------------------------------------------------------------------------------------

    def loss(self, outputs: Mapping[str, Any], target: Any, task: Task = F.cross_entropy) -> Tensor:
        """The method's loss over all paths; ``task(output, target)`` is the loss of one."""
        if not isinstance(outputs, Mapping):
            raise UserError(
                f"net.loss must get the outputs of all paths, as net(x) returns them in training, got "
                f"{type(outputs).__name__}: call net.train() first, or use your task's loss in evaluation"
            )
        return self.method.loss(outputs, target, task, self._steps_done)

    @torch.no_grad()
    def step(self, optimizer: Optimizer | None = None) -> Update | None:
        """Count an optimizer step and update the masks when they are due; returns what changed, or None.

        This is the only place where steps are counted: engines call it too, and it calls the observers.
        """
        self._steps_done += 1
        self.hooks.after_step(self.context(optimizer))
        return self.update_masks(optimizer) if self.method.due(self._steps_done) else None

    @torch.no_grad()
    def update_masks(self, optimizer: Optimizer | None = None) -> Update:
        """Recompute the masks for the steps done, whether that is due or not."""
        for observer in self._observers:
            observer.before_update(self._steps_done)
        update = Update(self._steps_done, self.hooks.update_masks(self.context(optimizer)))
        for observer in self._observers:
            observer.after_update(update)
        return update

    def add_observer(self, observer: MaskObserver) -> None:
        """Tell ``observer`` of every mask update from now on, before and after it."""
        self._observers.append(observer)

    def context(self, optimizer: Optimizer | None) -> StepContext:
        """What the method's hooks work on, now."""
        return StepContext(self.layers, self._steps_done, optimizer, self.state, self.model)

    @property
    def steps_done(self) -> int:
        """Optimizer steps counted so far."""
        return self._steps_done

    # -- results --------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[PrunableWeight]:
        """The prunable weights with their masks: live tensors."""
        return [
            PrunableWeight(name, self.model.get_parameter(name), mask, found.transposed, found.conv_groups)
            for (name, mask), found in zip(self.masks.items(), self._prunable.values(), strict=True)
        ]

    @property
    def masks(self) -> dict[str, Tensor]:
        """Parameter name -> bool tensor, True = kept."""
        return {name: self._masks.get_buffer(_plain(name)) for name in self._prunable}

    @property
    def state(self) -> dict[str, Tensor]:
        """The method's tensors by name, live."""
        return {name.replace("/", "."): tensor for name, tensor in self._state.named_buffers()}

    @property
    def sparsity(self) -> float:
        """The exact fraction of the prunable weights that is pruned now (waits for the device)."""
        total = sum(mask.numel() for mask in self.masks.values())
        return 1 - int(torch.stack([mask.sum() for mask in self.masks.values()]).sum()) / total

    def groups(self) -> tuple[int, int]:
        """How many of the groups that the method prunes (weights, filters) are pruned, and how many there are."""
        granularity = self.method.granularity
        pairs = [granularity.count_pruned(layer) for layer in self.layers if granularity.supports(layer)]
        return sum(dead for dead, _ in pairs), sum(groups for _, groups in pairs)

    def notes(self) -> list[str]:
        """What a reader of the result should know (waits for the device)."""
        found = [f"layer {name} lost every weight: nothing passes it any more" for name in self.empty_layers()]
        granularity, asked = self.method.granularity, self.method.sparsity
        if misfits := [layer.name for layer in self.layers if not granularity.supports(layer)]:
            found.append(f"{granularity} does not fit these layers, which stay dense: {', '.join(misfits)}")
        dead, groups = self.groups()
        if abs(dead - int(asked * groups)) > 0.005 * groups:
            found.append(f"asked for a sparsity of {asked:g}, reached {dead / max(1, groups):.4f}")
        return found + self.method.notes(self.model)

    def empty_layers(self) -> list[str]:
        """The names of layers that lost every weight, so that nothing passes them (waits for the device)."""
        alive = torch.stack([mask.any() for mask in self.masks.values()]).tolist()
        return [name for name, any_kept in zip(self.masks, alive, strict=True) if not any_kept]

    @torch.no_grad()
    def finalize(self) -> nn.Module:
        """The pruned net as a module of your own class, with your own keys and zeros in place; in eval mode."""
        for note in self.notes():
            warnings.warn(note, stacklevel=3)  # past no_grad
        # Tensors that a forward pass left on a module cannot be copied with their history.
        stray = [v for m in self.model.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
        model = copy.deepcopy(self.model, {id(v): v.detach().clone() for v in stray}).eval()
        for name, mask in self.masks.items():
            model.get_parameter(name).masked_fill_(~mask, 0)
        return model

    # -- state ---------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        # A tensor, so that the state dict can go into formats that hold nothing else.
        return torch.tensor(self._steps_done, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self._steps_done = int(state)

    def extra_repr(self) -> str:
        return f"method={self.method}, prunable={list(self._prunable)}, steps_done={self._steps_done}"


def _plain(name: str) -> str:
    """A dotted name as one that torch accepts for a buffer or a submodule."""
    return name.replace(".", "/")
