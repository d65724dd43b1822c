# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model that is cut: who notices its backwards, what averages, measures and unscales them."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina.errors import UsageError
from lamina.job import current, parts, ranks
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel
from lamina.optim.grad_scaler import holders
from lamina.optim.options import PlainOptimizers
from lamina.optim.placing import FollowParameters
from lamina.torch_patches import clipping, grad_scaler, zero_grad


class Gradients(parts.Gradients):
    """The gradients of a job's model, which are torch's business until it is cut."""

    def __init__(self):
        self._model: PartitionedModel | None = None

    def begin(self, model: PartitionedModel) -> None:
        """The model is cut: from now on backwards are noticed, and torch's functions know of parts."""
        self._model = model
        job = current.job()
        if model.sharding is not None:
            job.replicas.reducer.set_sharded(model.sharding)
            job.on_end.callback(register_optimizer_step_pre_hook(_require_shards).remove)
            zero_grad.install(shards.zero_grad, model.sharding, job.on_end)
        self.watch()
        self.see_to_norms()
        if ranks.device().type != "cpu":
            job.on_end.callback(register_optimizer_step_pre_hook(FollowParameters().before_step).remove)
        if job.session.size > 1:
            plain = PlainOptimizers(job)
            job.on_end.callback(register_optimizer_step_pre_hook(plain.before_step).remove)
            job.on_end.callback(register_optimizer_step_post_hook(plain.after_step).remove)
        if job.replicas.averages or _replaces(job) or job.sliced:
            grad_scaler.install(self._worst_of_model, holders, self._before_unscaling, job.on_end)
        if job.pipelined:
            grad_scaler.refuse(job.on_end)

    def watch(self) -> None:
        """As `parts.Gradients.watch`."""
        job = current.job()
        scaled = job.leads and job.loss_scale.is_on
        if self._model is None or not (job.replicas.averages or scaled):
            return
        parameters = self._model.own_parameters()
        job.replicas.watch(parameters)
        if scaled:
            job.model.backwards.watch(parameters, self._model.sharding is None and not job.pipelined)

    def let_go(self) -> None:
        """Holds no parameters in the engine until the next `watch`."""
        job = current.job()
        if self._model is not None:
            self._model.forget_table()
            job.model.backwards.watch([], False)
            job.replicas.let_go()

    def complete(self, what: str) -> None:
        """As `parts.Gradients.complete`."""
        if self._model is not None:
            self.watch()
            current.job().replicas.complete(what)

    def see_to_norms(self) -> None:
        """As `parts.Gradients.see_to_norms`."""
        job, model = current.job(), self._model
        aside = job.loss_scale.is_on or _replaces(job) or job.replicas.accumulates
        if model is not None and (aside or not model.whole_everywhere):
            clipping.install(lambda: model.table, _parameter_of, shards.holder, shards.measured, self.complete)
            job.on_end.callback(clipping.remove)

    def see_to_updates(self) -> None:
        """Has steps of optimizers that are no DistributedOptimizer average what is left over, too."""
        current.job().on_end.callback(register_optimizer_step_pre_hook(self._before_update).remove)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """Before a step of an optimizer of the model's parameters; a DistributedOptimizer has seen to it itself."""
        job = current.job_if_any()
        if job is None or self._model is None or job.state_of(optimizer) is not None:
            return None
        own = self._own_ids()
        given = [each for group in optimizer.param_groups for each in group["params"]]
        beside = [each for each in given if id(each) not in own]
        if len(beside) == len(given):
            return None
        if not job.pipelined:
            job.replicas.add(beside)  # averaged with the model's, as those of a DistributedOptimizer
        self.watch()
        job.replicas.before_update()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        return None if closure is None else ((optimizer,), {**kwargs, "closure": self._completing(closure)})

    def _completing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """An optimizer's closure, after which there may be more to average."""

        def closed() -> Any:
            loss = closure()
            self.complete("optimizer.step(closure)")
            return loss

        return closed

    def _before_unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the model has its gradients averaged."""
        if self._is_of_model(optimizer):
            self.complete("GradScaler.unscale_()")

    def _worst_of_model(self, optimizer: torch.optim.Optimizer, found: float) -> float:
        """The largest that any rank of the model's copy has found in its part of the gradients of this optimizer."""
        job = current.job()
        if self._is_of_model(optimizer) if job.sliced else job.state_of(optimizer) is not None:
            for group in ("shard", "one_copy"):
                found = job.session.largest(group, found)
        return found

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """True for one of the job's, and for one that has parameters of this rank's part of the model."""
        own = self._own_ids()
        has_own = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
        return has_own or current.job().state_of(optimizer) is not None

    def _own_ids(self) -> set[int]:
        return set(map(id, self._model.own_parameters()))


def _replaces(job: current.Job) -> bool:
    """True where something may stand for parameters in the groups of optimizers."""
    return job.session.updates_masters or job.session.config.shard_optimizer_state


def _require_shards(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step: the shards of parameters that came in since take their places in a DistributedOptimizer; any
    other one is to have no sharded parameters."""
    if not shards.are_among(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        return
    job = current.job()
    known = job.state_of(optimizer)
    if known is None:
        raise UsageError(
            "optimizer.step() of an optimizer with sharded parameters, which have no gradients of their own: make it "
            "lamina.DistributedOptimizer(optimizer), which updates their shards",
            code="shard-plain-optimizer",
        )
    known.trim(job.partitioned_model)


def _parameter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of the model that a tensor of an optimizer's groups is, or stands for."""
    found = (optimizer.parameter_of(tensor) for optimizer in current.job().optimizers)
    return next((parameter for parameter in found if parameter is not tensor), tensor)
