# SPDX-License-Identifier: Apache-2.0
"""The Trainer, and all that scripts make for it."""

from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.evaluator import Evaluator
from lamina.trainer.events import Algorithm, Callback, Engine, Event
from lamina.trainer.huggingface import HuggingFaceModel
from lamina.trainer.logger import Logger
from lamina.trainer.model import ComposerClassifier, ComposerModel
from lamina.trainer.precision import Precision, get_precision_context
from lamina.trainer.state import State
from lamina.trainer.time import Time, Timestamp, TimeUnit, ensure_time
from lamina.trainer.trainer import Trainer

__all__ = [
    "Algorithm",
    "Callback",
    "ComposerClassifier",
    "ComposerModel",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "HuggingFaceModel",
    "Logger",
    "Precision",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trainer",
    "ensure_data_spec",
    "ensure_time",
    "get_precision_context",
]
