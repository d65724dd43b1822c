# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer whose parameters live on several ranks: as one dictionary, and in parts."""

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina import _lamina
from lamina.errors import UsageError, refusal
from lamina.exits.device_errors import explained
from lamina.job import current, seeds
from lamina.job.arguments import require_same
from lamina.optim.optimizer_steps import OptimizerSteps
from lamina.optim.state_rows import SCALE, dictionary, for_torch, options, rows_of, states_of_none, without_marks
from lamina.saved_state.state_dicts import is_partial
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
            with explained():
                return self.step(closure)

        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # the scheduler warns else that it was overridden
        self.optimizer.step = types.MethodType(step, self.optimizer)  # which schedulers take apart
        self.optimizer.overflow, self.optimizer._global_grad_norm = False, 0.0
        self.optimizer.optimizer = self.optimizer
        self.optimizer.__reduce_ex__ = self._reduced
        self._name_in_job()

    def go_on_in(self, job: current.Job) -> None:
        """Is an optimizer of a job of the same ranks in another layout, whose model is not cut yet."""
        self._begin()
        job.optimizers.append(self)
        self._name_in_job()

    def _name_in_job(self) -> None:
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
        if self._engine.state_is_plain(self._lent):
            scale = {SCALE: self._scale.state} if self._scale.is_on else {}
            return seeds.with_steps(self._torchs.state_dict(self.optimizer) | scale)
        session = self._job("state_dict()").session
        arguments = {"gather_to_rank0": gather_to_rank0}
        require_same(session, "one_copy", "optimizer.state_dict()", code="state-arguments", **arguments)
        require_booleans(gather_to_rank0=gather_to_rank0)
        written = self._engine.whole_state(self._lent, gather_to_rank0)
        return {} if written is None else self._dictionary(written)

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
        if self._job("local_state_dict()").partitioned_model is None:
            raise refusal("nothing-local", "optimizer.local_state_dict()")
        return self._dictionary(self._engine.own_state(self._lent, bool(gather_if_shard)))

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
        rows = rows_of(state_dict)
        waits = current.job_if_any() is not None and self._engine.waits(rows)
        by_torch = current.job_if_any() is None or not (waits or is_partial(state_dict))
        if by_torch and self._engine.state_is_plain(self._lent):
            self._engine.load_plain(state_dict.get(SCALE), lambda: self._load_torchs(without_marks(state_dict)))
            return
        self._job("load_state_dict()")
        if not waits:
            self._waiting = None
            self._load(state_dict)
            return
        self._engine.require_fits(self._lent, rows)
        self._waiting = state_dict
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update(copy.deepcopy(options(saved)))

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
        written = list(map(options, groups))
        self._load(waited)
        for group, own, loaded in zip(groups, written, self.optimizer.param_groups, strict=True):
            group.update(loaded | own)
        self.optimizer.param_groups[:] = groups

    @property
    def waits(self) -> bool:
        """True where a state is to be loaded when the model is partitioned."""
        return self._waiting is not None

    # As checkpoints have it: see lamina.checkpoints.

    def described(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The options of each group, and what else the optimizer's state dict has: states of no parameter, too."""
        state_dict = self._torchs.state_dict(self.optimizer)
        rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
        others = states_of_none(state_dict)
        return list(map(options, state_dict["param_groups"])), rest | ({"state": others} if others else {})

    def group_sizes(self) -> list[int]:
        """How many parameters each group has, of the whole model."""
        return list(map(len, self._members()))

    def local_names(self) -> list[str]:
        """The names of the parameters in the groups that are here, in their order."""
        return [name for group in self._members() for name, _, _, local in group if local is not None]

    def own(self) -> dict[str, Any]:
        """The state of what this rank updates, with masters and the loss scale."""
        return dictionary(self._torchs.state_dict(self.optimizer), self._engine.own_state(self._lent, False))

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
        others = rest.get("state")
        others = others if isinstance(others, dict) else {}
        described = {**rest, "state": others, "param_groups": [{"params": (), **group} for group in groups]}
        self._engine.load_own(self._lent, state, self._giving(described))

    # Inside.

    def _reduced(self, protocol: Any) -> Any:
        """As torch's, for copies and pickles of the optimizer."""
        if not self._engine.state_is_plain(self._lent):
            raise UsageError(
                "an optimizer that has parts of the model is neither copied nor pickled: the copy would know nothing "
                "of the other parts; take optimizer.state_dict(), on all ranks",
                code="optimizer-copied",
            )
        return self._torchs.__reduce_ex__(self.optimizer, protocol)

    def _load_torchs(self, state_dict: Mapping[str, Any]) -> None:
        self._torchs.load_state_dict(self.optimizer, state_dict)
        self._lent.see_to_states()

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        self._engine.load(self._lent, rows_of(state_dict), self._giving(state_dict))

    def _giving(self, state_dict: Mapping[str, Any]) -> Callable[[list[Any]], None]:
        """Loads what the members of groups have of a state dict."""
        return lambda parts: self._load_torchs(for_torch(state_dict, self.optimizer.param_groups, parts))

    def _dictionary(self, written: Any) -> dict[str, Any]:
        return seeds.with_steps(dictionary(self._torchs.state_dict(self.optimizer), written))

    def _nothing_waits(self) -> None:
        if self._waiting is not None:
            raise refusal("state-waits", "a state of the optimizer", "ask for it")
        _require_no_checkpoint_waits("ask for the optimizer's state")


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
