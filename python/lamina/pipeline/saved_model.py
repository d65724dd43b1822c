# SPDX-License-Identifier: Apache-2.0
"""A model that is cut, whose state is saved and loaded as the plain one's."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from lamina.deferred_init.delayed import is_delayed
from lamina.errors import UsageError, refusal
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.libraries.replacements import module_manager
from lamina.pipeline.compiled_parts import in_plain_names
from lamina.pipeline.cut_model import CutModel
from lamina.saved_state.state_dicts import PARTIAL, is_partial, saved_elsewhere, without_mark
from lamina.util.checks import require_booleans


class SavedModel(CutModel):
    """The wrapper of a job's model, with its state: of all ranks as one, and of each."""

    def state_dict(
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        gather_to_rank0: bool = False,
    ) -> dict[str, Any]:
        """The whole model's state, which the wrapped module's class loads as it is.

        Once the model is partitioned, collective over the ranks of the pipeline: all of them call it, and all get it.

        Args:
            destination: what the state is put into, and is returned; None for a new dictionary.
            prefix: put before every name.
            keep_vars: only before partition, or with one partition: as torch's.
            gather_to_rank0: only mp_rank 0 gets it; the others get {}.

        Errors:
            UsageError: inside a step function.
        """
        if self._life.whole_everywhere:
            if self._life.waiting:
                raise refusal("state-waits", "a partial state dict", "call state_dict()")
            self._require_no_checkpoint_waits("state_dict()")
            if self._job_if_any() is not None and not current.in_step():
                self._life.share_written()
            return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        session = self._own_job("state_dict()").session
        require_same(session, "one_copy", "model.state_dict()", code="state-arguments", gather_to_rank0=gather_to_rank0)
        require_booleans(gather_to_rank0=gather_to_rank0)
        state = self._life.state().whole(gather_to_rank0)
        if destination is None and not prefix:
            return state
        destination = OrderedDict() if destination is None else destination
        destination.update((prefix + name, value) for name, value in state.items())
        return destination

    def local_state_dict(self) -> dict[str, Any]:
        """The state of what this rank owns, and of what is sliced its slices: a partial dictionary, marked by the key
        `_smp_is_partial`.

        Errors:
            UsageError: before the model is partitioned, or inside a step function.
        """
        self._own_job("local_state_dict()")
        self._require_partitioned()
        return self._life.state().local()

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a state, full or partial: every rank keeps what it owns. Collective over the ranks of the pipeline;
        nothing is written on any of them unless it fits on all.

        Args:
            state_dict: as from `state_dict()`, or from the wrapped module's class, or from `local_state_dict()`. A
                partial one that comes before the model is partitioned is loaded when it is. Names of modules that have
                become others are translated, unless it says by `_smp_is_partial: False` that they are the model's own.
            strict: whether names have to be the same.
            assign: only before partition, or with one partition: as torch's.
            same_partition_load: partial ones are of this very partition: each rank loads its own, without a look at
                the others'. Else the ranks put theirs together when they do not fit.

        Returns:
            torch's NamedTuple of missing_keys and unexpected_keys; both empty for what is loaded later.

        Errors:
            UsageError, which is a RuntimeError: names, shapes or the partition do not fit. Whole models are torch's
            business: RuntimeError.
        """
        self._require_no_checkpoint_waits("load_state_dict()")
        state_dict = in_plain_names(state_dict, self.module)
        if module_manager.translate_functions and PARTIAL not in state_dict:
            names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
            state_dict = module_manager.in_own_names(state_dict, names)
        if current.is_initialized():
            current.job().loaded = True
        if not self._life.whole_everywhere:
            session = self._own_job("load_state_dict()").session
            flags = {"strict": strict, "assign": assign, "same_partition_load": same_partition_load}
            require_same(session, "one_copy", "model.load_state_dict()", code="state-arguments", **flags)
            if assign:
                raise UsageError(
                    "load_state_dict(assign=True) is not possible once the model is partitioned", code="state-assign"
                )
            self._life.make_again()
            loaded = self._life.state().load(state_dict, strict, same_partition_load)
            self._tell_optimizers()
            return loaded
        waits = is_partial(state_dict) or self._life.waiting or any(map(is_delayed, self.parameters()))
        if self._life.pipelined and waits:
            if problem := saved_elsewhere(state_dict, self._own_job("load_state_dict()").session):
                raise UsageError(problem, code="state-other-ranks")
            self._life.waiting.append((state_dict, strict, same_partition_load))
            return nn.modules.module._IncompatibleKeys([], [])
        loaded = self.module.load_state_dict(without_mark(state_dict), strict, assign)
        self._tell_optimizers()
        if assign:
            self._gradients.watch()  # its parameters are others now
        return loaded

    def _require_no_checkpoint_waits(self, call: str) -> None:
        """Refuses what would not see the values that it will have, or what they would undo."""
        if self._life.resumption is not None:
            raise refusal("state-waits", "a checkpoint", f"call {call}")

    def _tell_optimizers(self) -> None:
        """Has optimizers take the values of parameters that were loaded."""
        if (job := self._job_if_any()) is not None:
            for optimizer in job.optimizers:
                optimizer.follow()
