# SPDX-License-Identifier: Apache-2.0
"""Names that scripts and command lines written for Composer use."""

import importlib
from typing import Any

_MODULES = {"algorithms", "callbacks", "core", "loggers", "models", "optim", "trainer", "utils"}
_NAMES = {
    "Algorithm",
    "Callback",
    "ComposerModel",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Logger",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
}
__all__ = list(_NAMES)
__version__ = "0.12.1"  # whose names they are


def __getattr__(name: str) -> Any:
    """Imports torch only for who asks for one of these: the launcher starts without it."""
    if name in _MODULES:
        return importlib.import_module(f"composer.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'composer' has no attribute {name!r}")
    import lamina.trainer

    return getattr(lamina.trainer, name)
