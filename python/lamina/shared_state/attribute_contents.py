# SPDX-License-Identifier: Apache-2.0
"""Lists, dictionaries, objects and tensors in attributes of modules, which can change without that anybody sets the
attribute. A change counts as one of the attribute, under all names that its value has in the model."""

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from torch import nn

from lamina.script_state.aliases import Aliases
from lamina.script_state.content import Content, changed, is_changeable, is_plain_tensor
from lamina.script_state.names import OF_TORCH, used_in, words_in
from lamina.script_state.uses import uses
from lamina.shared_state.held_objects import HeldObjects, content_of
from lamina.shared_state.modules import Key, Modules

_PAST = {"__dict__", "__setattr__", "vars"}


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
        self._aliases: Aliases[tuple[nn.Module, str]] = Aliases(with_tensors=False)
        self._used: dict[Key, nn.Module] = {}  # those of `_contents` that were read since, in a step
        self._past: dict[Key, nn.Module] = {}  # those that the script may set past `__setattr__`
        self._objects = HeldObjects()

    def hold_all(self, guard: Callable[[type, str], None]) -> None:
        """From now on uses of what is in attributes are noticed, by `guard`, and what the script sets in a module's
        `__dict__`."""
        words = {word for code in self._codes() if used_in(code) & _PAST for word in words_in(code)}
        for module in self._modules.all:
            for name in words & vars(module).keys() - OF_TORCH:
                guard(type(module), name)
                self._past[id(module), name] = module
        self.begin_step()
        contents = _Contents()
        for module, name, value in self._held():
            guard(type(module), name)
            self._contents[id(module), name] = contents.of(value)
            self._aliases.add((module, name), value)

    def begin_step(self) -> None:
        """A script may have set them since the last step, which is no change."""
        for key, module in self._past.items():
            self._contents[key] = content_of(vars(module).get(key[1]))

    def note_set(self, key: Key, value: Any) -> None:
        """An attribute was set in a step: it may hold what can change from now on."""
        if is_changeable(value):
            self._contents.setdefault(key, {})

    def look(self) -> None:
        """Touches the attributes whose content has changed since it was looked at last."""
        if not self._used and not self._past:
            return
        used, self._used = self._used | self._past, {}
        contents = _Contents()
        for key, module in used.items():
            value = vars(module).get(key[1])
            before, after = self._contents[key], contents.of(value)
            self._contents[key] = after
            if before == after:
                continue
            others = [(other, name) for other, name in self._aliases.ways(value) if (id(other), name) != key]
            if not others or changed(before, after) or not self._is_cache({key[1], *(name for _, name in others)}):
                for alias in [(module, key[1]), *others]:
                    self._touch(*alias)

    def _is_cache(self, names: set[str]) -> bool:
        """True for a dictionary in attributes of these names, to which several modules only add: each rank fills it for
        itself. Nothing is a cache that a function reads which never adds to it."""
        for code in self._codes():
            found = [use for use in uses(code) or () if use.name in names]
            if any(use.reads for use in found) and not any(use.writes for use in found):
                return False
        return True

    def use(self, module: nn.Module, name: str, value: Any, microbatch: int) -> None:
        """A microbatch reads an attribute."""
        key = id(module), name
        if key not in self._contents:
            return
        is_known = self._objects.used(value) or key in self._used or key in self._past
        if not is_known:  # a script may have changed it between steps
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
            if name not in OF_TORCH and (is_changeable(value) or is_plain_tensor(value))
        ]
        tensors: Aliases[nn.Module] = Aliases()
        for module, _, value in all_of:
            if is_plain_tensor(value):
                tensors.add(module, value)
        return [
            (module, name, value)
            for module, name, value in all_of
            if is_changeable(value) or len(set(map(id, tensors.ways_to_memory(value)))) > 1
        ]


class _Contents:
    """The contents of values in one look: of one that many modules hold, once."""

    def __init__(self):
        self._found: dict[int, tuple[Any, Content]] = {}

    def of(self, value: Any) -> Content:
        """Returns what `content_of` does."""
        if id(value) not in self._found:
            self._found[id(value)] = value, content_of(value)
        return self._found[id(value)][1]
