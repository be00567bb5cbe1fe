"""SparseNet: trains a model with a method, counts the steps, moves the masks, hands back the pruned net."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dcil import fsdp, identity, inspection, wiring
from dcil.attachment import Attachment
from dcil.choice import Choice
from dcil.copies import copied, placed
from dcil.counted import Counted
from dcil.errors import UserError
from dcil.finite import FiniteCheck
from dcil.gradient_rules import add_gradient
from dcil.loading import fitting
from dcil.masks import take_masks
from dcil.method import Method, StepContext
from dcil.naming import put, rename_old_keys
from dcil.paths import Paths
from dcil.sharding import whole
from dcil.task import Objective, Task, find_logits
from dcil.update import MaskObserver, StepHooks, Update


class SparseNet(Counted, Paths):
    """Trains ``model`` with ``method``; the model is used as it is and never modified.

        net = SparseNet(model, DCIL(sparsity=0.95, steps=60_000))
        net.attach(opt)                      # the masks move after the optimizer's steps
        loss = net.loss(net(x), y)           # in training, net(x) holds every path's output
        loss.backward(); opt.step()
        sparse = net.finalize()

    The first path ("pruned") uses the model's own norm layers and classifier; each further path ("super") has
    copies of these for itself. What is neither prunable nor private (biases, embeddings, other buffers) counts as
    kept: further paths read it, only the pruned path changes it.

    prunable     parameter-name patterns, or a predicate (name, owning module); default: every Conv, Linear,
                 attention and expert weight outside the private modules
    private      module-name patterns, or a predicate (name, module); default: norm layers and the classifier
    classifier   the classifier's module name, or several; default: the last Linear
    masks        "zeros" prunes what is zero already, a mapping from names to bool tensors sets the masks;
                 the sparsity then grows from there
    """

    hooks: StepHooks
    #: Warn at the mask update that takes a layer's last weight.
    warn_of_empty_layers = True

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        prunable: Choice | None = None,
        private: Choice | None = None,
        classifier: str | Sequence[str] | None = None,
        masks: str | Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(model, method, prunable, private, classifier)
        self._asked, self.hooks = method, method  # an engine that has recorded them puts its own in place
        self._observers: list[MaskObserver] = []
        self._attachment: Attachment | None = None
        self._parts: Mapping[str, Tensor | float] = {}
        self._last_update: Update | None = None
        self._finite = FiniteCheck()
        wiring.CopyOnLoad(self).register()
        self.register_state_dict_pre_hook(fsdp.at_rest)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(fsdp.at_rest)  # type: ignore[no-untyped-call]
        self.reset(masks)
        self.train()
        for doubt in self.summary().doubts:
            warnings.warn(doubt, stacklevel=2)

    @torch.no_grad()
    def reset(self, masks: str | Mapping[str, Tensor] | None = None) -> None:
        """Begin anew with the present weights: step 0, masks and the method's state as at the start."""
        for name in self._partition.prunable:  # created anew, since they may be on another device than the weights
            put(self._masks, name, torch.ones_like(self.model.get_parameter(name), dtype=torch.bool))
        if not any(map(self.method.granularity.supports, self.layers)):
            raise UserError(f"nothing to prune: {self.method.granularity} fits no layer of {type(self.model).__name__}")
        self._steps_done, self._checks.empty = 0, False
        self._set_method(self._asked)
        self._start(masks)

    def _start(self, masks: str | Mapping[str, Tensor] | None) -> None:
        """Set the method's state and the masks that depend on the present weights."""
        self._given_masks: Any = {} if isinstance(masks, Mapping) else masks  # {} keeps masks as they are
        for name, tensor in self.method.init_state(self.layers, self.model).items():
            put(self._state, name, tensor)
        if masks is not None:
            self._set_method(take_masks(masks, self._asked, self.layers))
        elif not self.layers[0].mask.is_meta:
            self.method.start(self.context(None))
        self._kept = self.kept.sum()  # beside the masks, wherever these are now

    # -- training ------------------------------------------------------------------------------------------------

    def loss(
        self,
        outputs: Mapping[str, Any],
        target: Any,
        task: Task = F.cross_entropy,
        logits: Callable[[Any], Tensor] | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """The method's loss over all paths.

        task     the loss of one path, (output, target) -> scalar; torch's own losses get the logits
        logits   finds the logits in an output; default: a tensor, ``.logits``, ``["logits"]``, a tuple's first item
        valid    bool tensor of the positions that count in the KL terms; default: those the task does not ignore
        """
        if not isinstance(outputs, Mapping) or set(outputs) != set(self.method.paths):
            raise UserError(
                f"net.loss must get the outputs of all paths, as net(x) returns them in training, got "
                f"{type(outputs).__name__}: call net.train() first, or use your task's loss in evaluation"
            )
        objective = Objective(task, find_logits if logits is None else logits, valid, self._partition.classes)
        loss = self.method.loss(outputs, target, objective, self._loss_step)
        self._parts = objective.parts
        for layer in self.layers if self.method.adds_gradient else ():
            loss = add_gradient(loss, layer.weight, self.method.added_gradient(layer, self.state))
        return loss

    def attach(self, *optimizers: Any) -> Attachment:
        """Count every step that the optimizer really takes, and update the masks after it, instead of ``step``.

        Accumulated gradients and steps that a GradScaler skips are counted right. With several optimizers the last
        one's steps count. Attaching again replaces the attachment.
        """
        self._attachment = Attachment(self, optimizers, replaces=self._attachment)
        return self._attachment

    def step(self, optimizer: Optimizer | None = None) -> Update | None:
        """Count an optimizer step and update the masks when they are due; returns what changed, or None.

        An optimizer that has not stepped since the last call, because gradients are accumulated or a GradScaler
        skipped the step, counts nothing.
        """
        if self._attachment is not None:
            raise UserError("net.step must not be called after net.attach(optimizer), which counts the steps")
        if optimizer is not None and not self._checks.took_step(self, optimizer):
            return None
        return self.count_step(optimizer)

    @torch.no_grad()
    def count_step(self, optimizer: Optimizer | None) -> Update | None:
        """Count a step that was taken: the only place that does. Engines call it, and it calls the observers."""
        self._checks.step(self.first_mask, self if self._steps_done == 0 else None)
        self._steps_done += 1
        context = self.context(optimizer)
        if not context.layers:  # all of them frozen
            return None
        self.hooks.after_step(context)
        return self.update_masks(optimizer) if self.method.due(self._steps_done) else None

    @torch.no_grad()
    def update_masks(self, optimizer: Optimizer | None = None) -> Update:
        """Recompute the masks for the steps done, due or not; weights that are not finite raise ``Diverged``."""
        context = self.context(optimizer)
        wiring.check_held(self, optimizer)
        self._finite.before_update(self.method, context)
        for observer in self._observers:
            observer.before_update(self._steps_done)
        update = self._last_update = Update(self._steps_done, self.hooks.update_masks(context))
        self._kept.add_(update.changes[0] - update.changes[1])
        if self.warn_of_empty_layers:
            self._checks.kept(list(self.masks), self.kept, self._steps_done)
        for observer in self._observers:
            observer.after_update(update)
        return update

    def add_observer(self, observer: MaskObserver) -> None:
        """Tell ``observer`` of every mask update from now on, before and after it."""
        self._observers.append(wiring.checked_observer(observer))

    def context(self, optimizer: Optimizer | None) -> StepContext:
        """What the method's hooks work on, now: a layer that was frozen after wrapping keeps its mask."""
        fsdp.at_rest(self)
        fsdp.remember_counts(self)
        always = self._partition.frozen
        layers = [layer for layer in self.layers if layer.weight.requires_grad or layer.name in always]
        if self.method.draws_masks and len(layers) < len(self._partition.prunable):
            left = ", ".join(self._partition.prunable.keys() - {layer.name for layer in layers})
            raise UserError(f"{type(self.method).__name__}: every layer must stay trainable, got frozen {left}: "
                            "freeze before wrapping, or name the others in prunable=['…']")  # fmt: skip
        return StepContext(layers, self._steps_done, wiring.checked_state(optimizer), self.state, self.model)

    # -- results --------------------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Optimizer steps counted so far."""
        return self._steps_done

    @property
    def sparsity(self) -> float:
        """The exact fraction of the prunable weights that is pruned now (waits for the device)."""
        self._finite.settle()
        return 1 - int(self.kept.sum()) / sum(mask.numel() for mask in self.masks.values())

    def summary(self) -> inspection.Summary:
        """What is prunable, private and left dense, as a table when printed."""
        part = self._partition
        return inspection.summarise(self.model, part.prunable, self.private_modules(), part.chosen)

    def metrics(self) -> dict[str, float]:
        """Loss parts, KL weight, sparsity in all and by layer, flips of the last update (waits for the device)."""
        self._finite.settle()
        flips = None if self._last_update is None else self._last_update.changes
        return inspection.measure(self._steps_done, self.masks, self.kept, self._parts, flips)

    def groups(self) -> tuple[int, int]:
        """How many of the groups that the method prunes (weights, filters) are pruned, and how many there are."""
        return inspection.count_groups(self.method, self.layers)

    def empty_layers(self) -> list[str]:
        """The names of layers that lost every weight, so that nothing passes them (waits for the device)."""
        return inspection.find_empty(self.layers)

    def notes(self) -> list[str]:
        """What a reader of the result should know (waits for the device)."""
        return inspection.find_notes(self.method, self.model, self.layers, self._steps_done)

    @torch.no_grad()
    def finalize(self) -> nn.Module:
        """The pruned net as a module of your own class, with your own keys and zeros in place; in eval mode.

        Of a sharded net every process gets all of it, in plain tensors; all of them must call this.
        """
        fsdp.at_rest(self)
        self._checks.masks(self)
        self._finite.weights(self.layers, self._steps_done)
        for note in self.notes():
            warnings.warn(note, stacklevel=3)  # past no_grad
        model = copied(self.model, gather=True).eval()
        wiring.CopyOnLoad.remove(model)
        for layer in self.layers:
            seen = whole(self.method.product(layer, self.state))
            model.get_parameter(layer.name).copy_(seen.masked_fill(~whole(layer.mask), 0))  # 0, not -0.0
        return model

    # -- state ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_model(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the plain model's weights into every path; masks and method start from them, if there was no step."""
        with fitting(self, self.model, state_dict, "the model (load_state_dict takes one of the net)"):
            found = self.model.load_state_dict(placed(state_dict, self.model), strict=strict)
        if self._steps_done == 0:
            self._start(self._given_masks)
        return found

    def take_position(self, other: SparseNet) -> None:
        """Take over the method and the steps done of ``other``, whose tensors were copied."""
        self._set_method(wiring.checked_net(other, SparseNet).method)
        self._steps_done = other._steps_done

    def get_extra_state(self) -> Tensor:
        return identity.pack(self.method, self._steps_done)

    def set_extra_state(self, state: Tensor) -> None:
        method, self._steps_done = identity.unpack(state, self.method)
        self._set_method(method)
        self._checks.empty = False

    def to_empty(self, *, device: Any, recurse: bool = True) -> SparseNet:
        self._checks.empty = True  # masks hold whatever was in memory
        return super().to_empty(device=device, recurse=recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        with fitting(self, self, state_dict, "the net (load_model takes one of the model)"):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        rename_old_keys(state_dict, prefix)
        identity.check(state_dict, prefix, self.method)  # before anything is loaded
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        wiring.CopyOnLoad.remove(self)
        wiring.CopyOnLoad(self).register()

    def _set_method(self, method: Method) -> None:
        if self.hooks is self.method:
            self.hooks = method
        self.method = method
        self._steps_done = self._steps_done  # its losses may begin at other steps

    def extra_repr(self) -> str:
        return f"method={self.method}, prunable={list(self._partition.prunable)}, steps_done={self._steps_done}"
