# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer whose parameters live on several ranks: as one dictionary, and in parts."""

import copy
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.job import current, seeds
from lamina.job.arguments import require_same
from lamina.model.partitioned import unpacked
from lamina.optim import named_state
from lamina.optim.named_state import MASTERS, SCALE, Layout
from lamina.optim.optimizer_steps import OptimizerSteps
from lamina.saved_state.state_dicts import PARTIAL, SAVED_BY, is_partial, place_of, require_one_kind, saved_elsewhere
from lamina.util.checks import require_booleans


class OptimizerState(OptimizerSteps):
    """The methods that a DistributedOptimizer has in the place of torch's, and besides them.

    Args:
        optimizer: of the parameters of the model, all of them or those of this rank.
        scale: what its losses are multiplied by; the job's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scale: _lamina.LossScale):
        super().__init__(optimizer, scale)
        self._waiting: Mapping[str, Any] | None = None  # to be loaded when the model is partitioned

    def install(self) -> None:
        """Gives the optimizer these methods, and what scripts read of it: `overflow`, whether its last step was left
        out because gradients were not finite; `_global_grad_norm`, what the last step measured; `optimizer`, itself."""
        for name in METHODS:
            setattr(self.optimizer, name, getattr(self, name))

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # the scheduler warns else that it was overridden
        self.optimizer.step = types.MethodType(step, self.optimizer)  # which schedulers take apart
        self.optimizer.overflow, self.optimizer._global_grad_norm = False, 0.0
        self.optimizer.optimizer = self.optimizer
        self.optimizer.__reduce_ex__ = self._reduced
        self._name_groups()
        # The job's group goes with the job, whoever keeps the optimizer.
        current.job().on_end.callback(vars(self.optimizer).pop, "ds_param_shard_group", None)

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
        if self.is_whole() and not _cut():
            return seeds.with_steps(self._torchs.state_dict(self.optimizer) | self._scales())
        session = self._job("state_dict()").session
        arguments = {"gather_to_rank0": gather_to_rank0}
        require_same(session, "one_copy", "optimizer.state_dict()", code="state-arguments", **arguments)
        require_booleans(gather_to_rank0=gather_to_rank0)
        layout = self.layout()
        named = self._named("first" if gather_to_rank0 else "whole")
        if gather_to_rank0 and session.group_rank("one_copy") > 0:
            return {}
        return seeds.with_steps(named_state.by_number(named, layout))

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The state of the parameters that this rank owns, and of its slices, by name: a partial dictionary, marked
        `_smp_is_partial`.

        Args:
            gather_if_shard: whether states of sharded parameters are those of the whole ones, which is collective over
                the sharding group; else this rank's parts of them.

        Errors:
            UsageError: before the model is partitioned, or inside a step function.
        """
        self._nothing_waits()
        job = self._job("local_state_dict()")
        if job.partitioned_model is None:
            raise refusal("nothing-local", "optimizer.local_state_dict()")
        named = self._named("slice" if gather_if_shard else "part")
        parts = self._parts(job.session)
        marks = {PARTIAL: True, SAVED_BY: place_of(job.session)} | (
            {named_state.PARTS: parts} if parts and not gather_if_shard else {}
        )
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
        _require_no_checkpoint_waits("call optimizer.load_state_dict()")
        state_dict = seeds.taken_from(state_dict)
        job = current.job_if_any()
        if self.is_whole() and not _cut() and (job is None or not (job.pipelined or is_partial(state_dict))):
            if problem := self._scale_problem(state_dict):
                raise refusal("other-state", problem)
            self._load_torchs(named_state.without_marks(state_dict))
            self._load_scale(state_dict)
            return
        job = self._job("load_state_dict()")
        if job.partitioned_model is not None:
            self._waiting = None
            self._load(state_dict, job)
            return
        if problem := self._problem(state_dict, job, named_state.agreed([self.known()])):
            raise refusal("other-state", problem)
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

    def described(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The options of each group, and what else the optimizer's state dict has: states of no parameter, too."""
        state_dict = self._torchs.state_dict(self.optimizer)
        groups = [named_state.options(group) for group in state_dict["param_groups"]]
        numbers = set(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        others = {key: value for key, value in state_dict["state"].items() if key not in numbers}
        rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
        return groups, rest | ({"state": others} if others else {})

    def layout(self) -> Layout:
        """The groups of the whole optimizer; collective over the pipeline. Groups that each rank made of its own
        parameters have the order of the model."""
        return named_state.agreed(current.session().all_gather("one_copy", self.known()))

    def local_names(self) -> list[str]:
        """The names of the parameters in the groups that are here, in their order."""
        return [name for group in self._members() for name, _, _, local in group if local is not None]

    def has_precision(self) -> bool:
        """True where half precision adds masters, or a loss scale: on all ranks alike."""
        return current.job().session.updates_masters or self._scale.is_on

    def load_own(
        self,
        state: dict[str, dict[str, Any]],
        groups: list[dict[str, Any]],
        rest: dict[str, Any],
    ) -> None:
        """Loads what this rank has of a state, by name, and what `described` has given. Masters stay."""
        self.follow()
        others = rest.get("state")
        whole = {**rest, "state": (others if isinstance(others, dict) else {}) | state, "param_groups": groups}
        self._load_named(whole, are_parts=True)

    # Inside.

    def _reduced(self, protocol: Any) -> Any:
        """As torch's, for copies and pickles of the optimizer."""
        if not self.is_whole() or _cut():
            raise UsageError(
                "an optimizer that has parts of the model is neither copied nor pickled: the copy would know nothing "
                "of the other parts; take optimizer.state_dict(), on all ranks",
                code="optimizer-copied",
            )
        return self._torchs.__reduce_ex__(self.optimizer, protocol)

    def _load_torchs(self, state_dict: Mapping[str, Any]) -> None:
        self._torchs.load_state_dict(self.optimizer, state_dict)
        self._engine.note_load()
        self._lent.see_to_states()

    def _load_named(self, named: Mapping[str, Any], are_parts: bool) -> None:
        """Loads this rank's part of a state by name, or a state that is that part already, and masters likewise."""
        members = self._members()
        names = {name for group in members for name, *_ in group}
        parts = self._engine.parts_of(self._lent, named_state.of_parameters(named, names), are_parts)
        own = [[(name, given) for name, given, _, local in group if local is not None] for group in members]
        masters = dict(named.get(MASTERS, {}))
        self._load_torchs(named_state.own_part(named, own, parts, names))
        self._engine.take_masters(self._lent, masters, are_parts)

    def _load(self, state_dict: Mapping[str, Any], job: current.Job) -> None:
        self.follow()
        named = self._by_name(state_dict, self.layout(), job)
        self._load_named(named, are_parts=named_state.PARTS in state_dict)
        self._load_scale(state_dict)

    def _by_name(self, state_dict: Mapping[str, Any], layout: Layout, job: current.Job) -> Mapping[str, Any]:
        """The state by name, of at least what this rank has; the same error on every rank when it does not fit."""
        partial = is_partial(state_dict)
        own = [{name for name, _, _, local in group if local is not None} for group in self._members()]
        names = [list(group["params"]) for group in state_dict["param_groups"]] if partial else []
        mine = (partial, self._problem(state_dict, job, layout), own == list(map(set, names)), names)
        partials, problems, fitting, everyone = zip(*job.session.all_gather("one_copy", mine), strict=True)
        if any(problems):
            raise refusal("other-state", next(filter(None, problems)))
        require_one_kind(partials, "state dict of the optimizer")
        if not partial:
            return named_state.by_name(state_dict, [[name for name, _ in group] for group in layout])
        named = named_state.without_marks(state_dict)
        if all(fitting):
            return named
        named_state.check_names(everyone, layout, job.partitioned_model.home_of)
        known = {name for group in layout for name, _ in group}
        own_states = named_state.of_parameters(named, known)
        states, masters = self._engine.gathered(own_states, dict(named.get(MASTERS, {})))
        return named | {"state": named["state"] | states} | ({MASTERS: masters} if masters else {})

    def _parts(self, session: _lamina.Session) -> tuple[str, int, int] | None:
        """Gives this rank's part of its parameters, the group that shares them, and its size; None where they are
        whole."""
        over = self.parameters.divided_over
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
        saved = state_dict.get(SCALE)
        if saved is None or not self._scale.is_dynamic:
            return ""
        try:
            _lamina.LossScale(init_scale=1.0).state = saved
        except (LookupError, TypeError, RuntimeError) as error:
            return f"its {SCALE} is {saved!r}, which is none ({error})"
        return ""

    def _masters_problem(self, state_dict: Mapping[str, Any], layout: Layout) -> str:
        """Says what keeps masters of this rank from having the values of a state, "" if nothing."""
        masters = state_dict.get(MASTERS, {})
        if not is_partial(state_dict):
            members = zip(state_dict["param_groups"], layout, strict=True)
            names = {
                number: name for group, own in members for number, (name, _) in zip(group["params"], own, strict=True)
            }
            masters = {names[number]: master for number, master in masters.items() if number in names}
        return self._engine.misfit(self._lent, masters, named_state.PARTS in state_dict)

    def _named(self, extent: str) -> dict[str, Any]:
        """The state by name; see Extent in lamina/distributed_optimizer/states.h."""
        state_dict = self._torchs.state_dict(self.optimizer)
        states, masters = self._engine.state(self._lent, extent)
        states = {name: {key: unpacked(field) for key, field in state.items()} for name, state in states.items()}
        own = [[name for name, _, _, local in group if local is not None] for group in self._members()]
        named = named_state.by_name(state_dict, own)
        names = set(itertools.chain(*own))
        others = {key: value for key, value in named["state"].items() if key not in names}
        masters = {MASTERS: masters} if masters else {}
        return named | {"state": others | states} | masters | self._scales()

    def _scales(self) -> dict[str, Any]:
        """Says what goes into a state dict of the loss scale."""
        return {SCALE: self._scale.state} if self._scale.is_on else {}

    def _load_scale(self, state_dict: Mapping[str, Any]) -> None:
        """A dynamic one goes on where it was; a static one is the script's."""
        if self._scale.is_dynamic and SCALE in state_dict:
            self._scale.state = state_dict[SCALE]

    def _nothing_waits(self) -> None:
        if self._waiting is not None:
            raise refusal("state-waits", "a state of the optimizer", "ask for it")
        _require_no_checkpoint_waits("ask for the optimizer's state")


def _cut() -> bool:
    """True where there is a model that is cut over several ranks, sliced or sharded."""
    job = current.job_if_any()
    model = None if job is None else job.partitioned_model
    return model is not None and (job.pipelined or job.sliced or model.sharding is not None)


def _require_no_checkpoint_waits(then: str) -> None:
    """Refuses what would not see the states that an optimizer will have, or what they would undo."""
    job = current.job_if_any()
    waiting = None if job is None else job.life.resumption
    if waiting is not None and waiting.has_optimizers:
        raise refusal("state-waits", "a checkpoint", then)


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
