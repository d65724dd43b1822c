# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer over partitions: `Trainer` here, or `TrainerMixin` before a class of your own in the bases.

The loop calls `training_step`, which is a step of lamina's here: its body has `compute_loss` called with each
microbatch, and the backward run. All ranks of a pipeline run the loop; the leading one runs the bodies. Accelerate sees
one process for each copy of the model, and exchanges nothing: what it gathers lamina does.
"""

import copy
import os
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.operations import recursively_apply
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import find_batch_size

import lamina
from lamina import _lamina
from lamina.errors import UsageError
from lamina.integrations.results import joined
from lamina.job import current
from lamina.util.files import replacing

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """Trains the model of a Trainer over the ranks of a job, which `lamina.init` has begun.

    Errors:
        UsageError: what of the Trainer is not there, when it is made.
    """

    _divides: bool | None = None  # whether losses are divided by the items that they are given

    def create_accelerator_and_postprocess(self) -> None:
        """Shows Accelerate the copies of the model as its processes, none of which it has to know."""
        _check(self.args)
        copies = {"num_processes": lamina.dp_size(), "distributed_type": DistributedType.NO}
        vars(PartialState()).update(copies, process_index=lamina.dp_rank(), device=lamina.device())
        is_first = {"is_main_process": lamina.rank() == 0, "is_local_main_process": lamina.local_rank() == 0}
        ranks = {"process_index": lamina.rank(), "local_process_index": lamina.local_rank()}  # who logs and writes
        self.args.distributed_state = SimpleNamespace(**copies, **ranks, **is_first)
        self.args._n_gpu = min(self.args.n_gpu, 1)
        vars(self.args)["_setup_devices"] = lamina.device()  # a cached property
        if lamina.dp_size() > 1 and self.args.accelerator_config.dispatch_batches is None:
            self.args.accelerator_config.dispatch_batches = False
        super().create_accelerator_and_postprocess()
        self.accelerator.no_sync = lambda model: model.no_sync()
        if lamina.dp_size() > 1:
            self.accelerator.gather, self.accelerator.pad_across_processes = _gather, _pad
            self.accelerator.reduce = _refuse_reduce

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leaves the model where it is: it moves when it is cut, so that a rank has room only for its part."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        job = current.job()
        if not job.has_model:
            lamina.DistributedModel(self.model, average_grads_across_microbatches=False)
        if job.model.module is not self.model:
            raise UsageError("a job trains one model: lamina.shutdown() ends it, and lamina.init() begins another")
        self.model_wrapped = job.model
        return job.model

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the Trainer's."""
        self.optimizer = lamina.DistributedOptimizer(super().create_optimizer(model))
        return self.optimizer

    def compute_loss_context_manager(self) -> Any:
        """Autocast, which Accelerate would wrap the model with."""
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Runs a batch, forward and backward, and gives the loss.

        Args:
            model: the Trainer's.
            inputs: the batch, by the names of the model's arguments.
            num_items_in_batch: of all microbatches and copies, where the loss is divided by it.
        """
        model.train()
        inputs = self._prepare_inputs(inputs)
        is_scaled = self._is_scaled(inputs, num_items_in_batch)
        items = num_items_in_batch if self.loss_is_scaled_for_ga is None or is_scaled else None
        return self._train(inputs, items, is_scaled, find_batch_size(inputs)).reduce_sum()

    @lamina.step
    def _train(self, inputs: dict[str, Any], items: Any, is_scaled: bool, rows: int | None) -> torch.Tensor:
        with self.compute_loss_context_manager():
            given = copy.copy(inputs)  # from which labels are taken, if they are smoothed
            loss = self.compute_loss(self.model_wrapped, given, num_items_in_batch=items if is_scaled else None)
        if not is_scaled:
            loss = loss * self._part(inputs, items, rows)
            loss = loss if items is not None else loss / self.current_gradient_accumulation_steps
        self.model_wrapped.backward(loss)
        return loss

    def _is_scaled(self, inputs: dict[str, Any], items: Any) -> bool:
        """Tells whether losses are sums that were divided by the items (tokens) of all batches of an update, so that
        those of microbatches add up; else they are means. Models that are given the items may ignore them: the first
        batch is asked twice."""
        if self.loss_is_scaled_for_ga is not None or self.compute_loss_func is not None:
            return self.loss_is_scaled_for_ga is not False
        if items is None or not self.model_accepts_loss_kwargs:
            return False
        if self._divides is None:
            was_training = self.model_wrapped.training
            self.model_wrapped.eval()
            with torch.no_grad():
                once, twice = (self._loss(inputs, items * factor).outputs[0] for factor in (1, 2))
            self.model_wrapped.train(was_training)
            self._divides = not torch.equal(once, twice)
        return self._divides

    @lamina.step
    def _loss(self, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        with self.compute_loss_context_manager():
            return self.compute_loss(self.model_wrapped, copy.copy(inputs), num_items_in_batch=items)

    def _part(self, inputs: dict[str, Any], items: Any, rows: int | None) -> Any:
        """The part of a microbatch in the batches of an update: of their items, else of the rows of its batch."""
        if items is None:
            return find_batch_size(inputs) / rows
        copies = lamina.dp_size() if self.args.average_tokens_across_devices else 1
        labels = inputs.get("shift_labels", inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"])
        count = labels.ne(-100).sum()
        if count.device.type == "cpu":
            return count.item() * copies / float(items)
        return count.double() * copies / items  # there, as `items`: nobody waits for it

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluates a batch, each microbatch by itself.

        Args:
            model: the Trainer's.
            inputs: the batch, by the names of the model's arguments.
            prediction_loss_only: whether only the loss is returned.
            ignore_keys: what of the model's outputs is left out.

        Returns:
            Loss, outputs and labels, each None where there is none.
        """
        inputs = self._prepare_inputs(inputs)
        items = super()._get_num_items_in_batch([inputs], self.args.device)
        is_scaled = self._is_scaled(inputs, items)
        self._items_in_step = items if is_scaled else None
        with torch.no_grad():
            given = inputs, prediction_loss_only, ignore_keys
            loss, logits, labels = self._predict(*given, items, is_scaled, find_batch_size(inputs))
        return None if loss is None else loss.reduce_sum(), joined(logits), joined(labels)

    @lamina.step
    def _predict(self, inputs: Any, loss_only: bool, ignored: Any, items: Any, is_scaled: bool, rows: Any) -> tuple:
        loss, logits, labels = super().prediction_step(self.model_wrapped, inputs, loss_only, ignored)
        if loss is not None and not is_scaled:
            loss = loss * self._part(inputs, items, rows)
        return loss, logits, labels

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # nor are there gradients of what other ranks own, which the Trainer would look at

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """As the Trainer's; in a step the whole batch's, for losses that are divided by them."""
        return self._items_in_step if _lamina.in_step() else super()._get_num_items_in_batch(batch_samples, device)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with the mean over the copies of the model."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            tr_loss.copy_(_gather(tr_loss).mean())
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, on all ranks; it is there when this returns."""
        state = self.model_wrapped.state_dict()
        self._save(output_dir, state)
        lamina.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer.state_dict()  # of all ranks together
        if self.args.should_save:
            for name, value in ((OPTIMIZER_NAME, state), (SCHEDULER_NAME, self.lr_scheduler.state_dict())):
                with replacing(os.path.join(output_dir, name), self.args.process_index) as file:
                    torch.save(value, file)

    def _save_rng_state(self, output_dir: str) -> None:
        if lamina.pp_rank() == 0:  # microbatches draw from the generators of the rank that leads
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' Trainer over the ranks of a job: see TrainerMixin."""


def _check(args: transformers.TrainingArguments) -> None:
    """UsageError for arguments that ask for what is not there."""
    if not lamina.is_initialized():
        raise UsageError("call lamina.init(partitions=..., microbatches=..., ddp=True) before the Trainer is made")
    config, copies = current.session().config, lamina.dp_size()
    missing = {
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "parallelism_config": args.parallelism_config,
        "fp16 (bf16 is there)": args.fp16,
        "fp16_full_eval": args.fp16_full_eval,
        "bf16_full_eval": args.bf16_full_eval,
        "torch_compile": args.torch_compile,
        "auto_find_batch_size": args.auto_find_batch_size,
        f"optim={args.optim!r}": "lomo" in str(args.optim),
        "push_to_hub": args.push_to_hub,
        f"use_cpu=True in a job on {lamina.device()} (lamina.init(device=...) chooses)": (
            args.use_cpu and lamina.device().type != "cpu"
        ),
        "tensor_parallel_degree": config.tensor_parallel_degree > 1,
        "training of several copies without ddp": copies > 1 and not config.ddp,
        "batch_rebalance over copies": copies > 1 and args.train_sampling_strategy == "batch_rebalance",
        "dispatch_batches over copies": copies > 1 and args.accelerator_config.dispatch_batches,
        "eval_use_gather_object over copies": copies > 1 and args.eval_use_gather_object,
    }
    if found := [what for what, is_asked in missing.items() if is_asked]:
        raise UsageError(f"{found[0]} is not there with lamina's Trainer")


def _gather(tensors: Any) -> Any:
    """The tensors of all copies of the model, one after the other: Accelerate's gather()."""
    return recursively_apply(
        lambda tensor: torch.cat(lamina.allgather(tensor.reshape(tensor.shape or (1,)).cpu(), lamina.DP_GROUP)).to(
            tensor.device
        ),
        tensors,
    )


def _pad(tensors: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """The tensors, as long along an axis as the longest of a copy: Accelerate's pad_across_processes()."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if dim >= tensor.dim():
            return tensor
        size = tensor.shape[dim]
        missing = max(lamina.allgather(size, lamina.DP_GROUP)) - size
        widths = [0, 0] * (tensor.dim() - 1 - dim) + ([missing, 0] if pad_first else [0, missing])
        return torch.nn.functional.pad(tensor, widths, value=pad_index)

    return recursively_apply(pad, tensors)


def _refuse_reduce(*_: Any, **__: Any) -> Any:
    raise UsageError("accelerator.reduce() is not there with lamina's Trainer: accelerator.gather() is")
