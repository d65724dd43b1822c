# SPDX-License-Identifier: Apache-2.0
"""The modules of a model, as the engine reads them to plan which layers are sliced, and how: see [Note: slicing plan]
of lamina/tensor_parallel/plans.h."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lamina import _lamina
from lamina.tensor_parallel import layers, marks
from lamina.tensor_parallel.registry import DistributedModule

STYLE_OF_ITSELF = "_lamina_style"  # an attribute of layers that are sliced wherever they are
WHOLE = "replicate"
_INNER = ("base_layer", "original_module")  # names under which wrappers have what they wrap
_MOST = 2**63  # of the engine's numbers


@dataclass(frozen=True)
class Plan:
    """The layers of a model that are to be sliced, in the engine's rows.

    Attributes:
        rows: of the model's modules, and the names of these with their numbers.
        modules: of the model; rows have their numbers.
        parents: those that compute with what layers give.
        layers: in the model's order.
        elsewhere: layers of these that are in other modules, too.
        tied: the names of each parameter that several modules have.
    """

    rows: tuple[list[_lamina.ModelModule], list[tuple[str, int]]]
    modules: list[nn.Module]
    parents: dict[int, _lamina.ParentModule]
    layers: list[_lamina.PlannedLayer]
    elsewhere: list[_lamina.PlannedLayer]
    tied: list[list[str]]


def plan_of(root: nn.Module, degree: int = 1, in_parts: bool = False) -> Plan:
    """The layers of a model that are to be sliced.

    Args:
        degree: over how many ranks.
        in_parts: whether activations between layers of stacks lie in parts of positions: see [Note: positions].

    Errors:
        UsageError: a plan names what is not there, or a style that is not known.
    """
    modules = list(root.modules())
    numbers = {id(module): number for number, module in enumerate(modules)}
    names = [(name, numbers[id(module)]) for name, module in root.named_modules(remove_duplicate=False)]
    rows = [_row_of(module, in_parts) for module in modules]
    for module, row in zip(modules, rows, strict=True):
        row.wrapped = _wrapped(module, numbers)
    plan = Plan((rows, names), modules, *_lamina.plan_layers(rows, names, degree, in_parts))
    for number, parent in plan.parents.items():
        parent.numbers = {name: value for name, value in modules[number].__dict__.items() if _is_number(value)}
    for row in (*plan.layers, *plan.elsewhere):
        _read_layer(row, modules[row.layer])
        if row.said_heads:
            row.set_said_heads(_number_under(modules[row.parent], row.said_heads))
    return plan


def _row_of(module: nn.Module, in_parts: bool) -> _lamina.ModelModule:
    kinds = type(module).__mro__
    row = _lamina.ModelModule(type(module).__name__, [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds])
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    row.parameters = [(name, id(parameter)) for name, parameter in own]
    row.in_features = module.in_features if type(module) is nn.Linear else 0
    row.reaches_base = layers.reaches_base(module)
    row.has_variant = bool(getattr(module, "lora_variant", None))
    row.own_style = getattr(module, STYLE_OF_ITSELF, None) or ""
    if isinstance(module, DistributedModule):
        row.set_own_plan(_rows(module.slicing_plan), _rows(module.positions_plan) if in_parts else [], module.is_stack)
    mark = marks.mark_of(module)
    row.is_marked, row.is_replaced = mark.enabled, mark.replace
    if (plan := marks.plan_of(module)) is not None:
        row.plan = _rows(plan)
    heads = marks.said_heads(module)
    if heads is not None:
        row.set_heads(*((heads, 0) if isinstance(heads, str) else ("", min(heads, _MOST - 1))))
    if mark.enabled and isinstance(plan := getattr(module, "_tp_plan", None), Mapping):
        row.transformers_plan = _rows(plan)
    return row


def _wrapped(module: nn.Module, numbers: dict[int, int]) -> tuple[str, int] | None:
    """The layer in a wrapper, which peft's may have by a property: its name there, and its number."""
    for name in _INNER:
        if isinstance(layer := getattr(module, name, None), nn.Module) and id(layer) in numbers:
            return name, numbers[id(layer)]
    return None


def _rows(styles: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(str(name), str(style)) for name, style in styles.items()]


def _read_layer(row: _lamina.PlannedLayer, layer: nn.Module) -> None:
    row.has_own_forward = layers.has_own_forward(layer)
    if row.kind == _lamina.LayerKind.OTHER:
        return
    row.shape = list(layer.weight.shape)
    if row.kind != _lamina.LayerKind.EMBEDDING:
        row.has_bias = layer.bias is not None
        return
    row.padding = layer.padding_idx
    row.has_options = bool(layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse)


def _number_under(module: nn.Module, path: str) -> int:
    """The number of heads that a module has under a name, "config.heads"; 0 for none."""
    name, *below = path.split(".")
    value = module.__dict__.get(name)
    for each in below:
        value = getattr(value, each, None)
    return value if _is_number(value) else 0


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST
