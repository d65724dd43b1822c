# SPDX-License-Identifier: Apache-2.0
from lamina.trainer import (
    Algorithm,
    Callback,
    DataSpec,
    Engine,
    Evaluator,
    Event,
    State,
    Time,
    Timestamp,
    TimeUnit,
    ensure_data_spec,
    ensure_time,
)

__all__ = [
    "Algorithm",
    "Callback",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "ensure_data_spec",
    "ensure_time",
]
