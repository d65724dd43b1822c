# SPDX-License-Identifier: Apache-2.0
"""Paths of Composer's modules, from which scripts import, too: each is the module of lamina that has their names."""

import sys
from types import ModuleType


def offer(package: str, **modules: ModuleType) -> None:
    """Offers modules as those of a package, by these names."""
    for name, module in modules.items():
        sys.modules[f"{package}.{name}"] = module
        setattr(sys.modules[package], name, module)
