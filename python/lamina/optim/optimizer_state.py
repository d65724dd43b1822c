# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer whose parameters live on several ranks: as one dictionary, and in parts."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina.errors import UsageError
from lamina.job import current, seeds
from lamina.model import shards
from lamina.optim import named_state
from lamina.optim import shards as sharded
from lamina.optim.param_groups import Layout, Roster
from lamina.saved_state.state_dicts import PARTIAL, SAVED_BY, is_partial, require_one_kind, saved_elsewhere


class OptimizerState:
    """The methods that a DistributedOptimizer has in the place of torch's, and besides them.

    Args:
        optimizer: of the parameters of the model, all of them or those of this rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.roster = Roster(optimizer)
        self._torchs = type(optimizer)
        self._waiting: Mapping[str, Any] | None = None  # to be loaded when the model is partitioned

    def install(self) -> None:
        """Gives the optimizer these methods."""
        for name in METHODS:
            setattr(self.optimizer, name, getattr(self, name))
        self.optimizer.register_step_pre_hook(lambda _, *given: self._before_step(*given))
        self.optimizer.register_step_post_hook(lambda *_: sharded.after_step())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; UsageError inside the step function of a pipeline."""
        current.everywhere("optimizer.zero_grad()")
        self._torchs.zero_grad(self.optimizer, set_to_none)
        sharded.zero_grad(self.optimizer, set_to_none)

    def state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]:
        """The whole optimizer's state, which the plain optimizer loads as it is. With `seed` it has where the random
        numbers of the job are, too.

        Once the model is partitioned, collective over the ranks of the pipeline: all of them call it, and all get it.

        Args:
            gather_to_rank0: only mp_rank 0 gets it; the others get {}.

        Errors:
            UsageError: inside a step function, or while a state waits for the model to be partitioned.
        """
        self._nothing_waits()
        if self.roster.is_whole() and not _cut():
            return seeds.with_steps(self._torchs.state_dict(self.optimizer))
        session = self._job("state_dict()").session
        layout = self.roster.layout()
        parts = session.gather_state(named_state.in_parts(self._named(), session.group_rank("pp")), gather_to_rank0)
        return seeds.with_steps(named_state.by_number(parts, layout)) if parts else {}

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The state of the parameters that this rank owns, by name: a partial dictionary, marked `_smp_is_partial`.

        Args:
            gather_if_shard: whether states of sharded parameters are those of the whole ones, which is collective over
                the sharding group; else this rank's parts of them.

        Errors:
            UsageError: before the model is partitioned, or inside a step function.
        """
        self._nothing_waits()
        job = self._job("local_state_dict()")
        if job.model is None or not job.model.partitioned:
            raise UsageError(
                "optimizer.local_state_dict(): nothing is local before the model is partitioned",
                code="state-before-cut",
            )
        place = (job.session.group_rank("pp"), job.session.group_size("pp"))
        return seeds.with_steps(self._named(gather_if_shard) | {PARTIAL: True, SAVED_BY: place})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state, full or partial: every rank keeps what it owns. Before the model is partitioned the options of
        the groups are loaded at once, and the rest then. Collective over the ranks of the pipeline.

        Args:
            state_dict: from `state_dict()` of this or of the plain optimizer, or from `local_state_dict()`.

        Errors:
            UsageError: it does not fit the optimizer, or inside a step function.
        """
        state_dict = seeds.taken_from(state_dict)
        job = current.job_if_any()
        if self.roster.is_whole() and not _cut() and (job is None or not (job.pipelined or is_partial(state_dict))):
            self._torchs.load_state_dict(self.optimizer, named_state.without_marks(state_dict))
            return
        job = self._job("load_state_dict()")
        if job.model is not None and job.model.partitioned:
            self._waiting = None
            self._load(state_dict, job)
            return
        if problem := self._problem(state_dict, job, self.roster.known()):
            raise UsageError(f"optimizer.load_state_dict(): {problem}", code="state-other-optimizer")
        self._waiting = state_dict
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update(copy.deepcopy(named_state.options(saved)))

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """`local_state_dict(gather_if_shard)`, by its older name."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """`load_state_dict(state_dict)`, by its older name."""
        self.load_state_dict(state_dict)

    def load_what_waits(self) -> None:
        """Loads what came before the model was partitioned. What schedulers have written to the groups since stays."""
        if self._waiting is None:
            return
        waited, self._waiting = self._waiting, None
        groups = list(self.optimizer.param_groups)
        written = [named_state.options(group) for group in groups]
        self._load(waited, current.job())
        for group, options, loaded in zip(groups, written, self.optimizer.param_groups, strict=True):
            group.update(loaded | options)
        self.optimizer.param_groups[:] = groups

    # Inside.

    def _load(self, state_dict: Mapping[str, Any], job: current.Job) -> None:
        layout, own = self.roster.layout(), self.roster.own_names()
        named = self._by_name(state_dict, layout, own, job)
        self._torchs.load_state_dict(self.optimizer, named_state.own_part(_in_shards(named), own, layout))

    def _by_name(
        self, state_dict: Mapping[str, Any], layout: Layout, own: list[list[str]], job: current.Job
    ) -> Mapping[str, Any]:
        """The state by name, of at least what this rank has; the same error on every rank when it does not fit."""
        partial = is_partial(state_dict)
        fits = partial and [set(names) for names in own] == [set(g["params"]) for g in state_dict["param_groups"]]
        mine = (partial, self._problem(state_dict, job, layout), fits)
        partials, problems, fitting = zip(*job.session.all_gather("pp", mine), strict=True)
        if any(problems):
            raise UsageError(
                f"optimizer.load_state_dict(): {next(problem for problem in problems if problem)}",
                code="state-other-optimizer",
            )
        require_one_kind(partials, "state dict of the optimizer")
        if not partial:
            return named_state.by_name(state_dict, [[name for name, _ in group] for group in layout])
        if all(fitting):
            return named_state.without_marks(state_dict)
        mine = named_state.without_marks(state_dict)
        parts = job.session.gather_state(named_state.in_parts(mine, job.session.group_rank("pp")))
        named = named_state.merged(parts, mine)
        named_state.check_names(named, layout, job.cut.model.home_of)
        return named

    def _problem(self, state_dict: Mapping[str, Any], job: current.Job, layout: Layout) -> str:
        if is_partial(state_dict):
            return saved_elsewhere(state_dict, job.session) or named_state.check_count(state_dict, len(layout))
        return named_state.check_lengths(state_dict, layout)

    def _before_step(self, args: tuple, kwargs: dict[str, Any]) -> None:
        current.everywhere("optimizer.step()")
        if self.roster.has_shards:
            self._require_job("step()", current.job_if_any())
        given = (*args[1:], *kwargs.values())  # besides the optimizer
        sharded.before_step(self.optimizer, closure=next(iter(given), None))

    def _named(self, gathers: bool = True) -> dict[str, Any]:
        """The state of this rank, by name; with `gathers` that of whole parameters, collective over the sharding
        group."""
        named = named_state.by_name(self._torchs.state_dict(self.optimizer), self.roster.own_names())
        return _of_each_shard(named, sharded.gathered) if gathers else named

    def _job(self, what: str) -> current.Job:
        job = current.outside_step(f"optimizer.{what}")
        self._require_job(what, job)
        return job

    def _require_job(self, what: str, job: current.Job | None) -> None:
        if job is None or not any(known is self for known in job.optimizers):
            raise UsageError(
                f"optimizer.{what} of a DistributedOptimizer whose job was shut down", code="step-after-shutdown"
            )

    def _nothing_waits(self) -> None:
        if self._waiting is not None:
            raise UsageError(
                "a state that was loaded into the optimizer waits for the model to be partitioned: ask for its state "
                "after the first step",
                code="state-before-cut",
            )


def _in_shards(named: Mapping[str, Any]) -> dict[str, Any]:
    """A state by name with this rank's parts of the states of sharded parameters."""
    return _of_each_shard(named, sharded.part_of)


def _of_each_shard(named: Mapping[str, Any], make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    sharding = shards.of_job()
    if sharding is None:
        return dict(named)
    state = dict(named["state"])
    for number, (name, parameter) in enumerate(sharding.parameters):
        if name in state:
            state[name] = make(state[name], parameter, sharding, number)
    return {**named, "state": state}


def _cut() -> bool:
    """True where there is a model that is cut over several ranks, or sharded."""
    job = current.job_if_any()
    if job is None or job.model is None or not job.model.partitioned:
        return False
    return job.pipelined or job.cut.model.sharding is not None


METHODS = (
    "zero_grad",
    "state_dict",
    "local_state_dict",
    "load_state_dict",
    "save_optimizer_backcompat",
    "load_optimizer_backcompat",
)
