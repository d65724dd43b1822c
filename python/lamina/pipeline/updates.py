# SPDX-License-Identifier: Apache-2.0
"""Modules that write state when they are called: no other microbatch is to come between what they read and write.

See [Note: updates] in lamina/shared_state/attributes.py.
"""

from collections.abc import Iterable

from torch import nn

from lamina.model.partitioned import PartitionedModel
from lamina.script_state.content import is_plain_tensor
from lamina.script_state.names import methods_of
from lamina.script_state.uses import uses


def whole(model: PartitionedModel) -> list[nn.Module]:
    """Modules of this rank that are to have their arguments before they begin: the trace saw them write state, or they
    have buffers, or other tensors, which they may write."""
    nodes = set(model.writes.nodes if model.writes else ())
    seen = {id(model.tree.modules[node]) for node in nodes}
    return [
        module
        for module in model.tree.modules[0].modules()
        if model.elsewhere(module) is None and not _is_torchs(module) and (id(module) in seen or _may_write(module))
    ]


def late(model: PartitionedModel) -> set[int]:
    """Ids of the modules whose callers are to wait for them, for they update a buffer with what comes back."""
    modules = model.tree.modules
    if model.writes is not None:
        updating: Iterable[nn.Module] = (modules[node] for node in model.writes.late)
    else:  # nobody has seen the order of things
        updating = (module for module in modules if module._modules and _updates_buffers(module))
    return {id(part) for module in updating for part in module.modules() if part is not module}


def _may_write(module: nn.Module) -> bool:
    return bool(module._buffers) or any(map(is_plain_tensor, vars(module).values())) or _updates_buffers(module)


def _updates_buffers(module: nn.Module) -> bool:
    found = [use for method in methods_of(type(module)) for use in uses(method.__code__) or ()]
    # A scripted module's `_buffers` cannot be iterated.
    buffers = {name for part in module.modules() for name, _ in part.named_buffers(recurse=False)}
    return any(use.writes and use.name in buffers for use in found)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
