# SPDX-License-Identifier: Apache-2.0
from composer.core.types import Batch, PyTorchScheduler
from composer.paths import offer, others
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
    data_spec,
    ensure_data_spec,
    ensure_time,
    evaluator,
    events,
    get_precision_context,
    precision,
    state,
    time,
)

offer(__name__, algorithm=events, callback=events, engine=events, event=events)
offer(__name__, data_spec=data_spec, evaluator=evaluator, precision=precision, state=state, time=time)
__getattr__ = others(__name__)

__all__ = [
    "Algorithm",
    "Batch",
    "Callback",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Precision",
    "PyTorchScheduler",
    "State",
    "Time",
    "TimeUnit",
    "Timestamp",
    "ensure_data_spec",
    "ensure_time",
    "get_precision_context",
]
