# SPDX-License-Identifier: Apache-2.0
"""The names that scripts import from here, for type checkers: see lamina/composer/paths.py."""

from lamina.composer.engine import Engine as Engine
from lamina.composer.evaluator import Evaluator as Evaluator
from lamina.composer.huggingface import HuggingFaceModel as HuggingFaceModel
from lamina.composer.logger import Logger as Logger
from lamina.composer.model import ComposerClassifier as ComposerClassifier
from lamina.composer.model import ComposerModel as ComposerModel
from lamina.composer.precision import Precision as Precision
from lamina.composer.precision import get_precision_context as get_precision_context
from lamina.composer.state import State as State
from lamina.composer.trainer import Trainer as Trainer
from lamina.trainer.data_spec import DataSpec as DataSpec
from lamina.trainer.data_spec import ensure_data_spec as ensure_data_spec
from lamina.trainer.events import Algorithm as Algorithm
from lamina.trainer.events import Callback as Callback
from lamina.trainer.events import Event as Event
from lamina.trainer.time import Time as Time
from lamina.trainer.time import Timestamp as Timestamp
from lamina.trainer.time import TimeUnit as TimeUnit
from lamina.trainer.time import ensure_time as ensure_time
