# SPDX-License-Identifier: Apache-2.0
"""Paths of `lamina.trainer` from which scripts import what stands here. The loop imports none of it."""

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lamina import composer, trainer
from lamina.composer.engine import Engine
from lamina.composer.evaluator import Evaluator
from lamina.composer.huggingface import HuggingFaceModel
from lamina.composer.logger import Logger
from lamina.composer.model import ComposerClassifier, ComposerModel
from lamina.composer.precision import Precision, get_precision_context
from lamina.composer.state import State
from lamina.composer.trainer import Trainer
from lamina.trainer import events

_CLASSES = Engine, Evaluator, HuggingFaceModel, Logger, ComposerClassifier, ComposerModel, Precision, State, Trainer


class _Finder(MetaPathFinder, Loader):
    """Finds `lamina.trainer.schedulers`, of which there is no file, as `lamina.composer.schedulers`: one module with
    two names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{trainer.__name__}."):
            return None
        try:
            is_offered = importlib.util.find_spec(_here(name)) is not None
        except ModuleNotFoundError:  # of the package that it would be in
            return None
        return ModuleSpec(name, self) if is_offered else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_here(module.__name__))


def _here(name: str) -> str:
    return f"lamina.composer{name.removeprefix(trainer.__name__)}"


def _offer() -> None:
    sys.meta_path.insert(0, _Finder())  # before the one that would load a file a second time
    named = {each.__name__: each for each in (*_CLASSES, get_precision_context)}
    modules = {name: each for name, each in vars(composer).items() if isinstance(each, ModuleType)}
    vars(trainer).update(modules | named)
    trainer.__all__ = sorted({*trainer.__all__, *named})
    events.Engine = Engine


_offer()
