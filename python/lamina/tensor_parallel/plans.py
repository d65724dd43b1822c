# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that are sliced, and how: by plans, and by what is known of classes.

[Note: slicing plan] A layer cut by columns, "colwise", has some of the outputs, and each rank computes its own. One cut
by rows, "rowwise", has the inputs that such outputs are, and the ranks add what they compute. In between lies what each
rank has a part of: heads of attention, or inner features. A module around layers cut by columns that has heads gets
those of its rank: its numbers of heads and sizes are divided, and no head is torn.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lamina.errors import UsageError
from lamina.tensor_parallel import marks

STYLES = ("colwise", "rowwise")

# Layers of classes, by the class's module and name.
_KNOWN: dict[str, dict[str, str]] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": {
        "c_attn": "colwise",
        "q_attn": "colwise",
        "c_proj": "rowwise",
    },
    "transformers.models.gpt2.modeling_gpt2.GPT2MLP": {"c_fc": "colwise", "c_proj": "rowwise"},
}


@dataclass(frozen=True)
class Planned:
    """A layer that is to be sliced.

    Attributes:
        name: in the model.
        parent: the module that has it.
        style: one of STYLES.
    """

    name: str
    parent: nn.Module
    style: str


def planned(root: nn.Module) -> dict[str, Planned]:
    """The layers of a model that are to be sliced, by name, in the model's order. Of plans the innermost counts.

    Errors:
        UsageError: a plan names what is not there, or a style that is not known.
    """
    found: dict[str, Planned] = {}
    for name, module in root.named_modules():
        if not marks.is_marked(module):
            continue
        plan = marks.plan_of(module)
        styles = _known_of(module) if plan is None else _by_plan(module, plan)
        for below, style in styles.items():
            path = f"{name}.{below}" if name else below
            parent = root.get_submodule(path.rpartition(".")[0])
            if marks.is_marked(module.get_submodule(below)):
                found[path] = Planned(path, parent, style)
    order = {name: number for number, (name, _) in enumerate(root.named_modules())}
    return dict(sorted(found.items(), key=lambda each: order[each[0]]))


def marked_but_whole(root: nn.Module, sliced: Iterable[str]) -> list[str]:
    """The classes of marked modules with parameters of their own that are not sliced."""
    sliced = set(sliced)
    whole = {
        type(module).__name__: None
        for name, module in root.named_modules()
        if marks.is_marked(module) and name not in sliced and next(module.parameters(recurse=False), None) is not None
    }
    return list(whole)


def _known_of(module: nn.Module) -> dict[str, str]:
    for kind in type(module).__mro__:
        if (plan := _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            return {name: style for name, style in plan.items() if hasattr(module, name)}
    return {}


def _by_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UsageError(
                f'the plan of {type(module).__name__} has the style "{style}" for "{pattern}"'
                f"{_nearest(style, STYLES)}; known are {', '.join(STYLES)}",
                code="tp-plan",
            )
        matches = list(_matching(pattern, names))
        if not matches:
            raise UsageError(
                f'the plan of {type(module).__name__} has "{pattern}", which matches no module'
                f"{_nearest(pattern, dict.fromkeys(_as_pattern(name) for name in names))}",
                code="tp-plan",
            )
        styles.update(dict.fromkeys(matches, style))
    return styles


def _matching(pattern: str, names: Iterable[str]) -> Iterator[str]:
    matches = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*")))).fullmatch
    return (name for name in names if matches(name))


def _as_pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _nearest(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.4)
    return f', the nearest is "{near[0]}"' if near else ""
