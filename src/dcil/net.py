"""SparseNet: one unmodified module, seen through a method's views on one or more paths."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from dcil import views
from dcil.errors import UserError, unknown
from dcil.method import Method, StepContext, Task
from dcil.partition import Choice, find_private, find_prunable, single_pass
from dcil.weight import Layer


@dataclass(frozen=True)
class Update:
    """A mask update: after which step, and how many weights it (revived, dropped), left on the device."""

    step: int
    changes: Tensor


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
            raise UserError(f"{method!r} is not a method; one is DCIL(sparsity=0.95, steps=60_000)")
        model = method.prepare(model)
        self.model = model
        self.method = method
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
        if not any(map(method.granularity.fits, self.layers)):
            raise UserError(f"nothing to prune: {method.granularity} fits no layer of {type(model).__name__}")
        self._private = nn.Module()
        for path in list(method.paths)[1:]:
            self._private.add_module(path, nn.Module())
            for name, module in copy.deepcopy(owned).items():  # all at once, so that what is tied stays tied
                self._private.get_submodule(path).add_module(_plain(name), module)
        own = {id(p) for module in owned.values() for p in module.parameters()}
        self._shared = [n for n, p in model.named_parameters() if n not in self._prunable and id(p) not in own]
        own = {id(b) for module in owned.values() for b in module.buffers()}
        self._shared_buffers = [n for n, b in model.named_buffers() if id(b) not in own]
        self._state = nn.Module()
        for name, tensor in method.remember(self.layers, model).items():
            self._state.register_buffer(_plain(name), tensor)
        self._steps_done = 0
        self.mover: Callable[[StepContext], Tensor] = method.move_masks  # an engine puts its recorded form in place
        self.train()
        with torch.no_grad():
            method.start(self.moment(None))

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
        with single_pass():
            output = functional_call(self.model, seen, args, kwargs)
        if name != "pruned":  # a module that assigned its buffer anew left the new one in ``seen``
            for key, buffer in self._private.get_submodule(name).named_buffers():
                if (new := seen[key.replace("/", ".")]) is not buffer:
                    buffer.copy_(new.detach())
        return output

    def tensors(self, path: str) -> dict[str, Tensor]:
        """What the model's layers see on ``path`` instead of their own tensors."""
        if path == "pruned" and not self.training:  # the product is M * W, whatever the method trains with
            seen = {layer.name: views.kept(layer.weight, layer.mask) for layer in self.layers}
        else:
            seen = {layer.name: self.method.see(path, layer, self.state) for layer in self.layers}
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
            raise UserError("loss takes what net(x) gives in training; in evaluation (net.eval()) that is one output")
        return self.method.loss(outputs, target, task, self._steps_done)

    @torch.no_grad()
    def step(self, optimizer: Optimizer | None = None) -> Update | None:
        """Count an optimizer step and move the masks when they are due; says what changed, or None."""
        self._steps_done += 1
        self.method.after_step(self.moment(optimizer))
        return self.move(optimizer) if self.method.due(self._steps_done) else None

    @torch.no_grad()
    def move(self, optimizer: Optimizer | None) -> Update:
        """Move the masks to where the method wants them after the steps done, whether that is due or not."""
        now = self.moment(optimizer)
        return Update(now.step, self.mover(now))

    def moment(self, optimizer: Optimizer | None) -> StepContext:
        """What the method's hooks work on, now."""
        return StepContext(self.layers, self._steps_done, optimizer, self.state, self.model)

    @property
    def steps_done(self) -> int:
        """Optimizer steps counted so far."""
        return self._steps_done

    # -- what came of it -----------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Layer]:
        """The prunable weights with their masks: live tensors."""
        return [
            Layer(name, self.model.get_parameter(name), mask, found.transposed, found.conv_groups)
            for (name, mask), found in zip(self.masks.items(), self._prunable.values(), strict=True)
        ]

    @property
    def masks(self) -> dict[str, Tensor]:
        """Parameter name -> bool tensor, True = kept."""
        return {name: self._masks.get_buffer(_plain(name)) for name in self._prunable}

    @property
    def state(self) -> dict[str, Tensor]:
        """What the method remembers, by name: live tensors."""
        return {name.replace("/", "."): tensor for name, tensor in self._state.named_buffers()}

    @property
    def sparsity(self) -> float:
        """The exact fraction of the prunable weights that is pruned now (waits for the device)."""
        total = sum(mask.numel() for mask in self.masks.values())
        return 1 - int(torch.stack([mask.sum() for mask in self.masks.values()]).sum()) / total

    def groups(self) -> tuple[int, int]:
        """How many of the groups that the method prunes (weights, filters) are pruned, and how many there are."""
        granularity = self.method.granularity
        pairs = [granularity.dead(layer) for layer in self.layers if granularity.fits(layer)]
        return sum(dead for dead, _ in pairs), sum(groups for _, groups in pairs)

    def notes(self) -> list[str]:
        """What somebody who reads the result should know (waits for the device)."""
        found = [f"layer {name} lost every weight: nothing passes it any more" for name in self.empty_layers()]
        granularity, asked = self.method.granularity, self.method.sparsity
        if misfits := [layer.name for layer in self.layers if not granularity.fits(layer)]:
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
