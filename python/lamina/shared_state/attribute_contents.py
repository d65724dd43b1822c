# SPDX-License-Identifier: Apache-2.0
"""Lists, dictionaries, objects and tensors in attributes of modules, which can change without that anybody sets the
attribute. A change counts as one of the attribute, under all names that its value has in the model."""

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from lamina.shared_state.contents import Content, changed, is_changeable, is_plain_tensor, within
from lamina.shared_state.held_objects import HeldObjects, content_of
from lamina.shared_state.modules import Key, Modules

_TORCHS = frozenset(vars(nn.Module()))


class AttributeContents:
    """The content of attributes that hold what can change, as it was when last looked at.

    Args:
        modules: the model's.
        codes: gives the code of functions that run in a step.
        touch: notes that an attribute of a module has changed here.
    """

    def __init__(
        self, modules: Modules, codes: Callable[[], Iterable[CodeType]], touch: Callable[[nn.Module, str], None]
    ):
        self._modules, self._codes, self._touch = modules, codes, touch
        self._contents: dict[Key, Content] = {}
        self._aliases: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}  # by `_alias`: who hold it
        self._used: dict[Key, nn.Module] = {}  # those of `_contents` that were read since, in a step
        self._objects = HeldObjects()

    def hold_all(self, guard: Callable[[type, str], None]) -> None:
        """From now on uses of what is in attributes are noticed, which `guard` has noticed."""
        for module, name, value in self._held():
            guard(type(module), name)
            self._contents[id(module), name] = content_of(value)
            for each in within(value) or [value]:
                self._aliases.setdefault(_alias(each), (each, []))[1].append((module, name))

    def note_set(self, key: Key, value: Any) -> None:
        """An attribute was set in a step: it may hold what can change from now on."""
        if is_changeable(value):
            self._contents.setdefault(key, {})

    def look(self) -> None:
        """Touches the attributes whose content has changed since it was looked at last."""
        while self._used:
            key, module = self._used.popitem()
            value = vars(module).get(key[1])
            before, after = self._contents[key], content_of(value)
            self._contents[key] = after
            if before == after:
                continue
            found = (self._aliases.get(_alias(each), (each, []))[1] for each in within(value) or [value])
            others = [(other, name) for aliases in found for other, name in aliases if (id(other), name) != key]
            # A dictionary that several modules only add to is a cache, which each rank fills for itself.
            if not others or changed(before, after):
                for alias in [(module, key[1]), *others]:
                    self._touch(*alias)

    def use(self, module: nn.Module, name: str, value: Any, microbatch: int) -> None:
        """A microbatch reads an attribute."""
        key = id(module), name
        if key not in self._contents:
            return
        if not self._objects.used(value) and key not in self._used:  # a script may have changed it between steps
            self._contents[key] = content_of(value)
        self._used[key] = module
        self._objects.use(value, name, microbatch, self._codes, self._modules.path(module, name))

    def end_microbatch(self, microbatch: int) -> None:
        """Its step body is over."""
        self._objects.end_microbatch(microbatch)

    def end_step(self) -> None:
        """All bodies are over."""
        self._objects.end_step()

    def _held(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes that hold what can change, and tensors that several modules have."""
        theirs = [module for module in self._modules.all if not type(module).__module__.startswith("torch.")]
        all_of = [
            (module, name, value)
            for module in theirs
            for name, value in vars(module).items()
            if name not in _TORCHS and (is_changeable(value) or is_plain_tensor(value))
        ]
        holders: dict[int, set[int]] = {}
        for module, _, value in all_of:
            holders.setdefault(_alias(value), set()).add(id(module))
        return [each for each in all_of if is_changeable(each[2]) or len(holders[_alias(each[2])]) > 1]


def _alias(value: Any) -> int:
    """Names what changes together: one object, or tensors in one memory."""
    in_memory = is_plain_tensor(value) and value.layout is torch.strided and value.numel()
    return value.untyped_storage().data_ptr() if in_memory else id(value)
