# SPDX-License-Identifier: Apache-2.0
"""Units of a model: the modules whose parameters come and go together."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

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
    the attribute says no, None where nobody says anything."""
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
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: dict[int, tuple[str, str]] = {}  # parameters in a unit: its module and rule
    for child_name, root in children_to_wrap(model):
        if not getattr(root, "_fsdp_wrap", True):
            _take(root, child_name, "whole", taken)
            continue
        for name, module in _inside_out(root, child_name):
            left = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in taken)
            if rule := _rule(module, root, left, min_params):
                _take(module, name, rule, taken)
        _take(root, child_name, "root", taken)
    _take(model, "", "whole", taken)
    found: dict[str, Unit] = {}
    for parameter in model.parameters():
        name, rule = taken[id(parameter)]
        found.setdefault(name, Unit(name, rule, {})).parameters[names[id(parameter)]] = parameter
    return [found[name] for name, _ in model.named_modules() if name in found]


def _inside_out(root: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The modules below a root, each after those inside of it."""
    found: dict[int, tuple[str, nn.Module]] = {}

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            if id(child) not in found:
                visit(child, f"{name}.{child_name}")
        found[id(module)] = name, module

    visit(root, prefix)
    return list(found.values())[:-1]


def _rule(module: nn.Module, root: nn.Module, left: int, min_params: float) -> str | None:
    if not is_called(module):
        return None
    rule = asked_of(module, "_fsdp_wrap", root, "fsdp_wrap_fn")
    return "min_params" if rule is None and left > min_params else rule


def _take(module: nn.Module, name: str, rule: str, taken: dict[int, tuple[str, str]]) -> None:
    for parameter in module.parameters():
        taken.setdefault(id(parameter), (name, rule))


def table(found: Sequence[Unit], checkpointed: Sequence[str], degree: int) -> str:
    """A table of units, with the bytes of their parameters on each of `degree` ranks; checkpointed modules follow."""
    rows = [("module", "rule", "parameters", "bytes here", "checkpointed")]
    of_unit = {unit.name: unit for unit in found}
    for name in [*of_unit, *(name for name in checkpointed if name not in of_unit)]:
        unit = of_unit.get(name, Unit(name, "", {}))
        values = unit.parameters.values()
        count, size = (sum(map(measure, values)) for measure in (nn.Parameter.numel, _bytes_over(degree)))
        rows.append(
            (name or "(the model)", unit.rule, f"{count:,}", f"{size:,}", "yes" if name in checkpointed else "")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _bytes_over(degree: int) -> Callable[[Any], int]:
    return lambda parameter: -(-parameter.numel() // degree) * parameter.element_size()
