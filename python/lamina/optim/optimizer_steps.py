# SPDX-License-Identifier: Apache-2.0
"""The groups of an optimizer whose parameters live on several ranks, and its steps."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.job import current, groups
from lamina.model.partitioned import PartitionedModel
from lamina.optim.flat_groups import FlatGroups, lie_together
from lamina.optim.lent_optimizer import LentOptimizer
from lamina.torch_patches import zero_grad
from lamina.util.checks import require_positive


class OptimizerSteps:
    """Makes the groups of an optimizer this rank's part of the model, and its steps those of all ranks.

    Args:
        optimizer: of the parameters of the model, all of them or those of this rank.
        scale: what its losses are multiplied by; the job's.

    Attributes:
        parameters: knows what stands in the groups for parameters of the model.
        after_step: called after each step in a job.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scale: _lamina.LossScale):
        self.optimizer = optimizer
        self._scale = scale
        self._torchs = type(optimizer)
        self.after_step: Callable[[], None] = lambda: None
        self._lent = LentOptimizer(optimizer, self.parameter_of, self.part_of_state)
        self._begin()

    def _begin(self) -> None:
        """Makes the engine's part of it in the current job."""
        job = current.job()
        if job.session.updates_divided_over is not None:
            groups.of_job()
        self._engine = _lamina.Optimizer(job.session, self._scale, len(job.optimizers), job.clips_by_default)
        self.parameters = self._engine.parameters
        self._watched = False  # `.grad` of what stands for parameters in the groups

    def beside(self) -> list[str]:
        """The names of members of its groups that are not the model's."""
        known = {name for name, _ in current.job().model.named_parameters()}
        return [name for group in self._members() for name, _, _, _ in group if name not in known]

    def let_go(self, with_states: bool) -> None:
        """Has all parameters of the model in its groups again, as it had before the model was cut; the job's layout
        ends. Without states these are kept elsewhere."""
        for group, members in zip(self.optimizer.param_groups, self._members(), strict=True):
            group["params"][:] = [parameter for _, _, parameter, _ in members]
            if "param_names" in group:
                group["param_names"] = [given for _, given, _, _ in members]
        states = dict.items(self.optimizer.state)
        kept = {key: state for key, state in states if with_states or not isinstance(key, torch.Tensor)}
        self.optimizer.state = collections.defaultdict(dict, kept)
        self._lent.forget_places()

    def count_anew(self) -> None:
        """All ranks have been given the same states: what each of them had loaded before counts no more."""
        self._lent.count_anew()

    def trim(self, model: PartitionedModel) -> None:
        """Makes the groups this rank's part of the model: see Groups in lamina/distributed_optimizer/groups.h."""
        self.parameters.set_model(lambda: model.table, model.sharding)
        has_new = self._engine.trim(self._lent)
        self._give_gradients()
        self._name_groups()
        if has_new and (job := current.job()).leads:
            job.replicas.add(self._engine.beside)
            job.gradients.watch()

    def _give_gradients(self) -> None:
        """Gives tensors that stand for parameters in the groups a class with a `.grad` of ours."""
        stand_ins = [each for each in self._lent.members() if self.parameters.source(each) is not each]
        if not stand_ins:
            return
        for each in stand_ins:
            if type(each) is torch.Tensor:
                each.__class__ = torch.nn.Parameter
        if not self._watched:
            self._watched = True
            zero_grad.give_gradients(self._engine, current.job().on_end)

    def settle(self, model: PartitionedModel | None) -> None:
        """Makes what a program has put into the groups since the model was cut this rank's part; all ranks do."""
        if model is None:
            return
        if not self._engine.are_cut(self._lent):
            self.trim(model)
        self.parameters.share_written()

    def lent(self) -> tuple[_lamina.Optimizer, LentOptimizer]:
        """The engine's part of it, and how that sees the optimizer."""
        return self._engine, self._lent

    def require_own_step(self) -> None:
        """UsageError for a step that the optimizer makes apart from ours, with parts of parameters in its groups."""
        if self._engine.holds_others and not self.parameters.in_step:
            raise UsageError(
                f"{self._torchs.__name__}.step() was called, and not the step() that DistributedOptimizer has given "
                "the optimizer: what it updates are parts of parameters, or masters, and nobody would give the "
                "parameters their values. Call optimizer.step(), looked up after DistributedOptimizer(optimizer)",
                code="optimizer-step-apart",
            )

    def follow(self) -> None:
        """Gives masters the values of parameters that have changed."""
        self._engine.follow()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; UsageError inside the step function of a pipeline."""
        current.everywhere("optimizer.add_param_group()")
        self._torchs.add_param_group(self.optimizer, param_group)
        job = current.job_if_any()
        if job is None or job.partitioned_model is None or not self._is_in(job):
            return
        *others, added = self._members()  # torch does not know parameters again that something stands for
        known = {id(parameter) for group in others for _, _, parameter, local in group if local is not None}
        if twice := [name for name, _, parameter, _ in added if id(parameter) in known]:
            self.optimizer.param_groups.pop()
            raise refusal("in-two-groups", twice[0])
        self.trim(job.partitioned_model)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's. Collective over the ranks of the model and its copies, whose options are compared first. With a
        loss scale, or sharded parameters, gradients are measured, and no rank makes the step where they are not finite.

        Errors:
            UsageError: inside the step function of a pipeline; losses that were not scaled; with sharded parameters, a
                closure; options that differ between ranks.
        """
        current.everywhere("optimizer.step()")
        job = current.job_if_any()
        if job is None or not self._is_in(job):
            if self._engine.holds_others or self._scale.is_on:
                self._require_job("step()", job)
            return self._lent.step_alone(closure)

        def closed() -> None:
            with torch.enable_grad():
                self._lent.loss = closure()
            job.gradients.watch()

        self.settle(job.partitioned_model)
        self._engine.step(self._lent, *_model_of(job), None if closure is None else closed)
        self._tell_measured()
        loss, self._lent.loss = self._lent.loss, None
        self.after_step()
        return loss

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Has the next step clip the gradients to that norm, of all of the model's on all ranks, without the loss
        scale. Collective, as `step` is with a loss scale.

        Returns:
            The norm as it was; -1 where gradients are not finite, so that the step will be left out.

        Errors:
            UsageError: another norm than the Euclidean, inside a step function.
        """
        require_positive(max_norm=max_norm)
        if norm_type != 2:
            raise UsageError(f"clip_master_grads() knows norm_type 2, not {norm_type!r}")
        norm = self._engine.clip(self._lent, *_model_of(self._job("clip_master_grads()")), float(max_norm))
        self._tell_measured()
        return norm

    def holders(self) -> list[torch.Tensor]:
        """Lists what has the gradients of this rank: parameters and shards of the model. All ranks do."""
        self.settle(current.job().partitioned_model)
        return list(map(self.parameters.source, self._lent.members()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; UsageError inside the step function of a pipeline."""
        current.everywhere("optimizer.zero_grad()")
        job = current.job_if_any()
        self._engine.zero_grad(self._lent, None if job is None else job.model.backwards, set_to_none)

    def is_whole(self) -> bool:
        """True where no parameter has left, and none is another tensor than the model's."""
        return self._engine.are_whole(self._lent)

    def parameter_of(self, local: torch.Tensor) -> torch.Tensor:
        """The parameter of the model that a tensor of the groups is, or stands for."""
        return self._engine.parameter_of(local)

    def part_of_state(self, local: torch.Tensor, parameter: torch.Tensor, state: Mapping[str, Any]) -> Any:
        """Makes the state of a tensor that stands for a parameter out of the parameter's state."""
        return self._engine.part_of_state(self._lent, local, parameter, dict(state)) or {}

    def _members(self) -> list[list[tuple[str, str, torch.Tensor, torch.Tensor | None]]]:
        """By group, all members as far as this rank knows them: the name, the name it was given with, the parameter,
        and what stands for it here, None where another rank updates it."""
        return self._engine.members(self._lent)

    def _tell_measured(self) -> None:
        self.optimizer.overflow, self.optimizer._global_grad_norm = self._engine.overflow, self._engine.norm

    def _name_groups(self) -> None:
        """Sets what scripts read of the groups: `fp16_groups`, the model's own parameters;
        `fp32_partitioned_groups_flat`, per group one tensor of this rank's elements, whose parts the masters are;
        `ds_param_shard_group`, torch's process group of the sharding group."""
        optimizer = self.optimizer
        optimizer.fp16_groups = [list(map(self.parameter_of, group["params"])) for group in optimizer.param_groups]
        if current.session().config.sharded_data_parallel_degree > 1:
            optimizer.ds_param_shard_group = groups.of_job().get("shard")
        optimizer.fp32_partitioned_groups_flat = FlatGroups(optimizer, self.parameters)  # whole ones until the cut
        for group in optimizer.param_groups:
            masters = list(filter(self.parameters.is_master, group["params"]))
            if masters and len(masters) == len(group["params"]):
                lie_together(masters)

    def _job(self, what: str) -> current.Job:
        self._require_job(what, current.job_if_any())
        job = current.outside_step(f"optimizer.{what}")
        self.settle(job.partitioned_model)
        return job

    def _require_job(self, what: str, job: current.Job | None) -> None:
        if job is None or not self._is_in(job):
            raise refusal("job-ended", f"optimizer.{what}", "DistributedOptimizer")

    def _is_in(self, job: current.Job) -> bool:
        return any(known is self for known in job.optimizers)


def _model_of(job: current.Job) -> tuple[_lamina.Backwards | None, _lamina.Reducer | None, int]:
    """The job's model, as the engine's optimizer sees it, with all of its gradients watched."""
    job.gradients.watch()
    return job.model.backwards, job.replicas.reducer, job.model.steps
