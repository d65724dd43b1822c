# SPDX-License-Identifier: Apache-2.0
"""Modules that nobody owns: one activation or dropout for many layers runs where its argument lies.

Such a module is one of torch's own, holds nothing, and is called more than once, or is in the model in more than one
place: wherever it lived, it would draw the values of all its callers to one rank.
"""

from collections import Counter

from torch import nn

from lamina.modules import placement
from lamina.modules.tree import ModuleTree
from lamina.tracing.record import Measures

_OWN = "torch.nn.modules."


def owned_by_nobody(tree: ModuleTree, measures: list[Measures] | None) -> list[int]:
    """The nodes of such modules.

    Args:
        measures: of a trace, which knows how often each was called; None where there is none.
    """
    places = Counter(id(module) for _, module in tree.root.named_modules(remove_duplicate=False))
    calls = [0] * len(tree.modules) if measures is None else [each.calls for each in measures]
    parts = enumerate(zip(tree.modules, calls, strict=True))
    return [node for node, (module, called) in parts if max(called, places[id(module)]) > 1 and _holds_nothing(module)]


def _holds_nothing(module: nn.Module) -> bool:
    """True where a call of it on any rank is the same: of other classes than torch's that is not known, nor with
    hooks."""
    altered = "forward" in module.__dict__ or any(
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    )
    holds = module._parameters or module._buffers or module._modules
    return type(module).__module__.startswith(_OWN) and not altered and not holds and placement.of(module) is None
