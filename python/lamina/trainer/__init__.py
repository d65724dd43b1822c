# SPDX-License-Identifier: Apache-2.0
"""The loop of a training. `lamina.composer.paths` offers scripts Composer's names here, too."""

from lamina.trainer.data_spec import DataSpec, ensure_data_spec
from lamina.trainer.events import Algorithm, Callback, Event
from lamina.trainer.time import Time, Timestamp, TimeUnit, ensure_time

__all__ = [
    "Algorithm",
    "Callback",
    "DataSpec",
    "Event",
    "Time",
    "TimeUnit",
    "Timestamp",
    "ensure_data_spec",
    "ensure_time",
]
