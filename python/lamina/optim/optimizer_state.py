# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer whose parameters live on several ranks: as one dictionary, and in parts."""

import copy
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError
from lamina.job import current, groups, seeds
from lamina.job.arguments import require_same
from lamina.model import shards
from lamina.model.partitioned import PartitionedModel
from lamina.optim import named_state
from lamina.optim.flat_groups import FlatGroups, lie_together
from lamina.optim.functional import FunctionalOptimizer
from lamina.optim.options import Options
from lamina.optim.param_groups import Layout, Roster
from lamina.saved_state.state_dicts import PARTIAL, SAVED_BY, is_partial, require_one_kind, saved_elsewhere
from lamina.util.checks import require_booleans, require_positive
from lamina.util.told import tell

_MASTER, _MASTERS = "master", "masters"  # a parameter's, between ranks; of all, in a state dict
_SCALE = "loss_scale"


class OptimizerState:
    """The methods that a DistributedOptimizer has in the place of torch's, and besides them.

    Args:
        optimizer: of the parameters of the model, all of them or those of this rank.
        scale: what its losses are multiplied by; the job's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scale: _lamina.LossScale):
        job = current.job()
        if job.session.config.shard_optimizer_state and job.session.group_size("rdp") > 1:
            groups.of_job()
        self.optimizer = optimizer
        self._scale = scale
        self._steps = _lamina.OptimizerSteps(job.session, scale)
        self.roster = Roster(optimizer, self._steps)
        self._options = Options(optimizer, self.roster.parameter_of)
        self._torchs = type(optimizer)
        self._step = optimizer.step  # which a scheduler may have wrapped
        self._measured: _lamina.BegunStep | None = None  # of the gradients that there were after so many passes:
        self._measured_after = (0, 0)
        self._clip: float | None = None  # the norm that the next step clips to, where clip_master_grads() has said so
        self._backwards = 0  # of the model, when gradients were last forgotten
        self._plain = 0  # gradients of other backwards, then: see `Backwards.plain`
        self._waiting: Mapping[str, Any] | None = None  # to be loaded when the model is partitioned

    def install(self) -> None:
        """Gives the optimizer these methods, and what scripts read of it: `overflow`, whether its last step was left
        out because gradients were not finite; `_global_grad_norm`, what the last step measured; `optimizer`, itself."""
        for name in METHODS:
            setattr(self.optimizer, name, getattr(self, name))

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        if hasattr(self._step, "_wrapped_by_lr_sched"):  # by a scheduler, which else warns that it was overridden
            step._wrapped_by_lr_sched = True
        self.optimizer.step = types.MethodType(step, self.optimizer)  # which schedulers take apart
        self.optimizer.overflow, self.optimizer._global_grad_norm = False, 0.0
        self.optimizer.optimizer = self.optimizer
        self._name_groups()
        # The job's group goes with the job, whoever keeps the optimizer.
        current.job().on_end.callback(vars(self.optimizer).pop, "ds_param_shard_group", None)

    def trim(self, model: PartitionedModel) -> None:
        """Makes the groups this rank's part of the model: see Roster.trim."""
        self._steps.set_model(lambda: model.table, model.sharding)
        before = len(self._steps.beside)
        self.roster.trim(model)
        self._name_groups()
        if (job := current.job()).replicas is not None and job.leads and len(self._steps.beside) > before:
            job.replicas.add(self._steps.beside)
            job.cut.watch()

    def follow(self) -> None:
        """Gives masters the values of parameters that have changed."""
        self._steps.follow()
        self._measured = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        self._torchs.add_param_group(self.optimizer, param_group)
        job = current.job_if_any()
        if job is not None and job.model is not None and job.model.partitioned:
            self.trim(job.cut.model)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's. Collective over the ranks of the model and its copies, whose options are compared first. With a
        loss scale, or sharded parameters, gradients are measured, and no rank makes the step where they are not finite.

        Errors:
            UsageError: inside the step function of a pipeline; losses that were not scaled; with sharded parameters, a
                closure; options that differ between ranks.
        """
        current.everywhere("optimizer.step()")
        job = current.job_if_any()
        if self.roster.has_others or self._scale.is_on:
            self._require_job("step()", job)
        if job is not None and any(known is self for known in job.optimizers):
            if job.model is None and job.session.size > 1:
                raise UsageError(
                    f"optimizer.step() of a DistributedOptimizer in a job of {job.session.size} ranks that has no "
                    "DistributedModel: each would train its parameters apart. Make the model one, and the optimizer of "
                    "its parameters",
                    code="optimizer-no-model",
                )
            closure = job.cut.before_update(closure) if job.cut is not None else closure
        uncut = job is not None and job.model is not None and not job.model.partitioned
        losses = [self._closed(job, closure)] if closure is not None and uncut else []  # it cuts the model, maybe
        if not (self._scale.is_on or self.roster.has_others or self._clip is not None or self._measures_beside()):
            if job is not None:
                self._steps.require_alike(*self._told(job))
            loss = self._update(closure and (lambda: losses.pop() if losses else closure()))
            if job is not None:
                self._steps.bring_beside()
            return loss
        loss = losses.pop() if losses else self._closed(job, closure)
        self._restore()
        fresh = self._measured if self._measured_after == _passes(job) else None
        if fresh:
            self._steps.require_alike(*self._told(job))
        begun = fresh or self._measure(job)
        self._measured = self._clip = None
        self.optimizer.overflow = begun.overflow
        if begun.overflow:
            self._steps.leave_out()
            return loss
        wholes = self.roster.wholes
        is_ours = isinstance(self.optimizer, FunctionalOptimizer) and self.optimizer.is_fused()
        takes_any = is_ours and wholes is None
        self._steps.give_gradients(self.roster.places(), begun, takes_any)
        if is_ours:
            factor = begun.factor if takes_any else 1.0  # that gradients are still to be multiplied by
            self.optimizer._distributed = (self._steps, factor, begun.clipped_norm)
        if wholes is not None:
            wholes.begin()
        try:
            self._update()
        finally:
            self.optimizer.__dict__.pop("_distributed", None)
        if wholes is not None:
            wholes.end()
        self._steps.end(takes_any)
        return loss

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        self._options.broken_off += 1
        loss = self._step() if closure is None else self._step(closure)
        self._options.broken_off -= 1
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
        job = self._job("clip_master_grads()")
        if job.cut is not None:
            job.cut.complete("clip_master_grads()")
        self._clip = float(max_norm)
        self._measured = self._measure(job)
        self._measured_after = _passes(job)
        return -1.0 if self._measured.overflow else self._measured.norm

    def holders(self) -> list[torch.Tensor]:
        """Lists what has the gradients of this rank: parameters and shards of the model."""
        return [self._steps.holder_of(place) for place in self.roster.places()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; UsageError inside the step function of a pipeline."""
        current.everywhere("optimizer.zero_grad()")
        self._restore()
        self._measured = self._clip = None
        job = current.job_if_any()
        self._backwards = _backwards(job)
        self._plain = job.model.backwards.plain if job is not None and job.model is not None else 0
        self._torchs.zero_grad(self.optimizer, set_to_none)
        sharding = shards.of_job()
        for place in self.roster.places():
            holder = self._steps.holder_of(place)
            if sharding is not None and (number := sharding.find_shard(holder)) is not None:
                sharding.zero_grad(number, set_to_none)
            elif holder is not place and holder.grad is not None:
                holder.grad = None if set_to_none else holder.grad.zero_()

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
            return seeds.with_steps(self._torchs.state_dict(self.optimizer) | self._scales())
        session = self._job("state_dict()").session
        require_same(session, "pp", "optimizer.state_dict()", code="state-arguments", gather_to_rank0=gather_to_rank0)
        require_booleans(gather_to_rank0=gather_to_rank0)
        layout = self.roster.layout()
        parts = session.gather_state(named_state.in_parts(self._named(), session.group_rank("pp")), gather_to_rank0)
        return seeds.with_steps(_masters_apart(named_state.by_number(parts, layout))) if parts else {}

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
        named = _masters_apart(self._named(gather_if_shard))
        parts = self._parts(job.session)
        marks = {PARTIAL: True, SAVED_BY: place} | ({named_state.PARTS: parts} if parts and not gather_if_shard else {})
        return seeds.with_steps(named | marks)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state, full or partial: every rank keeps what it owns. Before the model is partitioned the options of
        the groups are loaded at once, and the rest then. Collective over the ranks of the pipeline.

        Args:
            state_dict: from `state_dict()` of this or of the plain optimizer, or from `local_state_dict()`.

        Errors:
            UsageError: it does not fit the optimizer, or inside a step function.
        """
        if not (isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()):
            raise UsageError(
                "optimizer.load_state_dict() takes a state dict of an optimizer, with `state` and `param_groups`",
                code="state-other-optimizer",
            )
        state_dict = seeds.taken_from(state_dict)
        job = current.job_if_any()
        if self.roster.is_whole() and not _cut() and (job is None or not (job.pipelined or is_partial(state_dict))):
            if problem := self._scale_problem(state_dict):
                raise UsageError(f"optimizer.load_state_dict(): {problem}", code="state-other-optimizer")
            self._load_torchs(named_state.without_marks(state_dict))
            self._load_scale(state_dict)
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
        self.follow()
        if self._waiting is None:
            return
        waited, self._waiting = self._waiting, None
        groups = list(self.optimizer.param_groups)
        written = [named_state.options(group) for group in groups]
        self._load(waited, current.job())
        for group, options, loaded in zip(groups, written, self.optimizer.param_groups, strict=True):
            group.update(loaded | options)
        self.optimizer.param_groups[:] = groups

    # As checkpoints have it: see lamina.checkpoints.

    @property
    def steps(self) -> _lamina.OptimizerSteps:
        """The engine's part of it."""
        return self._steps

    def own(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any], bool]]:
        """For each parameter that this rank updates: its name, what stands in the groups for it, its state, and whether
        that is a master."""
        self._nothing_waits()
        self._settle()
        for names, group in zip(self.roster.own_names(), self.optimizer.param_groups, strict=True):
            for name, place in zip(names, group["params"], strict=True):
                yield (
                    name,
                    place,
                    self.optimizer.state.get(place, {}),
                    place.dtype != self._steps.holder_of(place).dtype,
                )

    def described(self, known: list[Layout]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The options of each group with the names of its parameters, and what else the optimizer's state dict has;
        from what all ranks know of the groups."""
        state_dict = self._torchs.state_dict(self.optimizer)
        groups = [
            named_state.options(group) | {"params": [name for name, _ in members]}
            for group, members in zip(state_dict["param_groups"], self.roster.agreed(known), strict=True)
        ]
        return groups, {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}

    def has_state_of(self, place: torch.Tensor) -> bool:
        """False where another rank updates all of a parameter, a part of which stands here."""
        return self.roster.wholes is None or not self._steps.is_part(place) or self._steps.updates_whole(place)

    def has_precision(self) -> bool:
        """True where half precision adds masters, or a loss scale: on all ranks alike."""
        config = current.job().session.config
        return config.fp16 or config.bf16 or self._scale.is_on

    def load_precision(self, state: Mapping[str, Any]) -> None:
        """Loads of a partial state masters and the loss scale alone, into a model that is partitioned."""
        self._settle()
        self._take_masters(state.get(_MASTERS, {}))
        self._load_scale(state)

    def load_own(
        self,
        state: dict[str, dict[str, Any]],
        groups: list[dict[str, Any]],
        rest: dict[str, Any],
    ) -> None:
        """Loads what `own` and `described` have given, by name: of what stands in this rank's groups. Masters stay."""
        self._settle()
        layout, own = self.roster.known(), self.roster.own_names()
        named = {**rest, "state": state, "param_groups": groups}
        self._load_torchs(named_state.own_part(named, own, layout))

    # Inside.

    def _load_torchs(self, state_dict: Mapping[str, Any]) -> None:
        self._torchs.load_state_dict(self.optimizer, state_dict)
        self._options.broken_off = 0
        self.roster.see_to_states()

    def _load(self, state_dict: Mapping[str, Any], job: current.Job) -> None:
        self._settle()
        layout, own = self.roster.layout(), self.roster.own_names()
        named = self._by_name(_with_masters(state_dict), layout, own, job)
        named = _masters_apart(self._in_parts(named))
        masters = named.pop(_MASTERS, {})
        self._load_torchs(named_state.own_part(named, own, layout))
        self._take_masters(masters)
        self._load_scale(state_dict)

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

    def _parts(self, session: _lamina.Session) -> tuple[str, int, int] | None:
        """Says which part of its parameters this rank has, over which group, and of how many; None where they are
        whole."""
        over = self._steps.divided_over
        return None if over is None else (over, session.group_rank(over), session.group_size(over))

    def _problem(self, state_dict: Mapping[str, Any], job: current.Job, layout: Layout) -> str:
        if (saved := state_dict.get(named_state.PARTS)) and saved != (own := self._parts(job.session)):
            here = "which has whole ones" if own is None else "which has part {1} of {2} over {0}".format(*own)
            return (
                "the states are part {1} of {2} of each parameter's over {0}, and not this rank's, ".format(*saved)
                + f"{here}: save local_state_dict(gather_if_shard=True), or state_dict()"
            )
        if is_partial(state_dict):
            problem = saved_elsewhere(state_dict, job.session) or named_state.check_count(state_dict, len(layout))
        else:
            problem = named_state.check_lengths(state_dict, layout)
        return problem or self._scale_problem(state_dict) or self._masters_problem(state_dict, layout)

    def _scale_problem(self, state_dict: Mapping[str, Any]) -> str:
        """Says what keeps a dynamic loss scale from going on with a state, "" if nothing."""
        saved = state_dict.get(_SCALE)
        if saved is None or not self._scale.is_dynamic:
            return ""
        try:
            _lamina.LossScale(init_scale=1.0).state = saved
        except (LookupError, TypeError, RuntimeError) as error:
            return f"its {_SCALE} is {saved!r}, which is none ({error})"
        return ""

    def _masters_problem(self, state_dict: Mapping[str, Any], layout: Layout) -> str:
        """Says what keeps masters of this rank from having the values of a state, "" if nothing."""
        masters = _masters_apart(state_dict).get(_MASTERS, {})
        if not is_partial(state_dict):
            members = zip(state_dict["param_groups"], layout, strict=True)
            names = {
                number: name for group, own in members for number, (name, _) in zip(group["params"], own, strict=True)
            }
            masters = {names[number]: master for number, master in masters.items() if number in names}
        for name, place in self._replaced():
            whole = place if named_state.PARTS in state_dict else self.roster.parameter_of(place)
            # Files of the original have parts, and no word of it.
            if name in masters and masters[name].numel() not in (whole.numel(), place.numel()):
                return f"the master of {name} has shape {tuple(masters[name].shape)}, and not {tuple(whole.shape)}"
        return ""

    def _closed(self, job: current.Job, closure: Callable[[], Any] | None) -> Any:
        """Calls the closure, if there is one, and returns what it does."""
        if closure is None:
            return None
        if job.cut is not None and job.cut.model is not None and job.cut.model.sharding is not None:
            raise UsageError(
                "optimizer.step(closure) with sharded parameters: their gradients are clipped before the step; call "
                "the closure yourself, and then optimizer.step()",
                code="shard-not-with",
            )
        with torch.enable_grad():
            return closure()

    def _limit(self, job: current.Job) -> float:
        """The norm that gradients are clipped to."""
        if self._clip is not None:
            return self._clip
        if job.cut is not None and job.cut.model is not None and job.cut.model.sharding is not None:
            return job.session.config.sdp_gradient_clipping
        return sys.float_info.max if self._needs_norm() else math.inf

    def _needs_norm(self) -> bool:
        return isinstance(self.optimizer, FunctionalOptimizer) and self.optimizer._form().norm

    def _measures_beside(self) -> bool:
        """True where the norm is one of gradients that the leading rank alone has: a rank without any takes part."""
        return self._needs_norm() and bool(self._steps.beside)

    def _measure(self, job: current.Job) -> _lamina.BegunStep:
        self._require_scaled(job)
        options, with_copies = self._told(job)
        begun = self._steps.begin(self.roster.places(), self._limit(job), with_copies, options)
        self.optimizer._global_grad_norm = begun.norm
        if self._clip is None and shards.of_job() is not None and begun.clipped_norm < begun.norm:
            self._tell_of_clipping(job, begun)
        return begun

    def _tell_of_clipping(self, job: current.Job, begun: _lamina.BegunStep) -> None:
        if job.clips_by_default and job.session.rank == 0:
            tell(
                f"gradients of norm {begun.norm:.3g} were clipped to {begun.clipped_norm:.3g}, the default of "
                "sdp_gradient_clipping, as larger ones are in every step; set that key to the norm that you mean (1e9 "
                "clips nothing)"
            )
        job.clips_by_default = False

    def _told(self, job: current.Job) -> tuple[str, bool]:
        """The options, as ranks compare them; whether copies take part, which may have left a join."""
        joining = job.replicas is not None and job.replicas.reducer.joining
        if job.session.size == 1:
            return "", not joining
        own = (
            f"the number of the optimizer = {job.optimizers.index(self)}\nthe loss scale = {self._scale.value:.12g}\n"
            f"the norm given to clip_master_grads() = {self._clip}\n"
        )
        return own + self._options.text(counts=not job.pipelined), not joining

    def _require_scaled(self, job: current.Job) -> None:
        """UsageError, on all ranks of the pipeline, where gradients came from losses that nobody has scaled."""
        if not self._scale.is_on:
            return
        problem = self._unscaled(job) if job.leads else ""
        if job.pipelined:
            problem = next(filter(None, job.session.all_gather("pp", problem)), "")
        if problem:
            raise UsageError(
                f"the optimizer has a loss scale ({self._scale.value:g}), and divides gradients by it, but {problem} "
                "since its last zero_grad(): call model.backward(loss), which multiplies the loss by it, in the place "
                "of each loss.backward()",
                code="optimizer-not-scaled",
            )

    def _unscaled(self, job: current.Job) -> str:
        """Says what gradients there are that no scale has multiplied, "" for none."""
        if job.model is not None:
            backwards = job.model.backwards
            if backwards.plain > max(self._plain, backwards.plain_forgotten):
                return "some came from a loss.backward()"
        if self._backwards == _backwards(job) and any(holder.grad is not None for holder in self.holders()):
            return "there was no model.backward()"
        return ""

    def _name_groups(self) -> None:
        """Sets what scripts read of the groups: `fp16_groups`, the model's own parameters;
        `fp32_partitioned_groups_flat`, per group one tensor of this rank's elements, whose parts the masters are;
        `ds_param_shard_group`, torch's process group of the sharding group."""
        optimizer = self.optimizer
        optimizer.fp16_groups = [
            list(map(self.roster.parameter_of, group["params"])) for group in optimizer.param_groups
        ]
        if current.session().config.sharded_data_parallel_degree > 1:
            optimizer.ds_param_shard_group = groups.of_job().get("shard")
        optimizer.fp32_partitioned_groups_flat = FlatGroups(optimizer, self._steps)  # whole ones until the model is cut
        for group in optimizer.param_groups:
            masters = [place for place in group["params"] if self._steps.holder_of(place).dtype != place.dtype]
            if masters and len(masters) == len(group["params"]):
                lie_together(masters)

    def _restore(self) -> None:
        """Undoes what a step that failed has left."""
        if self.roster.wholes is not None:
            self.roster.wholes.restore()

    def _settle(self) -> None:
        """Before states are read or written: undoes what a step that failed has left, and gives masters what a script
        has written to their parameters."""
        self._restore()
        self._steps.follow()

    def _named(self, gathers: bool = True) -> dict[str, Any]:
        """The state of this rank, by name; with `gathers` that of whole parameters, collective over the sharding
        group."""
        self._settle()
        own = self.roster.own_names()
        named = named_state.by_name(self._torchs.state_dict(self.optimizer), own)
        places, masters = dict(self._replaced()), {}
        for name, place in places.items():
            if place.dtype != self._steps.holder_of(place).dtype:
                masters[name] = self._steps.whole_of(place, place) if gathers else place.detach()
        state = self._gathered(named["state"], places) if gathers else dict(named["state"])
        for name, master in masters.items():
            state[name] = {**state.get(name, {}), _MASTER: master}
        return named | {"state": state} | self._scales()

    def _gathered(self, state: Mapping[Any, Any], places: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
        """States by name, of whole parameters; collective over those who hold parts of them."""
        parts = {name: place for name, place in places.items() if self._steps.is_part(place)}
        if self.roster.wholes is not None and self._steps.divided_over is not None:
            return self.roster.wholes.gathered(state, parts)
        whole = dict(state)
        for name, place in parts.items():
            if name in state:
                whole[name] = _of_each_like(state[name], place.shape, partial(self._steps.whole_of, place))
        return whole

    def _scales(self) -> dict[str, Any]:
        """Says what goes into a state dict of the loss scale."""
        return {_SCALE: self._scale.state} if self._scale.is_on else {}

    def _load_scale(self, state_dict: Mapping[str, Any]) -> None:
        """A dynamic one goes on where it was; a static one is the script's."""
        if self._scale.is_dynamic and _SCALE in state_dict:
            self._scale.state = state_dict[_SCALE]

    def _replaced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors in the places of parameters in the groups, with the names of those."""
        for names, group in zip(self.roster.own_names(), self.optimizer.param_groups, strict=True):
            for name, place in zip(names, group["params"], strict=True):
                if self.roster.parameter_of(place) is not place:
                    yield name, place

    def _in_parts(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """A state by name with this rank's parts of the states of parameters that others have parts of, too."""
        state = dict(named["state"])
        for name, place in self._replaced():
            if name not in state or not self._steps.is_part(place):
                continue
            own, rest = state[name], {}
            if self.roster.wholes is not None:
                rest = {key: value for key, value in own.items() if key != _MASTER}
                own = {key: value for key, value in own.items() if key == _MASTER}
                rest = rest if self._steps.updates_whole(place) else {}
            shape = self.roster.parameter_of(place).shape
            state[name] = rest | _of_each_like(own, shape, partial(self._steps.part_of, place))
        return {**named, "state": state}

    def _take_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Gives masters the values that were loaded, by the names of their parameters."""
        for name, place in self._replaced():
            if name in masters and place.dtype != self._steps.holder_of(place).dtype:
                with torch.no_grad():
                    place.copy_(masters[name].reshape(place.shape))

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


def _of_each_like(state: Mapping[str, Any], shape: torch.Size, make: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """A parameter's state with what `make` gives for what has that shape."""

    def made(value: Any) -> Any:
        return make(value) if isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0 else value

    return {name: made(value) for name, value in state.items()}


def _masters_apart(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with masters, by parameter, beside its states, which the plain optimizer then knows all of."""
    state = {key: dict(value) if isinstance(value, dict) else value for key, value in state_dict["state"].items()}
    masters = {key: value.pop(_MASTER) for key, value in state.items() if isinstance(value, dict) and _MASTER in value}
    state = {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}
    return {**state_dict, "state": state, **({_MASTERS: masters} if masters else {})}


def _with_masters(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undoes `_masters_apart`."""
    if _MASTERS not in state_dict:
        return state_dict
    state = dict(state_dict["state"])
    for key, master in state_dict[_MASTERS].items():
        state[key] = {**state.get(key, {}), _MASTER: master}
    return {key: value for key, value in state_dict.items() if key != _MASTERS} | {"state": state}


def _passes(job: current.Job | None) -> tuple[int, int]:
    """Counts the backwards of the model so far, and the steps."""
    return (0, 0) if job is None or job.model is None else job.model.passes


def _backwards(job: current.Job | None) -> int:
    """Counts the backwards of the model so far."""
    return _passes(job)[0]


def _cut() -> bool:
    """True where there is a model that is cut over several ranks, or sharded."""
    job = current.job_if_any()
    if job is None or job.model is None or not job.model.partitioned:
        return False
    return job.pipelined or job.cut.model.sharding is not None


METHODS = (
    "add_param_group",
    "clip_master_grads",
    "zero_grad",
    "state_dict",
    "local_state_dict",
    "load_state_dict",
    "save_optimizer_backcompat",
    "load_optimizer_backcompat",
)
