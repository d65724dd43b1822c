# SPDX-License-Identifier: Apache-2.0
"""Attributes of torch's modules and classes in whose place others are."""

import os
import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import lamina

_OURS = os.path.dirname(lamina.__file__) + os.sep

Key = tuple[int, str]  # id of a module, a class, or a function that wraps another one; attribute


class Torchs:
    """The attributes of torch's modules and classes when this is made."""

    def __init__(self) -> None:
        self._before = {owner: held for owner, _, held in _owners()}

    def replaced(self) -> dict[Key, str]:
        """The names of what is one of our functions since, or was one; in classes also what has come in or gone."""
        found = {}
        for owner, name, now in _owners():
            before = self._before.get(owner, now)
            for attribute in now.keys() | before.keys():
                was, is_now = before.get(attribute), now.get(attribute)
                gone_or_new = isinstance(owner, type) and (attribute in now) != (attribute in before)
                if was is not is_now and (gone_or_new or _is_ours(was) or _is_ours(is_now)):
                    found[id(owner), attribute] = f"{name}.{attribute}"
        return found

    def rows(self, heading: str) -> dict[Key, str]:
        """The first column of the table under a heading in the docstring of lamina.torch_patches."""
        table = lamina.torch_patches.__doc__.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
        return {self._key(name): name for name in re.findall(r"^\| (torch\.\S+) \|", table, re.MULTILINE)}

    def _key(self, name: str) -> Key:
        *path, attribute = name.split(".")
        owner = sys.modules[path[0]]
        for part in path[1:]:
            owner = getattr(owner, part)
        value = vars(owner).get(attribute)
        return (id(value), "func") if _wrapped(value) and value in self._before else (id(owner), attribute)


def _owners() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """(owner, its name, its attributes) of torch's modules, classes, and functions that wrap another one."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        yield module, module_name, dict(vars(module))
        for name, value in list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__.partition(".")[0] == "torch":
                yield value, f"{module_name}.{name}", dict(vars(value))
            elif _wrapped(value):
                yield value, f"{module_name}.{name}", _wrapped(value)


def _wrapped(value: Any) -> dict[str, Any]:
    """The function inside one made by torch's `no_grad` and the like, which keep what they wrap as `func`."""
    if type(value) is not FunctionType or "func" not in value.__code__.co_freevars:
        return {}
    return {"func": value.__closure__[value.__code__.co_freevars.index("func")].cell_contents}


def _is_ours(value: Any) -> bool:
    value = _wrapped(value).get("func", value)
    value = getattr(value, "__func__", value)  # of a classmethod
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(_OURS)
