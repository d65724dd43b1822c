# SPDX-License-Identifier: Apache-2.0
"""Names that scripts and command lines written for Composer use."""

import importlib
from typing import Any

from composer.paths import PACKAGES

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
    if name in _NAMES:
        return getattr(importlib.import_module("lamina.trainer"), name)
    if name in PACKAGES:
        return importlib.import_module(f"composer.{name}")
    raise AttributeError(f"module 'composer' has no attribute {name!r}")
