# SPDX-License-Identifier: Apache-2.0
"""State dicts of a job's model, which are the plain one's at any time of its life."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lamina.deferred_init.delayed import is_delayed
from lamina.errors import UsageError, refusal
from lamina.job import current
from lamina.job.arguments import require_same
from lamina.libraries.replacements import module_manager
from lamina.pipeline.compiled_parts import in_plain_names
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.life import Life
from lamina.saved_state.state_dicts import PARTIAL, is_partial, saved_elsewhere, without_mark
from lamina.torch_patches import state_helpers
from lamina.util.checks import require_booleans


class StateDicts:
    """The state of a model: of all ranks as one, and of each. `DistributedModel` says what its methods do.

    Args:
        module: says which model is wrapped.
        life, gradients: of the model.
    """

    def __init__(self, module: Callable[[], nn.Module], life: Life, gradients: Gradients):
        self._module, self._life, self._gradients = module, life, gradients
        self._helpers_know = False  # torch's helpers of state dicts

    def save(
        self, destination: dict[str, Any] | None, prefix: str, keep_vars: bool, gather_to_rank0: bool
    ) -> dict[str, Any]:
        """Does what `state_dict` does."""
        life = self._life
        if life.whole_everywhere:
            if life.waiting:
                raise refusal("state-waits", "a partial state dict", "call state_dict()")
            self._require_no_checkpoint_waits("state_dict()")
            if life.job_if_any() is not None and not current.in_step():
                life.share_written()
            return self._module().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        session = life.job("state_dict()").session
        require_same(session, "one_copy", "model.state_dict()", code="state-arguments", gather_to_rank0=gather_to_rank0)
        require_booleans(gather_to_rank0=gather_to_rank0)
        state = life.state().whole(gather_to_rank0)
        if destination is None and not prefix:
            return state
        destination = OrderedDict() if destination is None else destination
        destination.update((prefix + name, value) for name, value in state.items())
        return destination

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool, same_partition_load: bool) -> Any:
        """Does what `load_state_dict` does."""
        life, module = self._life, self._module()
        self._require_no_checkpoint_waits("load_state_dict()")
        state_dict = in_plain_names(state_dict, module)
        if module_manager.translate_functions and PARTIAL not in state_dict:
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            state_dict = module_manager.in_own_names(state_dict, names)
        if current.is_initialized():
            current.job().loaded = True
        if not life.whole_everywhere:
            session = life.job("load_state_dict()").session
            flags = {"strict": strict, "assign": assign, "same_partition_load": same_partition_load}
            require_same(session, "one_copy", "model.load_state_dict()", code="state-arguments", **flags)
            if assign:
                raise UsageError(
                    "load_state_dict(assign=True) is not possible once the model is partitioned", code="state-assign"
                )
            life.make_again()
            loaded = life.state().load(state_dict, strict, same_partition_load)
            self._tell_optimizers()
            return loaded
        waits = is_partial(state_dict) or life.waiting or any(map(is_delayed, module.parameters()))
        if life.pipelined and waits:
            if problem := saved_elsewhere(state_dict, life.job("load_state_dict()").session):
                raise UsageError(problem, code="state-other-ranks")
            life.waiting.append((state_dict, strict, same_partition_load))
            return nn.modules.module._IncompatibleKeys([], [])
        loaded = module.load_state_dict(without_mark(state_dict), strict, assign)
        self._tell_optimizers()
        if assign:
            self._gradients.watch()  # its parameters are others now
        return loaded

    def names_of_wrapped(self) -> dict[str, str]:
        """Tells torch's helpers of state dicts (`torch.distributed.checkpoint.state_dict`) that names are those of the
        wrapped module. They ask before they do anything else."""
        if (job := current.job_if_any()) is not None and not self._helpers_know:
            self._helpers_know = state_helpers.install(_require_whole, job.on_end)
        module = self._module()
        return dict.fromkeys((*module._modules, *module._parameters, *module._buffers), "module")

    def _require_no_checkpoint_waits(self, call: str) -> None:
        """Refuses what would not see the values that it will have, or what they would undo."""
        if self._life.resumption is not None:
            raise refusal("state-waits", "a checkpoint", f"call {call}")

    def _tell_optimizers(self) -> None:
        """Has optimizers take the values of parameters that were loaded."""
        if (job := self._life.job_if_any()) is not None:
            for optimizer in job.optimizers:
                optimizer.follow()


def _require_whole(optimizer: torch.optim.Optimizer) -> None:
    """Refuses in torch's helpers an optimizer that has something else in the places of the model's parameters."""
    job = current.job_if_any()
    own = None if job is None else job.state_of(optimizer)
    if own is not None and not (own.is_whole() and job.life.whole_everywhere):
        raise UsageError(
            "torch's helpers of state dicts take an optimizer that has the model's own parameters, all of them; this "
            "one has parts of them, or masters: take optimizer.state_dict() and load_state_dict(), or "
            "lamina.save_checkpoint() and resume_from_checkpoint()",
            code="state-helpers",
        )
