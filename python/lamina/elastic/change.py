# SPDX-License-Identifier: Apache-2.0
"""A change of the layout of a job between two steps: see [Note: change of layout] in lamina/session/change.h."""

import functools
import gc
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lamina import _lamina
from lamina.checkpoints.checkpointed_job import CheckpointedJob
from lamina.checkpoints.together import everywhere
from lamina.errors import UsageError
from lamina.job import current, lifetime
from lamina.model import shards
from lamina.modules.tree import ModuleTree
from lamina.optim.optimizer_state import OptimizerState
from lamina.optim.shards import why_not_parts
from lamina.planning.first_rank import FirstRank
from lamina.tensor_parallel import slicing
from lamina.tracing.proposal import Proposal, propose
from lamina.tracing.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lamina.job.keys import LayoutKeys


def change(**keys: "Unpack[LayoutKeys]") -> None:
    """Has the ranks of the job share its work in another layout from the next step on: `lamina.change(partitions=4)`.
    Every rank calls it, between two steps, after `optimizer.zero_grad()`.

    The model, its optimizers and their schedules stay the same objects, and go on with the same values and states, loss
    scale and random numbers: losses are those of a run that nobody has changed. Values and states go from the ranks
    that have them to those that will, through memory: no rank has more than its parts of both layouts. Afterwards
    `dp_rank()` and `dp_size()` say which part of a batch this rank reads. A batch has as many microbatches as before,
    which the copies of the model share out. Where a Trainer trains the model, it sees to all that, between two batches.

    A model that was never traced, and is to be cut over several partitions, is whole until its next step, which traces
    and cuts it as a first one does.

    Args:
        **keys: of `lamina.init`, those that say who does what: partitions, microbatches (of each copy), schedule,
            active_microbatches, placement_strategy, auto_partition, default_partition, optimize, memory_weight,
            sharded_data_parallel_degree with sdp_param_persistence_threshold, sdp_persistent_parameters and sdp_units,
            shard_optimizer_state, tensor_parallel_degree. What is not given stays; so does whether gradients are
            clipped as those of shards.

    Errors:
        ConfigError: a layout that the number of ranks does not allow.
        UsageError: what cannot change, as layers that so many ranks cannot share, or not now: inside a step function,
            while a checkpoint is being saved, with gradients that are not used yet. Nothing has changed then.
        PeerError: a rank was lost; `lamina.Run` goes on without it. Once all ranks are connected anew, any other error
            ends the job.
    """
    job = current.outside_step("lamina.change()")
    if job.change is not None:
        job.change(keys)
    else:
        change_now(job, keys)


def checked(job: current.Job, keys: dict[str, Any]) -> _lamina.Config:
    """The configuration of the job in that layout. Errors as `change`; nothing is done yet. Collective."""
    config = job.session.changed_config(everywhere(job, lambda: _to_json(keys)))
    job.session.require_changeable(config, told_of(job))
    return config


def change_now(job: current.Job, keys: dict[str, Any]) -> None:
    """`change`, whoever trains the model."""
    config = checked(job, keys)
    job.saves.end()
    job.life.make_again()
    is_cut, waits = job.model.partitioned, True
    if is_cut:
        trace, is_whole = everywhere(job, lambda: (_trace_of(job), _is_whole(job)))
        waits = job.session.waits_for_trace(config, trace is not None, is_whole)
    proposal, held = None, None
    if not waits:
        proposal = everywhere(job, lambda: _proposal(job, config, trace or Trace()))
    if is_cut:
        held = _lamina.HeldJob(job.session, MovingJob(job))
    session = (job.open_after or job.session.open_after)(config)  # until now an error leaves the layout as it is
    _go_over(job, session, proposal, None if waits else held)
    job = held = None
    gc.collect()  # the old layout's session has connections and memory


def _to_json(keys: dict) -> str:
    try:
        return json.dumps(keys)
    except (TypeError, ValueError) as error:
        raise refused(f"the keys cannot be written as JSON: {error}") from None


def refused(why: str) -> UsageError:
    """The error of a layout that cannot be, or not now."""
    return UsageError(f"lamina.change(): {why}", code="change-refused")


def told_of(job: current.Job) -> _lamina.ChangingJob:
    """Tells the engine, which says whether the job may change, what Python knows of it."""
    relies = job.fixed_by + (job.model.relies() if job.has_model else [])
    told = _lamina.ChangingJob(saves=job.saves.are_under_way, relies=relies, waits=job.life.resumption is not None)
    if job.has_model:
        job.model.tell(told)
        told.why_not_slices = functools.partial(_why_not_slices, job.model.module)
        told.optimizers = [_told_of_optimizer(state) for state in job.optimizers]
    return told


def _why_not_slices(root: nn.Module, config: _lamina.Config) -> str:
    """Says why layers cannot be sliced as that layout has them; "" where they can."""
    rank = FirstRank(config.tensor_parallel_degree, config.partitions, config.prescaled_batch, config.optimize)
    try:
        slicing.require_cuts(root, rank)
    except UsageError as error:
        return str(error)
    return ""


def _told_of_optimizer(state: OptimizerState) -> _lamina.ChangingOptimizer:
    optimizer = state.optimizer
    return _lamina.ChangingOptimizer(
        name=type(optimizer).__name__,
        beside=next(iter(state.beside()), ""),
        why_not_parts=why_not_parts(optimizer),
        measures_all=isinstance(optimizer, torch.optim.LBFGS),
        takes_sparse=isinstance(optimizer, torch.optim.SparseAdam),
        waits=state.waits,
    )


def _trace_of(job: current.Job) -> Trace | None:
    """The trace of the first rank, which alone has it, where the model still has the modules of then."""
    is_there = ModuleTree(job.model.module).names == job.partitioned_model.tree.names
    return job.life.trace if is_there else None


def _is_whole(job: current.Job) -> bool:
    return job.partitioned_model.whole_everywhere and all(state.is_whole() for state in job.optimizers)


def _proposal(job: current.Job, config: _lamina.Config, trace: Trace) -> Proposal:
    """The other layout's plan, while this one is whole."""
    proposal = propose(ModuleTree(job.model.module), job.session, lambda _: trace, config=config)
    if proposal.error:
        raise refused(proposal.error)
    return proposal


def _go_over(
    job: current.Job, session: _lamina.Session, proposal: Proposal | None, held: "_lamina.HeldJob | None"
) -> None:
    """Ends the one layout and begins the other. From here on an error ends the job."""
    model, optimizers = job.model, list(job.optimizers)
    job.gradients.let_go()
    for state in optimizers:
        state.let_go(with_states=held is None)
    if held is not None:
        job.session.put_aside(job.partitioned_model.table, job.partitioned_model.sharding)
        shards.forget(model.parameters())
    changed = lifetime.go_over(job, session)
    model.go_on_in(changed)
    for state in optimizers:
        state.go_on_in(changed)
    if held is not None:
        changed.life.resumption = held.resumption(changed.session, MovingJob(changed))
    if held is not None or not changed.pipelined:
        changed.life.make(proposal=proposal)


class MovingJob(CheckpointedJob):
    """A job of which each tensor goes over, those too that no checkpoint has."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        module = self._job.model.module
        yield from module.named_parameters(remove_duplicate=False)
        yield from module.named_buffers(remove_duplicate=False)
