# SPDX-License-Identifier: Apache-2.0
"""Numbers that modules count in attributes, and compute with."""

from torch import nn

from lamina.script_state.kinds import is_of_the_script
from lamina.script_state.names import Names
from lamina.script_state.uses import Use, uses


def reads_counts(root: nn.Module) -> bool:
    """Returns whether forwards read a number that they count in an attribute of a module, as far as their source tells.
    It is the same on all ranks that have built the same model.

    Args:
        root: the model, before its first step.
    """
    modules = list(root.modules())
    numbers = {name for module in modules for name, value in vars(module).items() if isinstance(value, (int, float))}
    found = [use for use in _uses(modules) if use.name in numbers]
    updates = {use for use in found if use.reads and use.writes and use.certain}  # a call changes no number it is given
    return any(use.reads and use not in updates and use.name in {each.name for each in updates} for use in found)


def _uses(modules: list[nn.Module]) -> list[Use]:
    """Uses in forwards of modules of the script, and in what they call."""
    names = Names(modules)
    forwards = [module.forward for module in modules if is_of_the_script(type(module))]
    functions = {function for forward in forwards for function in names.functions(forward)}
    return [use for function in functions for use in uses(function.__code__) or ()]
