# SPDX-License-Identifier: Apache-2.0
"""Marked modules become others, when their model is wrapped: see `registry`. The outermost ones do."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.script_state.names import HOOKS
from lamina.tensor_parallel import layers, marks, registry
from lamina.tensor_parallel.correspondence import Correspondence, matched
from lamina.tensor_parallel.registry import DistributedModule, Registration, UnfitError
from lamina.util.module_names import is_in_module
from lamina.util.told import tell

_HOOKS = "_lamina_hooks"  # of a module that has become another: its Registration
_GONE = "_lamina_replaced"  # of a parameter that the model had before

Known = Callable[[nn.Module], Registration | None]
CutParameter = Callable[[nn.Parameter, Callable[[torch.Tensor], list[torch.Tensor]]], list[nn.Parameter]]


@dataclass
class Replaced:
    """A model whose marked modules have become others.

    Attributes:
        root: itself, which may be another one.
        rows: the correspondences of what has been replaced, by its name.
        modules: pairs of those that have been replaced, or were in one, and those in their places.
    """

    root: nn.Module
    rows: dict[str, Correspondence] = field(default_factory=dict)
    modules: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)


def replace(root: nn.Module, session: _lamina.Session, known: Known, cut: CutParameter) -> Replaced:
    """Puts others into the places of marked modules, in place. Nothing is changed unless all of them can be made.

    Args:
        known: what lamina has for modules of classes that nobody has registered, and the correspondence of those that
            were registered with the same class, without one.
        cut: makes parameters with parts of the value of another one.

    Errors:
        UsageError: a hook returns what it may not.
    """
    found: dict[str, tuple[nn.Module, Registration]] = {}
    made: dict[int, nn.Module] = {}
    whole: dict[str, str] = {}
    used: set[str] = set()
    for name, module, registration in _candidates(root, known, found):
        try:
            _require_plain(root, name, module)
            made[id(module)] = _made(name, module, registration, session.group_size("tp"), used, cut)
            found[name] = (module, registration)
        except UnfitError as error:
            whole[f"{name or 'the model'} ({type(module).__name__})"] = str(error)
    if session.rank == 0:
        for each, why in whole.items():
            tell(f"{each} keeps its class, and is sliced as it is: {why}")
        given = dict.fromkeys(name for module in root.modules() for name in marks.mark_of(module).config)
        if unused := [name for name in given if name not in used]:
            tell(f"these arguments of tensor_parallelism() have no effect: {', '.join(unused)}")
    for name, (module, registration) in found.items():
        _become(name, module, made[id(module)], registration)
    for holder in list(root.modules()):
        for key, part in holder._modules.items():
            if part is not None and id(part) in made:
                holder._modules[key] = made[id(part)]
    rows = {name: registration.correspondence for name, (_, registration) in found.items()}
    pairs = [pair for name, (module, _) in found.items() for pair in _pairs(module, made[id(module)], rows[name])]
    return Replaced(made.get(id(root), root), rows, pairs)


def where_replaced(parameter: torch.Tensor) -> str | None:
    """The name of the module that has become another one, for a parameter that it had; None for all others."""
    return getattr(parameter, _GONE, None)


def _gone(name: str, *args: Any, **kwargs: Any) -> None:
    raise UsageError(
        f"{name} was called, and became another module when its model was wrapped: call the model, or what has its "
        "place in it; a list or a variable of the script's still has the old one",
        code="tp-gone",
    )


class _Replacement:
    """A module in the place of another, which is called as that one was."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        registration = self.__dict__[_HOOKS]
        if registration.forward_hook is not None:
            found = registration.forward_hook(*args, **kwargs)
            args, kwargs = registry.require_pair(f"forward_hook of {type(self).__name__}", found)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return output if registration.return_hook is None else registration.return_hook(output)


def _candidates(root: nn.Module, known: Known, found: dict[str, Any]) -> Iterator[tuple[str, nn.Module, Registration]]:
    for name, module in root.named_modules():
        mark = marks.mark_of(module)
        if not mark.enabled or mark.is_led or any(is_in_module(name, each) for each in found):
            continue
        registration, ours = registry.registration_of(module), known(module)
        if registration is None:
            registration = ours if mark.replace else None
        elif ours is not None and ours.kind is registration.kind and not registration.correspondence:
            registration = dataclasses.replace(registration, correspondence=ours.correspondence)
        if registration is not None:
            yield name, module, registration


def _require_plain(root: nn.Module, name: str, module: nn.Module) -> None:
    for part in module.modules():
        if any(part.__dict__.get(kind) for kind in HOOKS):
            raise UnfitError(f"it has hooks, of a {type(part).__name__}")
    own = {id(each) for each in module.parameters()}
    for holder, parameter in root.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not is_in_module(holder, name):
            raise UnfitError(f"it shares parameters with {holder}")


def _made(
    name: str, module: nn.Module, registration: Registration, degree: int, used: set[str], cut: CutParameter
) -> nn.Module:
    """The module that takes another's place, with its values."""
    args, kwargs = registry.arguments_of(module, registration)
    kind = registration.kind
    if registration.init_hook is not None:
        found = registration.init_hook(*args, **kwargs)
        args, kwargs = registry.require_pair(f"init_hook of {type(module).__name__}", found)
    config = marks.mark_of(module).config
    signature = inspect.signature(kind)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{name or 'the model'} ({type(module).__name__}) cannot become a {kind.__name__}: {error}",
            code="tp-register",
        ) from error
    fitting = {key: value for key, value in config.items() if key in signature.parameters}
    used.update(fitting)
    bound.arguments.update(fitting)
    rows = registration.correspondence
    with torch.device("meta") if rows else contextlib.nullcontext():
        result = kind(*bound.args, **bound.kwargs)
    _require_heads(result, degree)
    if rows:
        _take_values(module, result, rows, cut)
    elif (first := next(module.parameters(), None)) is not None and not first.is_meta:
        result.to(device=first.device)
    return result


def _require_heads(module: nn.Module, degree: int) -> None:
    for part in module.modules():
        count = part.__dict__.get("num_attention_heads") if isinstance(part, DistributedModule) else None
        if isinstance(count, int) and count < degree:
            raise UnfitError(f"it has {count} attention heads, for {degree} ranks")


def _take_values(original: nn.Module, result: nn.Module, rows: Correspondence, cut: CutParameter) -> None:
    """Gives a module the parameters of another. A parameter that is neither turned round nor cut up stays the same
    object."""
    theirs = dict(original.named_parameters(remove_duplicate=False))
    ours = dict(result.named_parameters(remove_duplicate=False))
    taken: dict[int, nn.Parameter] = {}
    found = matched(rows, theirs)
    if left := {id(each) for each in theirs.values()} - {id(theirs[each]) for each in found}:
        name = next(each for each, parameter in theirs.items() if id(parameter) in left)
        raise UnfitError(f"a {type(result).__name__} has nothing for its {name}")
    for theirs_name, (row, names) in found.items():
        parameter = theirs[theirs_name]
        parts = [parameter] if len(names) == 1 and not row.transposed else cut(parameter, row.parts_of)
        for own, part in zip(names, parts, strict=True):
            if own not in ours or ours[own].shape != part.shape:
                raise UnfitError(f"its {theirs_name} does not fit {type(result).__name__}")
            taken[id(ours[own])] = part
    for part in result.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in taken:
                raise UnfitError(f"a {type(part).__name__} in its place would have no values for {key}")
            if parameter is not None:
                part._parameters[key] = taken[id(parameter)]


def _pairs(original: nn.Module, result: nn.Module, rows: Correspondence) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Modules, and those that have just their parameters, as far as there are such."""
    yield original, result
    names = {theirs: ours for theirs, (_, ours) in matched(rows, dict(original.named_parameters())).items()}
    below: dict[frozenset[str], nn.Module] = {}
    for place, part in result.named_modules():
        below.setdefault(frozenset(name for name, _ in part.named_parameters(place)), part)
    for place, part in original.named_modules():
        inside = frozenset(ours for name, _ in part.named_parameters(place) for ours in names.get(name, ()))
        if inside and inside in below:
            yield part, below[inside]


def _become(name: str, original: nn.Module, result: nn.Module, registration: Registration) -> None:
    """Makes a module one that stands for another."""
    kept = {id(each) for each in result.parameters()}
    for parameter in original.parameters():
        if id(parameter) not in kept:
            setattr(parameter, _GONE, f"{name or 'the model'} ({type(original).__name__})")
    original.__dict__["forward"] = functools.partial(_gone, f"{name or 'the model'} ({type(original).__name__})")
    result.train(original.training)
    result.__dict__[_HOOKS] = registration
    result.__class__ = layers.with_other_forward(_Replacement, type(result))
