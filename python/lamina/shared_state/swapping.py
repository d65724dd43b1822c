# SPDX-License-Identifier: Apache-2.0
"""Parameters that have other values for the time of a call: torch.func.functional_call() and parametrize.cached().

Both change modules, or torch, for the whole process, while microbatches take turns in it: another one would compute
with what one has swapped, or with weights that it has cached, and its graph. And neither reaches what other ranks own.
So they are allowed where microbatches run one after the other, on what is here. That a call would meet swapped
parameters of another rank `calls.remote_call` sees at the call.
"""

from collections.abc import Callable

from torch import nn
from torch.nn.utils import parametrize

from lamina import _lamina
from lamina.errors import UsageError
from lamina.shared_state.modules import Modules

_ONE_AT_A_TIME = "set active_microbatches to 1 for it"


class Swapping:
    """Refuses what would be wrong.

    Args:
        modules: the model's.
        in_turns: tells whether several microbatches may be under way.
    """

    def __init__(self, modules: Modules, in_turns: Callable[[], bool]):
        self._modules, self._in_turns = modules, in_turns

    def refuse_swap(self, module: nn.Module) -> None:
        """Raises UsageError where parameters of `module` are swapped that another microbatch uses."""
        if self._in_turns() and _lamina.microbatch() >= 0 and any(part in self._modules for part in module.modules()):
            raise UsageError(
                "functional_call() of a part of the model, several microbatches of which run in turns: "
                f"{_ONE_AT_A_TIME}",
                code="step-swapped",
            )

    def refuse_cached(self, name: str, modules: list[nn.Module]) -> None:
        """Raises UsageError where a call of module `name`, with all under it `modules`, would not see on its rank the
        weights that are cached here."""
        if self._in_turns():
            raise UsageError(
                f"{name}, which lives on another rank, is called in parametrize.cached(): {_ONE_AT_A_TIME}",
                code="step-swapped",
            )
        if any(map(parametrize.is_parametrized, modules)):
            raise UsageError(
                f"{name}, which lives on another rank and has parametrizations, is called in parametrize.cached(), "
                "which does not reach it: use it in a module of that rank, or place it with its caller",
                code="step-swapped",
            )


def caches() -> bool:
    """True where weights are cached now."""
    return parametrize._cache_enabled > 0
