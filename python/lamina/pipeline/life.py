# SPDX-License-Identifier: Apache-2.0
"""The cut of a model, step by step, as the engine asks for it: see [Note: life of a model] in
lamina/session/model_life.h."""

import itertools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current
from lamina.job.arguments import as_texts
from lamina.model import partitioned, shards
from lamina.model.partitioned import PartitionedModel
from lamina.model.statistics import Statistics
from lamina.modules.tree import ModuleTree
from lamina.optim.averages import update as update_average
from lamina.optim.grad_scaler import holders
from lamina.optim.options import PlainOptimizers
from lamina.torch_patches import averages, foreign, grad_scaler, module_call, zero_grad
from lamina.tracing.proposal import Tracer, propose


class Life:
    """Lends Python's side to the cut of its model.

    Args:
        cut: the job's, which it makes one of a model that is cut.
        tracer: finds what the modules cost; None for no trace.

    Attributes:
        model: who owns what, from when the ranks have agreed.
    """

    def __init__(self, cut: Any, tracer: Tracer | None):
        self.model: PartitionedModel | None = None
        self._cut, self._tracer = cut, tracer
        self._tree: ModuleTree | None = None

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The arguments that are to be alike on all ranks."""
        return as_texts(self._cut.arguments)

    def propose(self) -> tuple[_lamina.ModuleTree, _lamina.Plan | None, str, tuple]:
        """The tree, the plan, why there is none, and what the others are to know."""
        session, resumption = current.session(), self._cut.resumption
        self._tree = ModuleTree(self._cut.module())
        kept = {} if resumption is None else resumption.partition
        proposal = propose(self._tree, session, self._tracer, kept)
        return self._tree.filled(), proposal.plan, proposal.error, (proposal.report, proposal.writes)

    def take_cut(self, cut: _lamina.Cut, plan: str, word: tuple) -> None:
        """All ranks have agreed."""
        self.model = partitioned.as_agreed(self._tree, current.session(), cut, plan, word)

    @property
    def table(self) -> _lamina.ParameterTable:
        """The table of who holds what."""
        return self.model.table

    @property
    def portion_bytes(self) -> int:
        """How much of what others own world rank 0 may have to hold at a time."""
        return partitioned.PORTION_BYTES

    def make_values(self, tensors: list[torch.Tensor]) -> None:
        """Before the values of these are read."""
        partitioned.make_values(self.model, tensors)

    def take_values(self, sharding: _lamina.Sharding | None) -> None:
        """Values are here, or gone."""
        partitioned.take_values(self.model, sharding)

    def trim_optimizers(self) -> None:
        """Groups get this rank's part of the model, which is the job's from now on."""
        for optimizer in current.job().optimizers:
            optimizer.trim(self.model)
        self._cut.model = self.model

    def watch(self) -> None:
        """Backwards are noticed, and torch's functions know of parts."""
        job, cut = current.job(), self._cut
        if self.model.sharding is not None:
            self._use_shards(job)
        if not cut.pipelined and (self.model.sharding is not None or job.session.is_recorded):
            module_call.install({}, cut.call_remote, hooked=cut.hooked())
        cut.statistics = Statistics(cut.module(), self.model)
        cut.watch()
        cut.see_to_norms()
        if job.session.size > 1:
            plain = PlainOptimizers(job)
            job.on_end.callback(register_optimizer_step_pre_hook(plain.before_step).remove)
            job.on_end.callback(register_optimizer_step_post_hook(plain.after_step).remove)
        if job.replicas.averages or replaces(job) or job.sliced:
            grad_scaler.install(_worst_of_model, holders, _complete_gradients, job.on_end)
        if cut.pipelined:
            foreign.install(job.on_end)
            grad_scaler.refuse(job.on_end)
        if cut.pipelined or self.model.sharding is not None:
            averages.install(update_average, job.on_end)

    def route(self) -> None:
        """Calls go to the owners. With one partition those of the first step do first, for which hooks may wait."""
        if self._cut.pipelined:
            self._cut.route()

    def load(self) -> None:
        """Loads what came before."""
        cut = self._cut
        waited, cut.waiting = cut.waiting, []
        for arguments in waited:
            cut.state().load(*arguments)
        for optimizer in current.job().optimizers:
            optimizer.load_what_waits()
        if cut.resumption is not None:
            resumption, cut.resumption = cut.resumption, None
            resumption.load()

    def settle(self) -> None:
        """Has a step take aside what is there now."""
        self._cut.settle()

    def _use_shards(self, job: current.Job) -> None:
        """Has the values of sharded parameters come for calls of their modules, also outside of steps, and their
        gradients go to who holds the shards."""
        job.replicas.reducer.set_sharded(self.model.sharding)
        job.on_end.callback(register_optimizer_step_pre_hook(_require_shards).remove)
        zero_grad.install(shards.zero_grad, self.model.sharding, job.on_end)


def replaces(job: current.Job) -> bool:
    """True where something may stand for parameters in the groups of optimizers."""
    return job.session.updates_masters or job.session.config.shard_optimizer_state


def _complete_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Before gradients are unscaled: an optimizer of the model has them averaged."""
    job = current.job()
    if _is_known(optimizer, job) or _has_own_parameters(optimizer, job):
        job.cut.complete("GradScaler.unscale_()")


def _is_known(optimizer: torch.optim.Optimizer, job: current.Job) -> bool:
    return any(known.optimizer is optimizer for known in job.optimizers)


def _has_own_parameters(optimizer: torch.optim.Optimizer, job: current.Job) -> bool:
    own = set(map(id, job.cut.model.own_parameters())) if job.cut.model is not None else set()
    return any(id(each) in own for group in optimizer.param_groups for each in group["params"])


def _require_shards(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step: the shards of parameters that came in since take their places in a DistributedOptimizer; any
    other one is to have no sharded parameters."""
    if not shards.are_among(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        return
    job = current.job()
    known = next((known for known in job.optimizers if known.optimizer is optimizer), None)
    if known is None:
        raise UsageError(
            "optimizer.step() of an optimizer with sharded parameters, which have no gradients of their own: make it "
            "lamina.DistributedOptimizer(optimizer), which updates their shards",
            code="shard-plain-optimizer",
        )
    known.trim(job.cut.model)


def _worst_of_model(optimizer: torch.optim.Optimizer, found: float) -> float:
    """The largest that any rank of the model's copy has found in its part of the gradients of this optimizer."""
    job = current.job()
    is_sliced = job.sliced
    if _is_known(optimizer, job) or (is_sliced and _has_own_parameters(optimizer, job)):
        for group in ("shard", "one_copy"):
            found = job.session.largest(group, found)
    return found
