# SPDX-License-Identifier: Apache-2.0
"""Paths of Composer's modules, from which scripts import. Modules of the Trainer are lamina's. All else may be
imported, too, for scripts import more than they use: its use is an error."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from composer.places import PLACES

PACKAGES = {"algorithms", "callbacks", "core", "datasets", "devices", "functional", "loggers", "loss", "metrics"}
PACKAGES |= {"checkpoint", "distributed", "models", "optim", "profiler", "trainer", "utils"}


def offer(package: str, **modules: ModuleType) -> None:
    """Offers modules as those of a package, by these names."""
    for name, module in modules.items():
        path = f"{package}.{name}"
        sys.modules[path] = _Offered(path, module)
        vars(sys.modules[package])[name] = sys.modules[path]


class _Offered(ModuleType):
    def __init__(self, path: str, module: ModuleType):
        super().__init__(path, module.__doc__)
        vars(self).update(_module=module, _other=others(path), __path__=[])  # others may be below it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name) if hasattr(self._module, name) else self._other(name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)  # for scripts that replace something


def others(path: str) -> Any:
    """The `__getattr__` of a module: what it has not is a class that cannot be used."""

    def get(name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        return _NotThere(name, (), {"__module__": path, "_path": f"{path}.{name}"})

    return get


class _NotThere(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        raise cls._refusal()

    def __getitem__(cls, name: Any) -> Any:
        raise cls._refusal()

    def __iter__(cls) -> Any:
        raise cls._refusal()

    def _refusal(cls) -> Exception:
        from lamina.errors import ConfigError

        place = PLACES.get(cls._path.rpartition(".")[2], "leave it out, or bring it along in the script")
        return ConfigError(
            f"{cls._path} is not there: this `composer` is lamina's Trainer and what goes with it, without algorithms, "
            f"models, datasets and file stores of Composer: {place}"
        )


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        is_composers = first == "composer" and rest.split(".")[0] in PACKAGES
        return ModuleSpec(name, self, is_package=True) if is_composers else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = others(module.__name__)


sys.meta_path.append(_Finder())  # asked for what no file is of
