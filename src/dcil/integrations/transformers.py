"""transformers: a Trainer that prunes while it trains.

trainer = SparseTrainer(model=model, method=dcil.DCIL(sparsity=0.9, steps=10_000), args=args, train_dataset=data)
trainer.train()                             # then ``model`` holds the zeros
trainer.save_model("sparse")                # the pruned network, for ``from_pretrained`` of its own class
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dcil.errors import UserError, missing_extra
from dcil.integrations.accelerate import SparseModel
from dcil.integrations.model_loss import Batch, count_labels, pick_logits
from dcil.integrations.peft import merge
from dcil.integrations.pruned_weights import is_final, write_zeros, zeros_in_place
from dcil.method import Method
from dcil.net import SparseNet

try:
    from transformers import Trainer, TrainerCallback
except ImportError:
    raise missing_extra("transformers", "transformers") from None

#: The whole state of training, beside the pruned network in a checkpoint's folder.
STATE_FILE = "sparse_state.pt"


class SparsityCallback(TrainerCallback):
    """Counts the optimizer's steps, logs ``net.metrics()``, and writes the zeros into the model at the end.

    SparseTrainer has one. For a SparseModel in another Trainer: ``SparsityCallback(net).add_to(trainer)``.
    """

    def __init__(self, net: SparseNet) -> None:
        self.net = net

    def add_to(self, trainer: Any) -> None:
        """Add to a trainer ahead of its loggers, which take the logs as they find them."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.net.attach(objects["optimizer"])
        steps, method = self.net.steps_done, self.net.method
        if steps != state.global_step:
            warnings.warn(f"the method goes on from step {steps}, the Trainer from {state.global_step}", stacklevel=2)
        if state.max_steps < method.steps:
            hint = "the sparsity asked for comes late or never" if method.prunes else "its schedule is cut"
            warnings.warn(
                f"the Trainer takes {state.max_steps} of the method's {method.steps} steps: {hint}", stacklevel=2
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **objects: Any) -> None:
        if logs is not None and "loss" in logs:
            # Trainer's own "loss" cannot stand beside "loss/…" in stores that make folders of names (MLflow's).
            shown = {re.sub("^loss/", "losses/", key): value for key, value in self.net.metrics().items()}
            # One value per layer is for loggers; nobody reads it in a terminal.
            by_layer = {key for key in shown if key.startswith("layer_sparsity/") and not args.report_to}
            shown = {key: value for key, value in shown.items() if key not in {"step", *by_layer}}
            logs |= shown
            state.log_history[-1] |= shown

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if is_final(self.net):
            write_zeros(self.net)
        else:
            warnings.warn(
                f"training ended at a sparsity of {self.net.sparsity:.3f} instead of {self.net.method.sparsity:g}: the "
                "model keeps all its weights, save_model writes what is pruned by now", stacklevel=2
            )  # fmt: skip


class SparseTrainer(Trainer):
    """A Trainer that prunes: ``model`` with ``method``, or a SparseModel; everything else as for Trainer.

    Evaluation, prediction and what is saved are the pruned network. Checkpoints hold the whole state beside it, so that
    ``train(resume_from_checkpoint=…)`` goes on exactly. For another Trainer: ``class Mine(SparseTrainer, Theirs)``.

    method    a dcil.Method, or what makes one of the number of steps: ``functools.partial(dcil.DCIL, sparsity=0.9)``
    prunable, private, classifier, masks, logits, valid   as for SparseModel
    """

    model: Any
    model_wrapped: Any
    label_smoother: Any
    compute_loss_func: Any

    def __init__(
        self, model: Any = None, *args: Any, method: Method | Callable[..., Method] | None = None, prunable: Any = None,
        private: Any = None, classifier: Any = None, masks: Any = None, logits: Callable[[Any], Tensor] = pick_logits,
        valid: Callable[[Any, Batch], Tensor | None] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if isinstance(model, SparseNet) and not isinstance(model, SparseModel):
            raise UserError("the model must be a plain one with method=…, or a SparseModel, got a SparseNet")
        super().__init__(model.model if isinstance(model, SparseNet) else model, *args, **options)
        refuse(self)
        self.method = method
        self.choices = {"prunable": prunable, "private": private, "classifier": classifier, "masks": masks,
                        "logits": logits, "valid": valid}  # fmt: skip
        self._net = model if isinstance(model, SparseModel) else self.wrap()
        self.callback = SparsityCallback(self._net)
        self.callback.add_to(self)
        if self.label_smoother is not None:
            self.label_smoother = over_paths(self, self.label_smoother)
        if self.compute_loss_func is not None:
            self.compute_loss_func = over_paths(self, self.compute_loss_func)

    def wrap(self) -> SparseModel:
        """The model with the method, whose steps are the Trainer's where they are not given."""
        method = self.method
        if not isinstance(method, Method) and callable(method):
            method = method(steps=self.set_initial_training_values(self.args, self.get_train_dataloader())[-1])
        if not isinstance(method, Method):
            raise UserError(f"method must be a dcil.Method such as DCIL(sparsity=0.9, steps=10_000), got {method!r}")
        net = SparseModel(self.model, method, **self.choices)
        self.model = self.model_wrapped = net.model
        return net

    @property
    def net(self) -> SparseModel:
        """The SparseNet that is trained; a new one when ``model_init`` has made a new model."""
        if self._net.model is not self.model:
            self.callback.net = self._net = self.wrap()
        return self._net

    # -- training: the net instead of the model ------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Optimizer:
        plain, self.model = self.model, self.net
        try:
            optimizer: Optimizer = super().create_optimizer()
            return optimizer
        finally:
            self.model = plain

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            known = self.accelerator._models
            return self.net if known else self.accelerator.prepare_model(self.net, evaluation_mode=True)
        return self.accelerator.prepare_model(self.net) if model in (self.model, self.net) else model

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        several = len(batch_samples) > 1 or self.args.world_size > 1  # else a batch's share is 1, however it is counted
        own = self.label_smoother is None and self.compute_loss_func is None
        if several and own and not self.net.recognised:
            self.net.probe(self._prepare_inputs(batch_samples[0]))
        self._loss_shifts_labels = self.net.shifted_count = self.net.shifted
        return super()._get_num_items_in_batch(batch_samples, device)

    # -- evaluation and files: the pruned network ---------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        with zeros_in_place(self.net):  # for generate() and others that call the model itself
            return super().evaluation_loop(*args, **options)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        plain = self.model
        with zeros_in_place(self.net), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint need not be as sparse as asked for
            if hasattr(plain, "merge_and_unload"):  # adapters alone would lose the zeros of what they adapt
                self.model = merge(self.net)
            try:
                super()._save(output_dir, state_dict)
            finally:
                self.model = plain

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.args.should_save:
            torch.save(self.net.state_dict(), os.path.join(output_dir, STATE_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        file = os.path.join(resume_from_checkpoint, STATE_FILE)
        if not os.path.exists(file):
            raise UserError(f"a checkpoint of SparseTrainer must hold {STATE_FILE}, got {resume_from_checkpoint}: "
                            "start from other weights with from_pretrained")  # fmt: skip
        self.net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # A network that is not yet as sparse as asked for is better, and not what was asked for.
        return is_final(self.net) and bool(super()._determine_best_metric(metrics, trial))


def refuse(trainer: Any) -> None:
    """Refuse settings of the Trainer that cannot be right, with the way out."""
    args = trainer.args
    refused = {
        "gradient_checkpointing": (args.gradient_checkpointing, "layers would be recomputed outside of their path's "
                                   "view; use smaller batches with gradient_accumulation_steps"),
        "deepspeed": (args.deepspeed, "use torchrun without it"),
        "fsdp": (args.fsdp, "shard with fully_shard in a loop of your own"),
        "n_gpu": (args.n_gpu > 1, "use torchrun, one process per GPU"),
        "use_liger_kernel": (args.use_liger_kernel, "it computes the loss without logits"),
        "parallelism_config": (args.parallelism_config, "use torchrun without it"),
    }  # fmt: skip
    for name, (on, way_out) in refused.items():
        if on:
            raise UserError(f"SparseTrainer: {name} must not be set, got {getattr(args, name)!r}: {way_out}")
    model = trainer.model
    if hasattr(model, "peft_config") and not hasattr(model, "merge_and_unload"):
        raise UserError(f"SparseTrainer: adapters must be mergeable, got {type(model).__name__} with prompts that are "
                        "saved without the pruned weights: use LoRA, or prune before adding them")  # fmt: skip


def over_paths(trainer: SparseTrainer, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of one output (label smoothing, compute_loss_func) as a loss of all paths."""
    smoothing = function is trainer.label_smoother

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None, **more: Any) -> Tensor:
        net, batch = trainer.net, {"labels": labels}
        if smoothing:  # a cross-entropy; Trainer decides by the name of the model what is shifted, and sees the net's
            net.recognised, more["shift_labels"] = True, net.shifted
        if not net.training:
            return function(outputs, labels, num_items_in_batch=num_items_in_batch, **more)
        share = 1 if num_items_in_batch is None else count_labels(batch, net.shifted_count) / num_items_in_batch

        def task(output: Any, target: Any) -> Tensor:
            return function(output, target, num_items_in_batch=num_items_in_batch, **more) / share

        return net.loss_of_all(outputs, batch, task) * share

    return loss
