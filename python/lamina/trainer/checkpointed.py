# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of the modules that a model chooses."""

import warnings

from torch import nn

from lamina.activation_checkpointing.api import set_activation_checkpointing
from lamina.modules.tree import is_called
from lamina.trainer.wrap_policy import asked_of, children_to_wrap


def checkpoint_chosen(model: nn.Module) -> list[str]:
    """Checkpoints modules of a ComposerModel wherever they are called; every rank does so, with a plain model.

    The attribute `_activation_checkpointing` of a module decides, else `activation_checkpointing_fn(module)` of the
    model's child that it is in. Where none is chosen, a warning says so.

    Returns:
        The names of the modules that were chosen.
    """
    chosen: dict[str, nn.Module] = {}
    for child_name, root in children_to_wrap(model):
        for name, module in root.named_modules(prefix=child_name):
            if is_called(module) and asked_of(module, "_activation_checkpointing", root, "activation_checkpointing_fn"):
                chosen[name] = module
    for module in chosen.values():  # outer ones first, for a Sequential takes its children's mark away
        runs_its_children = getattr(type(module), "forward", None) is nn.Sequential.forward
        set_activation_checkpointing(module, strategy="contiguous" if runs_its_children else "each")
    if not chosen:
        warnings.warn(
            "activation_checkpointing: no module is chosen: set module._activation_checkpointing = True, or give the "
            "model that a ComposerModel holds a method activation_checkpointing_fn(module)",
            stacklevel=2,
        )
    return list(chosen)
