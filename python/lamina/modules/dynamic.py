# SPDX-License-Identifier: Apache-2.0
"""Modules whose results are not known before they have run.

A call of a module on another rank returns at once when a call with arguments of the same kind was made before: what it
will look like is known. Modules that read numbers out of tensors are seen to do so and are always waited for. The rest,
whose results vary by what is no argument (a counter, a random choice), have to be named.
"""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lamina.job import current
from lamina.util.checks import require_module

_DYNAMIC = "_lamina_dynamic"


def set_dynamic(module: nn.Module) -> None:
    """Tells that the structure, shapes or dtypes of what `module` returns vary from call to call. Calls of it from
    other ranks, and of the modules it is in, wait for their results.

    Args:
        module: a module of the model, before the first step.

    Errors:
        UsageError: no module, or the model is partitioned.
    """
    require_module(module, "set_dynamic()")
    current.before_cut("set_dynamic()")
    module.__dict__[_DYNAMIC] = True


def is_dynamic(module: nn.Module) -> bool:
    """True where it was named to `set_dynamic`."""
    return _DYNAMIC in module.__dict__


def keeps_statistics(module: nn.Module) -> bool:
    """True where its calls change buffers of its own, whose order counts."""
    return isinstance(module, _NormBase) and module.track_running_stats
