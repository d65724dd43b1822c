# SPDX-License-Identifier: Apache-2.0
"""A model with sliced layers that is whole for a while, as it was before it was cut."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.tensor_parallel import layers
from lamina.tensor_parallel.classes import is_made

_WAS = "_lamina_was"  # of a module that computes with slices: a Was


@dataclass(frozen=True)
class Was:
    """A module before it was cut: its class, and attributes that have changed."""

    kind: type
    attributes: dict[str, Any]


def remember(module: nn.Module, names: tuple[str, ...] = ()) -> None:
    """Notes what a module is, before it changes, and these of its attributes."""
    was = module.__dict__.setdefault(_WAS, Was(type(module), {}))
    for name in names:
        was.attributes.setdefault(name, module.__dict__[name])


def set_class(module: nn.Module, kind: type) -> None:
    """Gives a module another class, in steps, too: it is ours that changes, and nothing of the script's."""
    object.__setattr__(module, "__class__", kind)


def kind_before(module: nn.Module) -> type:
    """The class of a module before it was cut."""
    was = module.__dict__.get(_WAS)
    return type(module) if was is None else was.kind


def attributes_before(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module before it was cut."""
    was = module.__dict__.get(_WAS)
    return vars(module) if was is None else vars(module) | was.attributes


@torch.no_grad()
def make_whole(root: nn.Module, session: _lamina.Session) -> Callable[[], None]:
    """Gives sliced layers whole parameters, and makes them what they were; collective over TP_GROUP. Returns what
    undoes it, with this rank's slices of the values that there are then."""
    slicings = layers.slicings(root)
    cut = [(each, slicings[id(each)], each.grad) for each in root.parameters() if id(each) in slicings]
    for parameter, slicing, _ in cut:
        parameter.grad = None
        parameter.data = session.whole_of(parameter.detach(), slicing)
    make_sliced = make_plain(root)

    def undo() -> None:
        make_sliced()
        for parameter, slicing, gradient in cut:
            parameter.grad = None
            parameter.data = session.slice_of(parameter.detach(), slicing)
            _lamina.guard_again(parameter)
            parameter.grad = gradient

    return undo


def forget(root: nn.Module) -> None:
    """Makes modules what they were before they were cut, for good, but for their parameters."""
    make_plain(root)
    for module in root.modules():
        module.__dict__.pop(_WAS, None)


@contextmanager
def plainly(root: nn.Module) -> Iterator[None]:
    """Inside, modules are what they were before they were cut, with wholes without memory in the places of slices."""
    slicings = layers.slicings(root)
    wholes = {
        id(each): nn.Parameter(torch.empty(layers.unsliced(each.shape, slicings[id(each)]), device="meta"))
        for each in root.parameters()
        if id(each) in slicings
    }
    places = [
        (module._parameters, name, parameter)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in wholes
    ]
    make_sliced = make_plain(root)
    try:
        for held, name, parameter in places:
            held[name] = wholes[id(parameter)]
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter
        make_sliced()


def changed_since(root: nn.Module) -> list[str]:
    """The names of modules that have another class than the one that they got when they were cut."""
    return [name for name, module in root.named_modules() if _WAS in module.__dict__ and not is_made(type(module))]


def make_plain(root: nn.Module) -> Callable[[], None]:
    """Makes modules what they were before they were cut, but for their parameters. Returns what undoes it."""
    now = [(module, type(module), dict(module.__dict__)) for module in root.modules()]
    for module, kind, attributes in now:
        was = attributes.get(_WAS, Was(kind, {}))
        for name in layers.NOTES:
            module.__dict__.pop(name, None)
        module.__dict__.update(was.attributes)
        set_class(module, was.kind)

    def undo() -> None:
        for module, kind, attributes in now:
            names = (*layers.NOTES, *attributes.get(_WAS, Was(kind, {})).attributes)
            module.__dict__.update({name: attributes[name] for name in names if name in attributes})
            set_class(module, kind)

    return undo
