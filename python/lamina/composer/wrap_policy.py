# SPDX-License-Identifier: Apache-2.0
"""Modules that a model chooses: units, whose parameters come and go together, and those that are checkpointed."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from lamina import _lamina
from lamina.activation_checkpointing.api import set_activation_checkpointing
from lamina.errors import ConfigError
from lamina.modules.tree import is_called


class Unit(NamedTuple):
    """A module, and the parameters of it that are in no unit inside of it."""

    name: str
    rule: str  # `_fsdp_wrap`, `fsdp_wrap_fn`, `min_params`, `root`; `whole`: no unit, they are not sharded
    parameters: dict[str, nn.Parameter]  # by their names in the model


def children_to_wrap(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a ComposerModel, but for metrics: each is a root, whose functions are asked."""
    torchmetrics = sys.modules.get("torchmetrics")  # a model that has metrics has imported it
    metrics = () if torchmetrics is None else (torchmetrics.Metric, torchmetrics.MetricCollection)
    return ((name, child) for name, child in model.named_children() if not isinstance(child, metrics))


def asked_of(module: nn.Module, attribute: str, root: nn.Module, function: str) -> str | None:
    """The rule by which a module is chosen: its attribute, else a True of the root's function. An empty string where
    the attribute says no, None where nobody says anything.

    Args:
        module: that may be chosen.
        attribute: of the module, which decides.
        root: whose function is asked else.
        function: its name.
    """
    if hasattr(module, attribute):
        return attribute if getattr(module, attribute) else ""
    ask = getattr(root, function, None)
    return function if callable(ask) and ask(module) else None


def units(model: nn.Module, min_params: float) -> list[Unit]:
    """The units of a ComposerModel, in the order of its modules.

    Children of the model are looked at from the inside out. The attribute `_fsdp_wrap` of a module decides; else it is
    a unit where its root's `fsdp_wrap_fn` says so, or where more than `min_params` parameters of it are in no unit yet.
    A root takes what remains; with `_fsdp_wrap=False` all of it stays whole. A module that nobody calls, such as a
    list, is none, and so is one for which no parameters remain.

    Returns:
        Units, and modules with parameters that stay whole. Each parameter of the model is in one of them, once.
    """
    parameters = dict(model.named_parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
    met: set[nn.Module] = set()
    asked = [("", True, None, False, list(range(len(parameters))))]
    for child_name, root in children_to_wrap(model):
        for name, module in root.named_modules(met, child_name):
            inside = [numbers[id(parameter)] for parameter in module.parameters()]
            asked.append((name, *_answers(module, root), inside))
    sizes = [parameter.numel() for parameter in parameters.values()]
    named = list(parameters.items())
    return [
        Unit(name, rule, dict(named[number] for number in held))
        for name, rule, held in _lamina.units_by_rules(asked, sizes, min_params)
    ]


def names_in(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """The names of all parameters in these modules of the model.

    Errors:
        ConfigError: one is not of the model.
    """
    own = set(model.modules())
    if others := [type(module).__name__ for module in modules if module not in own]:
        raise ConfigError(f"fsdp_config['ignored_modules']: {', '.join(others)}: it is no module of the model")
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in inside]


def _answers(module: nn.Module, root: nn.Module) -> tuple[bool, bool | None, bool]:
    """Tells whether a module is called, what its attribute says, and whether its root's function says yes."""
    if module is root:
        return True, bool(getattr(root, "_fsdp_wrap", True)), False
    if not is_called(module):
        return False, None, False
    rule = asked_of(module, "_fsdp_wrap", root, "fsdp_wrap_fn")
    return True, {"_fsdp_wrap": True, "": False}.get(rule), rule == "fsdp_wrap_fn"


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


def table(found: Sequence[Unit], checkpointed: Sequence[str], degree: int) -> str:
    """A table of units, with the bytes of their parameters on each of `degree` ranks; checkpointed modules follow.

    Args:
        found: units.
        checkpointed: names of modules.
        degree: over how many ranks units are sharded.
    """
    rows = [("module", "rule", "parameters", "bytes here", "checkpointed")]
    of_unit = {unit.name: unit for unit in found}
    for name in [*of_unit, *(name for name in checkpointed if name not in of_unit)]:
        unit = of_unit.get(name, Unit(name, "", {}))
        values = unit.parameters.values()
        size_of = _bytes_over(1 if unit.rule == "whole" else degree)
        count, size = (sum(map(measure, values)) for measure in (nn.Parameter.numel, size_of))
        rows.append(
            (name or "(the model)", unit.rule, f"{count:,}", f"{size:,}", "yes" if name in checkpointed else "")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _bytes_over(degree: int) -> Callable[[Any], int]:
    return lambda parameter: -(-parameter.numel() // degree) * parameter.element_size()
