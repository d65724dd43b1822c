# SPDX-License-Identifier: Apache-2.0
"""Models that were built on the meta device, without memory and values."""

import torch
from torch import nn

from lamina.composer.wrap_policy import children_to_wrap
from lamina.deferred_init.delayed import is_delayed
from lamina.errors import ConfigError


def give_values(model: nn.Module) -> None:
    """Gives memory to parameters and buffers on the meta device, and first values as their root says: by
    `param_init_fn(module)` for each module, else by their modules' `reset_parameters()`.

    Errors:
        ConfigError: a module without either.
    """
    for root_name, root in children_to_wrap(model):
        without = {name: module for name, module in root.named_modules(prefix=root_name) if _give_memory(module)}
        if without and callable(getattr(root, "param_init_fn", None)):
            root.apply(root.param_init_fn)
            continue
        for name, module in without.items():
            if not callable(getattr(module, "reset_parameters", None)):
                raise ConfigError(
                    f"{name}, a {type(module).__name__}, is on the meta device, and nothing says its first values: "
                    f"give it a reset_parameters(), or {root_name} a param_init_fn(module)"
                )
            module.reset_parameters()


def _give_memory(module: nn.Module) -> bool:
    """Gives a module's own parameters and buffers memory, and tells whether some had none. They stay the same objects,
    for ties and optimizers."""
    on_meta = [
        each
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if each.is_meta and not is_delayed(each)
    ]
    for tensor in on_meta:
        filled = torch.zeros_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
        filled = nn.Parameter(filled, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
        vars(filled).update(vars(tensor))
        torch.utils.swap_tensors(tensor, filled)
    return bool(on_meta)
