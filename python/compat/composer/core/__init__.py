# SPDX-License-Identifier: Apache-2.0
from lamina.trainer import (
    Algorithm,
    Callback,
    DataSpec,
    Engine,
    Evaluator,
    Event,
    Precision,
    State,
    Time,
    Timestamp,
    TimeUnit,
    ensure_data_spec,
    ensure_time,
    get_precision_context,
)

__all__ = [
    "Algorithm",
    "Callback",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Precision",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "ensure_data_spec",
    "ensure_time",
    "get_precision_context",
]
